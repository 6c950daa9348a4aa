"""The ops in plain torch, on any device: the oracle for the other backends and the path of last resort.

Weights are decoded a few hundred rows of one expert at a time, into memory that the whole call uses again, and are
multiplied before the next rows are decoded. E experts, N output features, K input features, S rows sorted by expert.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..mxfp4 import BLOCK_SIZE, dequantize_into


class Projection(NamedTuple):
    """A projection of all experts: blocks uint8 [E, N, K / 2], scales uint8 [E, N, K / 32], bias [E, N] or None."""

    blocks: Tensor
    scales: Tensor
    bias: Tensor | None


_DECODED_BYTES = 4 << 20
"""Decoded weights held at a time: few enough to be still in cache when they are multiplied."""


def grouped_linear(x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool, operand: str) -> Tensor:
    """Multiplies each expert's rows by its weights, or by their transpose.

    Args:
        x: float32 or float64 [S, K], or [S, N] with `transpose`; rows sorted by expert.
        blocks: uint8 [E, N, K / 2]. May be on another device than `x`: only experts that own rows are moved.
        scales: uint8 [E, N, K / 32], beside `blocks`.
        offsets: int64 [E + 1], expert e owns rows offsets[e] to offsets[e + 1].
        transpose: multiply by the weights [N, K] as they are (the gradient), not by their transpose [K, N].
        operand: what `x` may be rounded to. Here "int8" alone rounds, and not what is multiplied by the transpose.

    Returns:
        [S, N], or [S, K] with `transpose`, in the dtype of `x`; zeros in rows past offsets[E].
    """
    _, features, half = blocks.shape
    out = x.new_zeros(x.shape[0], 2 * half if transpose else features)
    if not features or not half:
        return out
    step = min(features, max(1, _DECODED_BYTES // (2 * half * x.element_size())))
    bounds = check_offsets(offsets, x.shape[0])
    if operand == "int8" and not transpose:
        x = round_int8(x)
    room, index = x.new_empty(step, 2 * half), x.new_empty(step * half, dtype=torch.int32)
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        codes, powers = blocks[expert].to(x.device), scales[expert].to(x.device)
        for top in range(0, features, step):
            rows = slice(top, min(top + step, features))
            weight = dequantize_into(codes[rows], powers[rows], room[: rows.stop - top], index)
            if transpose:
                torch.addmm(out[start:stop], x[start:stop, rows], weight, out=out[start:stop])
            else:
                torch.mm(x[start:stop], weight.t(), out=out[start:stop, rows])
    return out


def check_offsets(offsets: Tensor, rows: int) -> list[int]:
    """The offsets as a list; ValueError unless they rise from 0 or more to `rows` or less."""
    bounds: list[int] = offsets.tolist()
    if bounds != sorted(bounds) or bounds[0] < 0 or bounds[-1] > rows:
        raise ValueError(f"offsets {bounds} do not divide {rows} rows among experts")
    return bounds


def round_int8(x: Tensor) -> Tensor:
    """Rounds activations to 8 bits: in each 32 of a row [S, K] the largest magnitude is 127 steps, ties go to even."""
    groups = x.view(x.shape[0], -1, BLOCK_SIZE)
    step = groups.abs().amax(dim=-1, keepdim=True) / 127
    rounded = (groups / step).round() * step
    return torch.where((step > 0) & step.isfinite(), rounded, groups).view_as(x)
