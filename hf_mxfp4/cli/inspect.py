"""Show what a checkpoint holds without loading it: tensors by kind, dialect and dtype, memory, scales."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .. import inventory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="a folder of safetensors files, one of them, or a GGUF file")
    add("--deep", action="store_true", help="read all MXFP4 groups: range of scales; zero, saturated and 0xFF groups")
    add("--budget", action="store_true", help="the memory of weights, KV cache and workspace")
    add("--context", type=int, default=4096, metavar="N", help="tokens of a sequence, for --budget (default 4096)")
    add("--batch", type=int, default=1, metavar="B", help="sequences, for --budget (default 1)")
    add("--json", action="store_true", help="one JSON object in place of tables")
    add("--quiet", action="store_true", help="no progress bar")


def run(options: argparse.Namespace) -> int:
    """Prints what was found."""
    source = inventory.open_source(options.path)
    tensors = inventory.inventory(source)
    found: dict[str, inventory.Inventory | inventory.GroupReport | inventory.Budget] = {"inventory": tensors}
    if options.budget:
        found["budget"] = inventory.budget(tensors, options.context, options.batch)
    if options.deep:
        found["groups"] = inventory.groups(source, progress=not options.quiet)
    if options.json:
        print(json.dumps({name: part.to_dict() for name, part in found.items()}, indent=1))
    else:
        print("\n\n".join(map(str, found.values())))
    return 0
