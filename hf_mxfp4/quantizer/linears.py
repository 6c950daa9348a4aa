"""Conversions of single linear layers: those of experts that are a list of small MLPs, and packed ones beside experts.

N output features, K input features.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps

from .. import ops
from ..formats import CheckpointError
from ..linear import MXFP4Linear
from ..packed import dtype_names
from .task import KeepStack, Task, TaskConverter, check_shape, first, read


class LinearConverter(TaskConverter):
    """Fills one `MXFP4Linear`, from a dense weight or from its codes and scales."""

    __slots__ = ()
    fills = MXFP4Linear

    def __init__(self, task: Task) -> None:
        """For all layers of a load."""
        endings = [".weight"] if task.dialect is None else [task.dialect.blocks, task.dialect.scales]
        # The end of the string by another name than in other converters: the loader tells them apart by their patterns.
        super().__init__([rf"{ending}\Z" for ending in endings], ".weight_blocks", [KeepStack()], task)

    def fill(
        self, module: nn.Module, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The layer's weight; see `TaskConverter`."""
        assert isinstance(module, MXFP4Linear)
        if len(collected) != len(self.source_patterns):
            raise CheckpointError(f"{name}: the checkpoint has only one of its codes and scales")
        parts = [read(collected[pattern][0]) for pattern in self.source_patterns]
        if len(parts) == 2:
            tensor = self.task.decode(name, parts[0], parts[1])
        else:
            tensor = ops.quantize(parts[0], *self.task.rules, name=name)
        check_shape(tensor.blocks, tuple(module.packed("weight").blocks.shape), name)
        return self.task.hand_over(module, name, tensor, dtype_names(parts), "per expert")


class DecodeLinear(ConversionOps):  # type: ignore[misc]
    """Decodes a linear layer that is packed in the checkpoint and not one of the experts."""

    def __init__(self, task: Task) -> None:
        """For all layers of a load."""
        self.task = task

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeLinear:
        """Itself: it keeps nothing of a layer."""
        return self

    def convert(self, input_dict: dict[str, Any], source_patterns: list[str], **kwargs: Any) -> dict[str, Tensor]:
        """The dense weight [N, K] in the parameter's dtype, from its codes and scales.

        Raises:
            CheckpointError: codes without scales, or the reverse.
        """
        name = kwargs["full_layer_name"]
        if len(input_dict) != len(source_patterns):
            raise CheckpointError(f"{name}: the checkpoint has {', '.join(input_dict)} without its other half")
        packed, scale = (first({pattern: input_dict[pattern]}) for pattern in source_patterns)
        dtype = kwargs["model"].get_parameter(name).dtype
        return {name: self.task.decode(name, packed, scale).dequantize(dtype)}
