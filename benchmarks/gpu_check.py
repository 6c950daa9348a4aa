"""The Triton kernels on a GPU: bits, errors and speed, in one command of at most five minutes.

    python benchmarks/gpu_check.py [--json FILE] [--seconds 300] [--dry-run]

Six blocks, cheap and decisive ones first; each prints as it goes, and the JSON file is written anew after each, so that
a run that is killed leaves what it had. A block that no longer fits the time is skipped and listed.

    ceilings     what the GPU copies and multiplies, beside which the rest is put
    read-back    every code with every scale byte, bit for bit, through every kernel that decodes
    accuracy     forward and backward against float64; the same bits again
    decode       1 to 64 tokens, in CUDA graphs over weights that no cache holds, beside Transformers in bfloat16
    prefill      256 to 8192 tokens, likewise
    models       a tiny gpt-oss model from a folder, and all experts of gpt-oss-20b in one CUDA graph

Exit status 1 if any check failed. With --dry-run all of it runs at tiny sizes in Triton's interpreter on the CPU, where
times mean nothing. Kernels are compiled by several processes at once before they are needed, into Triton's own cache.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported by anything

import torch
from gpu.correctness import accuracy, accuracy_cases, read_back, read_back_cases
from gpu.device import FULL, TINY, Block, Device, Run, Sizes
from gpu.layers import shape_batch, shape_layer
from gpu.models import models
from gpu.speed import DECODE_CONFIGS, PREFILL_CONFIGS, ceilings, decode_speed, prefill_speed
from transformers.utils import logging

from hf_mxfp4.backends import triton
from hf_mxfp4.backends.triton import Config


def kernel_calls(device: Device, sizes: Sizes) -> Iterator[Callable[[], object]]:
    """Calls that between them need every kernel that the blocks do, in about equal parts."""
    for cases in (read_back_cases, accuracy_cases):
        for case in cases(device, sizes):
            yield case.run
    for given in sizes.shapes.values():
        layer = shape_layer(device, given, 0)
        for tokens in (*sizes.decode, *sizes.prefill):
            yield lambda layer=layer, given=given, t=tokens: layer.run(device, shape_batch(device, given, t))
        ways = ((sizes.decode[0], DECODE_CONFIGS), (sizes.prefill[-1] // 2, PREFILL_CONFIGS))
        for tokens, route, tile in ((n, r, t) for n, table in ways for r, tiles in table.items() for t in tiles):
            config = Config(route, tile, tile, tile)
            yield lambda layer=layer, given=given, t=tokens, c=config: layer.run(
                device, shape_batch(device, given, t), c
            )


def compile_share(device: Device, sizes: Sizes, share: int, of: int) -> int:
    """Runs every `of`-th of the calls, and says how many of them ran."""
    ran = 0
    for number, call in enumerate(kernel_calls(device, sizes)):
        if number % of == share:
            try:
                call()
                ran += 1
            except Exception:  # noqa: BLE001  # the block that needs it will say what is wrong
                continue
    device.synchronize()
    return ran


def ahead(run: Run, block: Block) -> None:
    """Compiles in several processes at once what the blocks need."""
    count = min(12, (os.cpu_count() or 2) - 1)
    if run.device.dry or count < 2:
        block.note("nothing is compiled ahead")
        return
    command = [sys.executable, str(Path(__file__).resolve()), "--share"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    processes = [subprocess.Popen([*command, f"{share}/{count}"], **pipes) for share in range(count)]
    stop = time.monotonic() + min(120.0, run.left() / 2)
    done = []
    for process in processes:
        try:
            done.append(process.communicate(timeout=max(0.1, stop - time.monotonic()))[0].strip() or "failed")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            done.append("stopped")
    block.note(f"calls that {count} processes ran: {', '.join(done)}")


BLOCKS: dict[str, Callable[[Run, Block], None]] = {
    "ceilings": ceilings,
    "ahead": ahead,
    "read-back": read_back,
    "accuracy": accuracy,
    "decode": decode_speed,
    "prefill": prefill_speed,
    "models": models,
}


def main() -> int:
    """Runs the command; 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write what is found")
    parser.add_argument("--seconds", type=float, default=300, help="the time that all of it may take")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, in Triton's interpreter on the CPU")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --dry-run needs none")
    if reason := triton.unavailable("cpu" if arguments.dry_run else "cuda"):
        parser.error(reason)
    device, sizes = Device(arguments.dry_run), TINY if arguments.dry_run else FULL
    if arguments.share:
        print(compile_share(device, sizes, *map(int, arguments.share.split("/"))))
        return 0
    logging.disable_progress_bar()
    run = Run(device, sizes, arguments.seconds, arguments.json)
    print(", ".join(f"{key} {value}" for key, value in run.where.items()), flush=True)
    for name, body in BLOCKS.items():
        run.block(name, body)
    skipped = [block.name for block in run.blocks if block.status == "skipped"]
    print(f"\n{'passed' if run.passed else 'FAILED'}; skipped: {', '.join(skipped) or 'none'}", flush=True)
    return 0 if run.passed else 1


if __name__ == "__main__":
    sys.exit(main())
