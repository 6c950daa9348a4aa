"""What every layout module shares: how a dialect is described, and the error for a checkpoint that does not fit one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

from ..mxfp4 import MXFP4Tensor


class CheckpointError(ValueError):
    """A checkpoint, or a tensor in it, that cannot be loaded as it is."""


class TensorInfo(NamedTuple):
    """A tensor as a safetensors header describes it: the format's name of its dtype, such as "BF16", and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Dialect(NamedTuple):
    """A layout on disk.

    Attributes:
        name: what reports and `save_format` call it.
        layout: "stacked", all experts in one tensor, or "per expert".
        blocks: how the name of a tensor of codes ends.
        scales: how the name of its tensor of scale bytes ends.
        block_dims: dimensions of a tensor of codes.
        decode: from a tensor of codes and one of scales to canonical ones.
    """

    name: str
    layout: Literal["stacked", "per expert"]
    blocks: str
    scales: str
    block_dims: int
    decode: Callable[[Tensor, Tensor], MXFP4Tensor]
