"""What huge pages are worth: one token through a layer whose weights lie on huge pages, small ones, or in a file.

The three hold the same bytes and take turns. The file is mapped by safetensors, as a stacked checkpoint is, and is in
the page cache.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from common import random_packed, random_routing, where
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_mxfp4 import configs, ops, pages
from hf_mxfp4.activations import Activation


def main() -> None:
    """Prints the medians and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="gpt-oss-20b")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    shape, generator = configs.shape(options.shape), torch.Generator().manual_seed(0)
    experts, hidden, middle = shape.num_experts, shape.hidden_size, shape.intermediate_size
    first, first_scales = random_packed(generator, experts, 2 * middle, hidden)
    second, second_scales = random_packed(generator, experts, hidden, middle)
    source = {"a": first.flatten(2), "b": first_scales, "c": second.flatten(2), "d": second_scales}
    routes = [random_routing(generator, 1, experts, shape.experts_per_token) for _ in range(16)]
    x = torch.randn(1, hidden, generator=generator).bfloat16()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "layer.safetensors")
        save_file(source, path)
        held = {
            "huge pages": {name: pages.empty(part.shape, part.device).copy_(part) for name, part in source.items()},
            "small pages": {name: torch.empty_like(part).copy_(part) for name, part in source.items()},
            "mapped file": load_file(path),
        }
        del source, first, second

        def call(name: str, round_: int) -> Tensor:
            ids, weights = routes[round_ % 16]
            a, b, c, d = held[name].values()
            projections = (ops.Projection(a, b, None), ops.Projection(c, d, None))
            return ops.experts_mlp(x, ids, weights, *projections, Activation(), operand="bfloat16")

        expected = call("huge pages", 0)
        if not all(torch.equal(call(name, 0), expected) for name in held):
            raise SystemExit("the three do not agree")
        taken: dict[str, list[float]] = {name: [] for name in held}
        for round_ in range(options.rounds):
            for name in held:
                start = time.process_time()
                call(name, round_)
                taken[name].append(time.process_time() - start)
    print(where())
    print(f"{options.shape}, one token, {options.rounds} rounds, process CPU time")
    for name, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times, taken["huge pages"], strict=True))
        median, best = 1e6 * statistics.median(times), 1e6 * min(times)
        figures = f"median {median:7.0f} us, best {best:7.0f}, ratio {ratio:.2f}"
        print(f"{name:12} {figures}")


if __name__ == "__main__":
    main()
