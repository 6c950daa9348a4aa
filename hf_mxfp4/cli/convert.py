"""Write a checkpoint anew with its experts in another MXFP4 dialect."""

from __future__ import annotations

import argparse

from ..convert import TARGETS, convert
from ..mxfp4 import SCALE_RULES, TIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where from, where to, and how."""
    parser.add_argument("source", metavar="SRC", help="folder of safetensors files with a config.json")
    parser.add_argument("target", metavar="DST", help="new folder, which appears whole or not at all")
    parser.add_argument("--to", required=True, choices=TARGETS, help="dialect of the experts")
    parser.add_argument("--from-dense", action="store_true", help="quantize dense experts")
    parser.add_argument("--requantize", action="store_true", help="make NVFP4 experts MXFP4, which loses precision")
    parser.add_argument("--scale-rule", default="mse", choices=SCALE_RULES, help="how blocks get their scales")
    parser.add_argument("--ties", default="even", choices=TIES, help="where weights halfway between two values go")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")


def run(options: argparse.Namespace) -> int:
    """Converts; run again after an interruption it goes on where it was."""
    done = convert(
        options.source,
        options.target,
        options.to,
        from_dense=options.from_dense,
        requantize=options.requantize,
        rule=options.scale_rule,
        ties=options.ties,
        progress=not options.quiet,
    )
    if not options.quiet:
        print(f"{done.path}: {done.experts} modules of experts as {options.to}, {done.nbytes / 1e9:.2f} GB")
    if not options.quiet and done.decoded:
        print(f"{done.decoded} layers beside the experts were decoded to bfloat16")
    if not options.quiet and done.error is not None:
        print(f"requantizing added a relative error of {done.error:.1e}")
    return 0
