"""The backward pass to the hidden states beside the forward pass, with frozen packed experts.

    OMP_NUM_THREADS=1 python benchmarks/backward.py

One layer in the shape of gpt-oss-20b or Qwen3-30B-A3B, random bytes. Three times take turns: the forward pass without
gradients (one call of the native kernel), the forward pass that a backward pass can follow, and the backward pass. The
gradient is compared with the reference backend's before anything is timed. The goal is 3 times the forward pass.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from typing import NamedTuple

import torch
from common import random_packed, random_routing, relative_error, where
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

from hf_mxfp4 import MXFP4Experts

SHAPES = {"gpt-oss-20b": (32, 4), "qwen3-30b-a3b": (128, 8)}


def layer(name: str, generator: torch.Generator) -> MXFP4Experts:
    """The packed experts of a layer, nothing in them to be trained."""
    with torch.device("meta"):
        stock = (
            GptOssExperts(GptOssConfig())
            if name == "gpt-oss-20b"
            else Qwen3MoeExperts(Qwen3MoeConfig(num_experts=128, hidden_size=2048, moe_intermediate_size=768))
        )
        module = MXFP4Experts(stock.to(torch.bfloat16)).to_empty(device="cpu")
    for proj in module.projection_names:
        held = module.packed(proj)
        blocks, scales = random_packed(generator, *held.blocks.shape[:2], 2 * held.blocks.shape[2])
        held.blocks.copy_(blocks.flatten(2))
        held.scales.copy_(scales)
        if (bias := getattr(module, f"{proj}_bias", None)) is not None:
            bias.data.normal_(std=0.1, generator=generator)
    return module.requires_grad_(False)


class Times(NamedTuple):
    """Process CPU seconds of the three."""

    forward: float
    recorded: float
    backward: float


def turn(module: MXFP4Experts, x: Tensor, routes: tuple[Tensor, Tensor], of: Tensor) -> Times:
    """One turn of each."""
    marks = [time.process_time()]
    with torch.no_grad():
        module(x, *routes)
    leaf = x.clone().requires_grad_(True)
    marks.append(time.process_time())
    out = module(leaf, *routes)
    marks.append(time.process_time())
    out.backward(of)
    marks.append(time.process_time())
    return Times(*(end - start for start, end in pairwise(marks)))


def gradient(module: MXFP4Experts, x: Tensor, routes: tuple[Tensor, Tensor], of: Tensor) -> Tensor:
    """The gradient to the hidden states."""
    tokens = x.clone().requires_grad_(True)
    module(tokens, *routes).backward(of)
    assert tokens.grad is not None
    return tokens.grad


def main() -> None:
    """Prints a row for each shape, number of tokens and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    print(where())
    columns = f"{'forward ms':>11}{'for grad':>10}{'backward':>10}{'/ forward':>11}{'error':>9}"
    print(f"{'shape':15}{'T':>5} {'dtype':10}{columns}")
    for name, (experts, active) in SHAPES.items():
        module = layer(name, generator)
        width = 2 * module.packed(module.projection_names[0]).blocks.shape[2]
        for tokens in options.tokens:
            routes = random_routing(generator, tokens, experts, active)
            for dtype in (torch.bfloat16, torch.float32):
                x, of = (torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(2))
                got = gradient(module, x[:4], tuple(part[:4] for part in routes), of[:4])
                module.requested_backend, chosen = "reference", module._choices
                module._choices = {}
                expected = gradient(module, x[:4].float(), tuple(part[:4] for part in routes), of[:4].float())
                module.requested_backend, module._choices = "auto", chosen
                error = relative_error(got, expected)
                if error > (1e-2 if dtype is torch.bfloat16 else 1e-5):
                    raise SystemExit(f"{name}, {tokens} tokens, {dtype}: the gradient is off by {error:.1e}")
                turns = [turn(module, x, routes, of) for _ in range(options.rounds)]
                a, b, c = (statistics.median(column) for column in zip(*turns, strict=True))
                ratio = statistics.median(each.backward / each.forward for each in turns)
                kind = str(dtype).removeprefix("torch.")
                figures = f"{1e3 * a:11.1f}{1e3 * b:10.1f}{1e3 * c:10.1f}{ratio:11.2f}{error:9.1e}"
                print(f"{name:15}{tokens:5d} {kind:10}{figures}", flush=True)


if __name__ == "__main__":
    main()
