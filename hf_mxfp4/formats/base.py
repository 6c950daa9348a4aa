"""What every layout module shares: how a dialect is described, and the error for a checkpoint that does not fit one.

A tensor of experts is called `{owner}.{container}[.{expert}].{proj}{ending}` in every dialect, such as
`model.layers.0.mlp` + `experts` + `7` + `gate_proj` + `.weight_packed`. A dialect says what stands in each place.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..mxfp4 import MXFP4Tensor, blocks_shape

ONE_EXPERT = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
"""The usual names of one expert's matrices."""


class CheckpointError(ValueError):
    """A checkpoint, or a tensor in it, that cannot be loaded as it is."""


class FormatError(CheckpointError):
    """A checkpoint with tensors in a low-bit format that is not read."""


class TensorInfo(NamedTuple):
    """A tensor as a safetensors header describes it: the format's name of its dtype, such as "BF16", and its shape."""

    dtype: str
    shape: tuple[int, ...]


class Name(NamedTuple):
    """A tensor of experts by what its name says, in the terms of Transformers' classes.

    Attributes:
        module: the experts module, such as `model.layers.0.mlp.experts`.
        expert: which, or None for all of them.
        proj: `gate_up_proj`, `gate_proj`, `up_proj` or `down_proj`, or what a model of its own calls it.
        part: the place of its ending in the dialect's `endings`; -1 for a bias.
    """

    module: str
    expert: int | None
    proj: str
    part: int


_ROWS: dict[str, Dialect] = {}


def _row_named(name: str) -> Dialect:
    return _ROWS[name]


def whole_blocks(blocks: Tensor, name: str, weights: int, size: int) -> Tensor:
    """Rows of blocks as blocks, uint8 [..., N, K / weights, size], by view where that can be.

    Args:
        blocks: uint8 [..., N, K / weights * size].
        name: of the format.
        weights: in a block.
        size: of a block in bytes.

    Raises:
        ValueError: another dtype, or rows that are not whole blocks.
    """
    if blocks.dtype != torch.uint8:
        raise ValueError(f"blocks have dtype {blocks.dtype}; expected torch.uint8")
    if blocks.ndim == 0 or blocks.shape[-1] % size:
        raise ValueError(
            f"blocks {list(blocks.shape)} are not whole blocks of {name}; expected [..., N, K / {weights} * {size}]"
        )
    *lead, width = blocks.shape
    return blocks.reshape(*lead, width // size, size)


@dataclass(frozen=True, eq=False)
class Dialect:
    """A layout on disk.

    Attributes:
        name: what reports and `save_format` call it.
        layout: "per expert": a tensor for each matrix of each expert; "split": one for all experts' gates, one for
            their ups; "stacked": one for all experts' gates and ups.
        endings: how the names of the tensors of one weight end: that of codes, that of scales, others.
        dtypes: of these tensors, as they are written; see `READ_AS` for what else is read.
        decode: from these tensors to canonical ones; to float32 weights [..., N, K] where `is_lossy`.
        encode: from canonical blocks, and from canonical scales, to these; None for a dialect that is only read.
        claims: whether a checkpoint's `quantization_config` says that its experts are in this dialect.
        config: the `quantization_config` of a checkpoint in it, given the names of linear layers beside the experts.
        dims: dimensions of a tensor of codes.
        bias: how the name of a bias ends.
        projections: the model's name of a projection by that in the file.
        container: what the module of all experts is called; others than the first are read and not written.
        codes_shape: that of codes, from that of scales.
        is_lossy: its weights are not MXFP4, and lose precision when they are made so.
    """

    name: str
    layout: Literal["per expert", "split", "stacked"]
    endings: tuple[str, ...]
    dtypes: tuple[str, ...]
    decode: Callable[..., Any]
    encode: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None
    claims: Callable[[Mapping[str, Any]], bool]
    config: Callable[[list[str]], dict[str, Any]]
    dims: int
    bias: str = ".bias"
    projections: Mapping[str, str] = field(default_factory=lambda: ONE_EXPERT)
    container: tuple[str, ...] = ("experts",)
    codes_shape: Callable[[tuple[int, ...]], tuple[int, ...]] = blocks_shape
    is_lossy: bool = False

    def __post_init__(self) -> None:
        """Keeps the row, so that copies and pickles of what refers to it refer to the same one."""
        _ROWS[self.name] = self

    def __reduce__(self) -> tuple[Callable[[str], Dialect], tuple[str]]:
        """By name: there is one of each."""
        return _row_named, (self.name,)

    def encoded(self, tensor: MXFP4Tensor) -> tuple[Tensor, Tensor]:
        """The tensors that a file of this dialect holds for a weight; ValueError if it is only read."""
        if self.encode is None:
            raise ValueError(f"{self.name} is read and not written")
        return self.encode[0](tensor.blocks), self.encode[1](tensor.scales)

    @property
    def blocks(self) -> str:
        """How the name of a tensor of codes ends."""
        return self.endings[0]

    @property
    def scales(self) -> str:
        """How the name of its tensor of scale bytes ends."""
        return self.endings[1]

    def siblings(self, name: str) -> tuple[str, ...]:
        """The names of all tensors of a weight, given that of its codes."""
        return tuple(name.removesuffix(self.blocks) + ending for ending in self.endings)

    def parse(self, name: str) -> Name | None:
        """What the name of a tensor of experts says; None for any other tensor."""
        match = self._pattern.fullmatch(name)
        if match is None:
            return None
        owner, expert, proj, ending = match["owner"], match["expert"], match["proj"], match["ending"]
        part = -1 if ending == self.bias else self.endings.index(ending)
        return Name(f"{owner}experts", None if expert is None else int(expert), self.projections.get(proj, proj), part)

    def spell(self, name: Name) -> str:
        """The name of a tensor in a file of this dialect; the reverse of `parse` for the usual names."""
        proj = next((ours for ours, theirs in self.projections.items() if theirs == name.proj), name.proj)
        number = "" if name.expert is None else f".{name.expert}"
        ending = self.bias if name.part < 0 else self.endings[name.part]
        return f"{name.module.removesuffix('experts')}{self.container[0]}{number}.{proj}{ending}"

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        number = r"(?:\.(?P<expert>\d+))" + ("" if self.layout == "per expert" else "{0}")
        # Models with code of their own call the matrices of one expert as they like.
        proj = r"[\w.]+?" if self.layout == "per expert" else "|".join(self.projections)
        endings = "|".join(map(re.escape, (*self.endings, self.bias)))
        containers = "|".join(self.container)
        return re.compile(rf"(?P<owner>(?:.*\.)?)(?:{containers}){number}\.(?P<proj>{proj})(?P<ending>{endings})")
