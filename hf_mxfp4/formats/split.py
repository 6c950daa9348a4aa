"""All experts of a matrix in one pair of tensors, gates and ups apart, as MLX writes them.

    mlx   {owner}.switch_mlp.{proj}.weight   uint32 [E, N, K / 8], eight codes a word, the first in the lowest bits
          {owner}.switch_mlp.{proj}.scales   uint8 [E, N, K / 32]

On a machine that stores the low byte first these words are the canonical bytes. Other layers of such a checkpoint are
packed in the same way, as [N, K / 8], or, as routers often are, in MLX's affine format of b bits and groups of g:

    {layer}.weight             uint32 [N, K * b / 32], the first value in the lowest bits
    {layer}.scales, .biases    floating point [N, K / g]; a weight is value * scale + bias
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..mxfp4 import BLOCK_SIZE, MXFP4Tensor, canonical
from .base import Dialect
from .stacked import unchanged

MODE = "mxfp4"


def decode(codes: Tensor, scales: Tensor) -> MXFP4Tensor:
    """Canonical tensors, by view.

    Args:
        codes: uint32, int32 or uint8 [..., K / 8] in four-byte words or [..., K / 2] in bytes.
        scales: uint8 [..., K / 32].

    Raises:
        TypeError: a dtype that does not hold codes.
        ValueError: shapes that do not fit each other.
    """
    return canonical(codes.view(torch.uint8) if codes.dtype in (torch.uint32, torch.int32) else codes, scales)


def decode_affine(codes: Tensor, scales: Tensor, biases: Tensor, columns: int) -> Tensor:
    """The float32 weights of a layer in MLX's affine format.

    Args:
        codes: uint32 or int32 [N, K * b / 32].
        scales: floating point [N, K / g].
        biases: the same.
        columns: K.

    Raises:
        ValueError: shapes that do not fit, or bits other than 2, 4 and 8.
    """
    bits = 32 * codes.shape[-1] / columns
    if bits not in (2, 4, 8) or columns % scales.shape[-1] or scales.shape != biases.shape:
        raise ValueError(
            f"codes {list(codes.shape)}, scales {list(scales.shape)} and biases {list(biases.shape)} are no affine"
            f" weights of {columns} columns in 2, 4 or 8 bits"
        )
    shifts = torch.arange(0, 8, int(bits), dtype=torch.uint8, device=codes.device)
    values = (codes.view(torch.uint8)[..., None] >> shifts & (2 ** int(bits) - 1)).flatten(-2).float()
    group = columns // scales.shape[-1]
    scaled: Tensor = values * scales.float().repeat_interleave(group, -1)
    return scaled + biases.float().repeat_interleave(group, -1)


def words(blocks: Tensor) -> Tensor:
    """Canonical blocks as words of eight codes, by view where the bytes lie together."""
    return blocks.contiguous().view(torch.uint32)


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("mode") == MODE and config.get("quant_method") in (None, "mlx")


def _config(dense: list[str]) -> dict[str, Any]:
    # MLX packs what a tensor of scales stands beside; False tells it of the layers that stay as they are.
    return {"group_size": BLOCK_SIZE, "bits": 4, "mode": MODE, **dict.fromkeys(dense, False)}


def _words_shape(scales: tuple[int, ...]) -> tuple[int, ...]:
    return (*scales[:-1], 4 * scales[-1])


MLX = Dialect(
    name="mlx",
    layout="split",
    endings=(".weight", ".scales"),
    dtypes=("U32", "U8"),
    decode=decode,
    encode=(words, unchanged),
    claims=_claims,
    config=_config,
    dims=3,
    container=("switch_mlp", "experts"),
    codes_shape=_words_shape,
)
