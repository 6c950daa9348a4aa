"""All experts of a projection in one pair of tensors, `_blocks` and `_scales`.

    gpt-oss    blocks uint8 [E, N, K / 32, 16], the 16 bytes of a block apart; its gate and up rows interleaved
    hf_mxfp4   blocks uint8 [E, N, K / 2], the canonical tensor itself; rows in the model class's own order
    both       scales uint8 [E, N, K / 32]

The bytes are the same, in the same order.
"""

from __future__ import annotations

from torch import Tensor

from ..mxfp4 import canonical
from .base import Dialect

GPT_OSS = Dialect("gpt-oss", "stacked", "_blocks", "_scales", 4, canonical)
HF_MXFP4 = Dialect("hf_mxfp4", "stacked", "_blocks", "_scales", 3, canonical)


def encode(blocks: Tensor, dialect: Dialect) -> Tensor:
    """The `_blocks` that `dialect` stores, from canonical ones, by view. Scales are stored as they are."""
    return blocks.unflatten(-1, (blocks.shape[-1] // 16, 16)) if dialect.block_dims == 4 else blocks
