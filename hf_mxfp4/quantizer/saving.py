"""What turns packed parameters into the tensors of a file.

Transformers turns the conversions of a load round to save with, so these are written as if for loading: sources are
the names in the file, targets those in the model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from ..formats import Dialect, stacked
from .task import KeepStack, first, scoped_like


class StackExperts(MergeModulelist):  # type: ignore[misc]
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


class StackedLayout(ConversionOps):  # type: ignore[misc]
    """Between canonical `_blocks` and those of a stacked dialect, for saving."""

    def __init__(self, dialect: Dialect, *, encode: bool) -> None:
        """Encodes to `dialect`, or decodes from it."""
        self.dialect = dialect
        self.encode = encode

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """The one tensor of codes, in the other shape."""
        blocks = first(input_dict)
        return {target_patterns[0]: stacked.encode(blocks, self.dialect) if self.encode else blocks.flatten(2)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The other direction."""
        return StackedLayout(self.dialect, encode=not self.encode)


def saving_conversions(original: WeightConverter, dialect: Dialect) -> list[WeightConverter]:
    """What saves packed projections under a model's own per-expert names, given its conversion for dense ones."""
    operations = [
        StackExperts(op.dim) if isinstance(op, MergeModulelist) else op
        for op in original.operations
        if not isinstance(op, Transpose)
    ]
    saved = []
    for theirs, ours in ((dialect.blocks, "_blocks"), (dialect.scales, "_scales")):
        sources = [pattern.removesuffix(".weight") + theirs for pattern in original._original_source_patterns]
        targets = [pattern + ours for pattern in original._original_target_patterns]
        saved.append(scoped_like(original, WeightConverter(sources, targets, list(operations))))
    return saved


def saving_stacks(projections: list[str], dialect: Dialect) -> list[WeightConverter]:
    """What saves packed projections, by the last two parts of their names, in a stacked dialect."""
    saved = []
    for name in projections:
        saved.append(WeightConverter([f"{name}_blocks"], [f"{name}_blocks"], [StackedLayout(dialect, encode=False)]))
        # Older versions of Transformers would else take scales for the dense projection that their name begins with.
        saved.append(WeightConverter([f"{name}_scales"], [f"{name}_scales"], [KeepStack()]))
    return saved


def saving_renamings(dialect: Dialect) -> list[WeightRenaming]:
    """What saves the layers of expert lists under the names of `dialect`, written as if for loading."""
    return [
        WeightRenaming(dialect.blocks.lstrip("."), "weight_blocks"),
        WeightRenaming(dialect.scales.lstrip("."), "weight_scales"),
    ]
