"""FP8 layers that stand beside MXFP4 experts: E4M3 weights, and scales for rows, blocks or the whole of them.

    weight   float8_e4m3fn [N, K]
    scales   float32, bfloat16, float8_e8m0fnu, or uint8 that are E8M0 bytes: [], [1], [N, 1] or [N / n, K / k]

A weight is its E4M3 value times the scale of its block, whose size follows from the shapes; blocks at the edges may
be cut. Source: OCP 8-bit Floating Point Specification (OFP8) v1.0, section 5; DeepSeek-V3's block of 128 x 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = "F8_E4M3"
SCALE_ENDINGS = (".weight_scale_inv", ".weight_scale", ".scale")
"""How tensors of scales are called beside `.weight`."""

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


_USUAL = 128


def decode(weight: Tensor, scales: Tensor, block: tuple[int, int] | None = None) -> Tensor:
    """The float32 weights.

    Args:
        weight: float8_e4m3fn [N, K].
        scales: see above.
        block: rows and columns that share a scale, where blocks at the edges may be cut; by default 128 of
            each, or what divides the shape evenly.

    Raises:
        TypeError: a weight of another dtype.
        ValueError: scales that do not fit the weight.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise TypeError(f"weight has dtype {weight.dtype}; expected torch.float8_e4m3fn")
    # E8M0 is a power of two and widens exactly; as bytes it is viewed first.
    scales = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
    values = weight.float()
    if scales.numel() == 1:
        return values * scales.reshape(())
    if scales.ndim == 1 and weight.ndim == 2 and len(scales) == len(weight):
        scales = scales[:, None]
    grid, shape = scales.shape, weight.shape
    if scales.ndim == weight.ndim == 2:
        found = [_size(n, count, side) for n, count, side in zip(shape, grid, block or (None, None), strict=True)]
        sizes = [size for size in found if size is not None]
        if len(sizes) == 2:
            for dim, size in enumerate(sizes):
                scales = scales.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
            return values * scales
    raise ValueError(f"weight {list(shape)} does not fit scales {list(grid)}; expected a grid of blocks")


def _size(length: int, count: int, side: int | None) -> int | None:
    """How many of `length` rows or columns share one of `count` scales; None if that does not fit."""
    # Where no block is given it is that of DeepSeek-V3, whose last one may be cut, before an even split.
    for size in (side, _USUAL, length // count if length % count == 0 else None):
        if size is not None and -(-length // size) == count:
            return size
    return None
