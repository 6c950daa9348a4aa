"""Conversions of single linear layers: those of experts that are a list of small MLPs, and packed ones beside experts.

N output features, K input features.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from .. import mxfp4
from ..formats import CheckpointError
from ..linear import MXFP4Linear
from .task import KeepStack, Task, check_shape, dtype_names, first, read, without_tensors


class LinearConverter(WeightConverter):  # type: ignore[misc]  # Transformers has no type marker
    """Fills one `MXFP4Linear`, from a dense weight or from its codes and scales."""

    __slots__ = ("task",)

    def __init__(self, task: Task) -> None:
        """For all layers of a load; the loader copies it for each."""
        endings = [".weight"] if task.dialect is None else [task.dialect.blocks, task.dialect.scales]
        # The end of the string by another name than in other converters: the loader tells them apart by their patterns.
        super().__init__([rf"{ending}\Z" for ending in endings], [".weight_blocks"], [KeepStack()])
        self.task = task

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearConverter:
        """A converter for the next layer; the task is shared."""
        return without_tensors(self)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """As stock, but only for keys of layers that are filled packed."""
        renamed, pattern = super().rename_source_key(source_key)
        module, _ = self.task.targets.get(renamed, (None, ""))
        return (renamed, pattern) if pattern is not None and isinstance(module, MXFP4Linear) else (source_key, None)

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Tensor]:
        """Fills the layer.

        Returns:
            `weight_blocks` and `weight_scales` by full name.

        Raises:
            CheckpointError: codes without scales or the reverse, or a shape that does not fit the model.
        """
        self.task.reports[:] = [loading_info]
        module, name = self.task.targets[layer_name]
        assert isinstance(module, MXFP4Linear)
        collected = {pattern: self.collected_tensors.pop(pattern) for pattern in list(self.collected_tensors)}
        if len(collected) != len(self.source_patterns):
            raise CheckpointError(f"{name}: the checkpoint has only one of its codes and scales")
        parts = [read(collected[pattern][0]) for pattern in self.source_patterns]
        if len(parts) == 2:
            tensor = self.task.decode(name, parts[0], parts[1])
        else:
            tensor = mxfp4.quantize(parts[0], *self.task.rules, name=name)
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
