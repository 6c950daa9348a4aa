"""Weights a second that the native quantizer rounds, beside the one in torch, whose bytes it gives.

    OMP_NUM_THREADS=1 python benchmarks/quantize.py

A matrix of 16 million normal weights in main memory, through `hf_mxfp4.quantize`, checked byte for byte before it is
timed. The goals are 0.5 G weights a second and core for `even` and `floor`, 0.2 for `mse`.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import where

from hf_mxfp4 import mxfp4, ops


def main() -> None:
    """Prints a row for each dtype and scale rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(where())
    print(f"{'dtype':10}{'rule':8}{'native G/s':>11}{'torch G/s':>11}{'ratio':>7}")
    source = torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float32):
        weight = source.to(dtype)
        for rule in mxfp4.SCALE_RULES:
            sides = (ops.quantize, mxfp4.quantize)
            first, second = (quantize(weight, rule) for quantize in sides)
            if not all(map(torch.equal, first, second)):
                raise SystemExit(f"{dtype}, {rule}: the bytes differ")
            taken: tuple[list[float], list[float]] = ([], [])
            for _ in range(options.rounds):
                for quantize, times in zip(sides, taken, strict=True):
                    start = time.process_time()
                    quantize(weight, rule)
                    times.append(time.process_time() - start)
            native, plain = (weight.numel() / statistics.median(times) / 1e9 for times in taken)
            kind = str(dtype).removeprefix("torch.")
            print(f"{kind:10}{rule:8}{native:11.2f}{plain:11.2f}{native / plain:7.1f}", flush=True)


if __name__ == "__main__":
    main()
