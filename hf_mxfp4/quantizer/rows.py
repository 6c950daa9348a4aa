"""Gate and up rows, joined into one projection and taken apart again.

E experts, I intermediate size: gates and ups [E, I, ...], the projection [E, 2 I, ...].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps

from .task import first


class JoinRows(ConversionOps):  # type: ignore[misc]  # Transformers has no type marker
    """Gates and ups to one projection, of weights or of biases; its reverse takes them apart."""

    def __init__(self, takes_turns: bool) -> None:
        """Rows take turns, or every gate of an expert comes before its ups."""
        self.takes_turns = takes_turns

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """The projection, from gates and ups in this order."""
        given = [pattern for pattern in source_patterns if pattern in input_dict] or list(input_dict)
        parts = [first({pattern: input_dict[pattern]}) for pattern in given]
        joined = torch.stack(parts, dim=2).flatten(1, 2) if self.takes_turns else torch.cat(parts, dim=1)
        return {target_patterns[0]: joined}

    @property
    def reverse_op(self) -> ConversionOps:
        """What takes them apart."""
        return SplitRows(self.takes_turns)


class SplitRows(ConversionOps):  # type: ignore[misc]
    """The reverse of `JoinRows`."""

    def __init__(self, takes_turns: bool) -> None:
        """See `JoinRows`."""
        self.takes_turns = takes_turns

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Tensor]:
        """Gates and ups, by the patterns of their names in this order."""
        joined, count = first(input_dict), len(target_patterns)
        if self.takes_turns:
            parts = [joined[:, i::count].contiguous() for i in range(count)]
        else:
            parts = [part.contiguous() for part in joined.chunk(count, dim=1)]
        return dict(zip(target_patterns, parts, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        """What joins them."""
        return JoinRows(self.takes_turns)
