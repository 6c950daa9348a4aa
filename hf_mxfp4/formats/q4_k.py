"""GGUF Q4_K, tensor type 12: integers of 4 bits with a scale and a minimum for each 32, 256 weights in 144 bytes.

    weight = d * scale * q - dmin * minimum,    q in 0..15, scale and minimum in 0..63

    bytes 0-1      d, float16, little-endian
    bytes 2-3      dmin, float16
    bytes 4-15     eight scales and eight minima of 6 bits, s[0] to s[11], for sub-blocks j of 32 weights:
                     j < 4   scale = s[j] & 63,                              minimum = s[j + 4] & 63
                     j >= 4  scale = s[j + 4] & 15 | (s[j - 4] >> 6) << 4,   minimum = s[j + 4] >> 4 | (s[j] >> 6) << 4
    bytes 16-143   four runs of 32 bytes; byte l of run r: weight l of sub-block 2r in its low nibble, weight l of
                   sub-block 2r + 1 in its high one

The codes are no floating-point numbers: 0101 is 5, where E2M1's is 3. Source: llama.cpp's `block_q4_K`, by the gguf
package, which this equals bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import whole_blocks

BLOCK_SIZE = 256
"""Weights in a block, which shares d and dmin."""

BLOCK_BYTES = 144
"""Bytes of a block."""

SUB_BLOCK_SIZE = 32
"""Weights that share a scale and a minimum."""


def decode(blocks: Tensor) -> Tensor:
    """The float32 weights of Q4_K blocks.

    Both products are exact in float32, d * scale * q with at most 21 significant bits and dmin * minimum with 17; their
    difference is rounded once.

    Args:
        blocks: uint8 [..., N, K / 256 * 144].

    Returns:
        float32 [..., N, K].

    Raises:
        ValueError: another dtype, or rows that are not whole blocks.
    """
    blocks = whole_blocks(blocks, "Q4_K", BLOCK_SIZE, BLOCK_BYTES)
    # A copy, since bytes in place may lie at an odd address.
    halves = blocks[..., :4].clone(memory_format=torch.contiguous_format).view(torch.float16)
    d, dmin = halves.float().split(1, dim=-1)
    scales, minima = _scales_and_minima(blocks[..., 4:16])
    runs = blocks[..., 16:].unflatten(-1, (4, SUB_BLOCK_SIZE))
    codes = torch.stack([runs & 15, runs >> 4], dim=-2).flatten(-3, -2)  # [..., 8, 32]
    weight = codes.float().mul_((d * scales).unsqueeze(-1)).sub_((dmin * minima).unsqueeze(-1))
    return weight.flatten(-3)


def _scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and the eight minima, uint8 [..., 8] each, of 12 bytes [..., 12]."""
    first, second, rest = packed.split(4, dim=-1)
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=-1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=-1)
    return scales, minima
