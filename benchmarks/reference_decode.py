"""The reference backend against Transformers' own decode of MXFP4, call by call.

    OMP_NUM_THREADS=1 python benchmarks/reference_decode.py

(a) Decode of one gpt-oss-20b expert matrix, 5760 x 2880, by `hf_mxfp4.dequantize` and by Transformers'
`convert_moe_packed_tensors`, in bfloat16 and in float32. (b) A whole experts call with one token and 4 active experts
of 32: `MXFP4Experts` against the same mathematics with each selected expert decoded by Transformers' function; its
weights in bfloat16, as Transformers decodes them, and in float32, as the reference backend computes.

Everything is verified before it is timed: decoded weights bit for bit, outputs within the rounding of the dtype.
Prints a table of process CPU milliseconds (medians; the two sides take turns, each in a process of its own) and the
ratio. The ratios within one run are what counts; the goal is 10 or more. Takes half a minute and 1 GB.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import torch
from common import paired, random_packed, random_routing, relative_error, where
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from hf_mxfp4 import MXFP4Experts, dequantize

EXPERTS, ACTIVE = 32, 4
PROJECTIONS = ("gate_up_proj", "down_proj")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


class Row(NamedTuple):
    """One comparison: median CPU seconds of a call."""

    what: str
    ours: float
    theirs: float


def packed_experts(generator: torch.Generator, width: int) -> MXFP4Experts:
    """The experts of one gpt-oss layer, hidden and intermediate size `width`, with random bytes and biases."""
    config = GptOssConfig(num_local_experts=EXPERTS, hidden_size=width, intermediate_size=width)
    with torch.device("meta"):
        module = MXFP4Experts(GptOssExperts(config), backend="reference").to_empty(device="cpu")
    with torch.no_grad():
        for proj in PROJECTIONS:
            held = module.packed(proj)
            blocks, scales = random_packed(generator, *held.blocks.shape[:2], 2 * held.blocks.shape[2])
            held.blocks.copy_(blocks.flatten(2))
            held.scales.copy_(scales)
            getattr(module, f"{proj}_bias").normal_(std=0.1, generator=generator)
    return module


def theirs_decoded(module: MXFP4Experts, proj: str, expert: int, dtype: torch.dtype) -> Tensor:
    """One expert's matrix [1, K, N] as Transformers decodes it."""
    blocks, scales = (part[expert : expert + 1] for part in module.packed(proj))
    return convert_moe_packed_tensors(blocks.view(*scales.shape, 16), scales, dtype=dtype)


def theirs_call(module: MXFP4Experts, x: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The experts of one token [1, H], with the selected ones decoded by Transformers, one at a time."""
    out = torch.zeros_like(x)
    for e, weight in zip(ids[0].tolist(), weights[0], strict=True):
        value = x.to(dtype)
        for proj in PROJECTIONS:
            value = value @ theirs_decoded(module, proj, e, dtype)[0] + getattr(module, f"{proj}_bias")[e].to(dtype)
            value = module._apply_gate(value) if proj == "gate_up_proj" else value
        out += (value * weight.to(dtype)).to(x.dtype)
    return out


def decode_rows(module: MXFP4Experts, repeats: int) -> list[Row]:
    """Part (a)."""
    blocks, scales = (part[0] for part in module.packed("gate_up_proj"))
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        calls = {
            "ours": lambda dtype=dtype: dequantize(blocks, scales, dtype),
            "theirs": lambda dtype=dtype: theirs_decoded(module, "gate_up_proj", 0, dtype),
        }
        taken = paired(calls, check_equal, repeats)
        rows.append(Row(f"decode {blocks.shape[0]} x {2 * blocks.shape[1]}, {name(dtype)}", **taken))
    return rows


def call_rows(module: MXFP4Experts, generator: torch.Generator, repeats: int) -> list[Row]:
    """Part (b)."""
    width = module.dense_shape("gate_up_proj")[1]
    x = torch.randn(1, width, generator=generator)
    ids, weights = random_routing(generator, 1, EXPERTS, ACTIVE)
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        token = x.to(dtype)
        calls = {
            "ours": lambda token=token: module(token, ids, weights),
            "theirs": lambda token=token, dtype=dtype: theirs_call(module, token, ids, weights, dtype),
        }
        taken = paired(calls, check_close, repeats)
        rows.append(Row(f"experts call, T = 1, {name(dtype)}", **taken))
    return rows


def check_equal(ours: Tensor, theirs: Tensor) -> None:
    """Decoded weights are the same bits: [N, K] of ours, [1, K, N] of theirs."""
    assert torch.equal(ours, theirs[0].mT), f"decoded weights differ in {ours.dtype}"


def check_close(ours: Tensor, theirs: Tensor) -> None:
    """Outputs agree within the rounding of their dtype."""
    error = relative_error(ours, theirs)
    assert error < TOLERANCE[ours.dtype], f"outputs differ by {error:.1e} in {ours.dtype}"


def name(dtype: torch.dtype) -> str:
    """The dtype's name without `torch.`."""
    return str(dtype).removeprefix("torch.")


def main() -> None:
    """Runs both parts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--width", type=int, default=2880, help="hidden and intermediate size, a multiple of 32")
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    print(where())
    module = packed_experts(generator, args.width)
    with torch.inference_mode():
        rows = decode_rows(module, args.repeats) + call_rows(module, generator, args.repeats)
    print(f"{'':32}{'hf_mxfp4 ms':>12}{'Transformers ms':>17}{'ratio':>8}")
    for row in rows:
        print(f"{row.what:32}{1e3 * row.ours:12.1f}{1e3 * row.theirs:17.1f}{row.theirs / row.ours:8.1f}")


if __name__ == "__main__":
    main()
