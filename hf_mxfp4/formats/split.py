"""All experts of a matrix in one pair of tensors, gates and ups apart, as MLX writes them.

    mlx   {owner}.switch_mlp.{proj}.weight   uint32 [E, N, K / 8], eight codes a word, the first in the lowest bits
          {owner}.switch_mlp.{proj}.scales   uint8 [E, N, K / 32]

On a machine that stores the low byte first these words are the canonical bytes. Other layers of such a checkpoint are
packed in the same way, as [N, K / 8].
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
