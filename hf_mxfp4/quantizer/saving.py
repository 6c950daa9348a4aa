"""What turns packed parameters into the tensors of a file.

Transformers turns the conversions of a load round to save with, so these are written as if for loading: sources are
the names in the file, targets those in the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)

from ..formats import Dialect
from .rows import JoinRows
from .task import first, scoped_like

_PARTS = ("_blocks", "_scales")


class StackExperts(MergeModulelist):  # type: ignore[misc]  # Transformers has no type marker
    """`MergeModulelist` whose reverse keeps dimensions of size one, which some versions of Transformers lose."""

    @property
    def reverse_op(self) -> ConversionOps:
        """A tensor for each expert."""
        return SplitExperts(self.dim)


class SplitExperts(SplitModulelist):  # type: ignore[misc]
    """The reverse of `StackExperts`."""

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Each expert's matrix, under the pattern's name with its number in the place of `*`."""
        matrices = {}
        for pattern, stack in input_dict.items():
            name = target_patterns[0] if len(input_dict) == 1 else pattern
            parts = first({pattern: stack}).unbind(self.dim)
            matrices.update({name.replace("*", str(e)): matrix for e, matrix in enumerate(parts)})
        return matrices


class Encode(ConversionOps):  # type: ignore[misc]
    """From canonical tensors to those that a dialect stores, each by itself."""

    def __init__(self, dialect: Dialect, part: int) -> None:
        """Takes the part of a weight: 0 for codes, 1 for scales."""
        self.dialect = dialect
        self.part = part

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """The tensors under the same names, or under the target's where no op before this one has named them."""
        assert self.dialect.encode is not None
        encode = self.dialect.encode[self.part]
        names = target_patterns if list(input_dict) == list(source_patterns) else list(input_dict)
        return {name: encode(first({name: value})) for name, value in zip(names, input_dict.values(), strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """What a load would do, which is done by other converters."""
        return Stored(self.dialect, self.part)


class Stored(ConversionOps):  # type: ignore[misc]
    """Stands for the tensors of a file in a conversion that is for saving alone."""

    def __init__(self, dialect: Dialect, part: int) -> None:
        """See `Encode`."""
        self.dialect = dialect
        self.part = part

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """The bytes as they are in memory."""
        tensors = {name: first({name: value}).view(torch.uint8) for name, value in input_dict.items()}
        return {name: bytes_.flatten(2) if bytes_.ndim > 3 else bytes_ for name, bytes_ in tensors.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """What a save does."""
        return Encode(self.dialect, self.part)


def saving_conversions(original: WeightConverter, dialect: Dialect) -> list[WeightConverter]:
    """What saves packed projections under a model's own per-expert names, given its conversion for dense ones."""
    operations = [
        StackExperts(op.dim) if isinstance(op, MergeModulelist) else op
        for op in original.operations
        if not isinstance(op, Transpose)
    ]
    saved = []
    for part, ours in enumerate(_PARTS):
        endings = dialect.endings[part]
        sources = [pattern.removesuffix(".weight") + endings for pattern in original._original_source_patterns]
        targets = [pattern + ours for pattern in original._original_target_patterns]
        converter = WeightConverter(sources, targets, [Stored(dialect, part), *operations])
        saved.append(scoped_like(original, converter))
    return saved


def saving_stacks(leaf: str, dialect: Dialect) -> list[WeightConverter]:
    """What saves a packed projection, by the last two parts of its name, in a stacked dialect."""
    owner, _, proj = leaf.rpartition(".")
    spelled = next(theirs for theirs, ours in dialect.projections.items() if ours == proj)
    # A conversion for scales too: older versions of Transformers would else take them for the dense projection that
    # their name begins with.
    return [
        WeightConverter([f"{owner}.{spelled}{dialect.endings[part]}"], [leaf + ours], [Stored(dialect, part)])
        for part, ours in enumerate(_PARTS)
    ]


def saving_parts(leaf: str, matrices: list[str], dialect: Dialect, takes_turns: bool) -> list[WeightConverter]:
    """What saves a packed projection as its matrices apart, under the usual names.

    Args:
        leaf: the last two parts of the projection's name.
        matrices: what it is made of, gates before ups.
        dialect: of all experts' matrices in one tensor, or of one tensor an expert.
        takes_turns: gate and up rows do, in the projection.
    """
    owner = leaf.rpartition(".")[0]
    owner = f"{owner}.*" if dialect.layout == "per expert" else dialect.container[0]
    merges = [StackExperts(0)] if dialect.layout == "per expert" else []
    joins = [JoinRows(takes_turns)] if len(matrices) > 1 else []
    return [
        WeightConverter(
            [f"{owner}.{matrix}{dialect.endings[part]}" for matrix in matrices],
            [leaf + ours],
            [Stored(dialect, part), *merges, *joins],
        )
        for part, ours in enumerate(_PARTS)
    ]


def saving_layers(dialect: Dialect) -> list[WeightTransform]:
    """What saves the layers of expert lists under the names of `dialect`, written as if for loading."""
    saved: list[WeightTransform] = []
    for part, ours in enumerate(_PARTS):
        source, target = dialect.endings[part].lstrip("."), f"weight{ours}"
        if dialect.dtypes[part] == "U8":
            saved.append(WeightRenaming(source, target))
        else:
            saved.append(WeightConverter([source], [target], [Stored(dialect, part)]))
    return saved
