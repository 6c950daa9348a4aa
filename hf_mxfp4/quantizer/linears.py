"""Conversions of single linear layers: those of experts that are a list of small MLPs, and low-bit ones beside experts.

N output features, K input features.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import WeightRenaming, WeightTransform

from .. import ops
from ..formats import CheckpointError, Found, fp8, split
from ..linear import MXFP4Linear
from ..mxfp4 import BLOCK_SIZE, MXFP4Tensor
from ..packed import dtype_names, shard_of
from . import parallel
from .task import KeepStack, Task, TaskConverter, check_shape, read


class LinearConverter(TaskConverter):
    """Fills one `MXFP4Linear`, from a dense weight or from its codes and scales."""

    __slots__ = ()
    fills = MXFP4Linear

    def __init__(self, task: Task) -> None:
        """For all layers of a load."""
        endings = [".weight"] if task.dialect is None else task.dialect.endings
        # The end of the string by another name than in other converters: the loader tells them apart by their patterns.
        super().__init__([rf"{re.escape(ending)}\Z" for ending in endings], ".weight_blocks", [KeepStack()], task)

    def fill(
        self, module: nn.Module, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The layer's weight; see `TaskConverter`."""
        assert isinstance(module, MXFP4Linear)
        blocks = module.get_parameter("weight_blocks")
        parallel.check_linear(blocks, name)
        if len(collected) != len(self.source_patterns):
            raise CheckpointError(f"{name}: the checkpoint has only some of its codes and scales")
        parts = [read(collected[pattern][0]) for pattern in self.source_patterns]
        if self.task.dialect is not None:
            tensor = self.task.pack(name, module, parts)
        else:
            tensor = ops.quantize(parts[0], *self.task.rules, name=name)
        check_shape(tensor.blocks, shard_of(blocks)[0], name)
        return self.task.hand_over(module, name, tensor, dtype_names(parts), "per expert")


class LayerConverter(TaskConverter):
    """Decodes layers beside the experts that the checkpoint holds in few bits: in MXFP4 as experts are, or in FP8."""

    __slots__ = ("affine", "block", "dialect", "keys")

    def __init__(self, task: Task, found: Found, conversions: list[WeightTransform], block: Any = None) -> None:
        """For all such layers of a load.

        Args:
            task: shared by all converters of the load.
            found: which layers of the checkpoint they are.
            conversions: the model's own, whose renamings come before this converter.
            block: rows and columns of an FP8 weight that share a scale, where the checkpoint's config says so.
        """
        endings = ("weight", *(rf"part{i}" for i in range(1, 4)))
        super().__init__([rf"\.{ending}\Z" for ending in endings], ".weight", [KeepStack()], task)
        self.block, self.affine = block, bool(found.affine)
        self.dialect = next(iter(found.layers.values()), task.dialect)
        renamings = [copy.deepcopy(c) for c in conversions if isinstance(c, WeightRenaming)]
        self.keys: dict[str, tuple[str, int]] = {}
        weights = {name: (row.blocks, row.siblings(name)) for name, row in found.layers.items()}
        weights |= {name: (".weight", (name, scales)) for name, scales in found.fp8.items()}
        weights |= {name: (".weight", (name, *others)) for name, others in found.affine.items()}
        if task.dialect is not None and task.dialect.layout == "per expert":  # a list of them that stays dense
            weights |= {name: (task.dialect.blocks, task.dialect.siblings(name)) for name in found.experts}
        for ending, names in weights.values():
            renamed = [_renamed(name, renamings) for name in names]
            target = renamed[0].removesuffix(ending) + ".weight"
            self.keys.update({name: (target, part) for part, name in enumerate(renamed)})

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """The weight that a tensor of one of the layers is part of; other keys as they are."""
        target, part = self.keys.get(source_key, (source_key, -1))
        return target, self.source_patterns[part] if part >= 0 else None

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Tensor]:
        """The dense weight [N, K] in the parameter's dtype. Called by the loader, with every tensor of it collected.

        Raises:
            CheckpointError: tensors that do not fit each other.
        """
        weight = model.get_parameter_or_buffer(layer_name)
        codes, *others = [self.collected_tensors[p][0] for p in self.source_patterns if p in self.collected_tensors]
        tensors = [read(codes)]
        is_fp8, is_affine = tensors[0].dtype == torch.float8_e4m3fn, len(others) == 2 and self.affine
        parallel.check_decoded(weight, layer_name, self.block if is_fp8 else (1, BLOCK_SIZE))
        tensors += [read(other) for other in others]
        self.collected_tensors.clear()
        dtype = weight.dtype
        try:
            if is_fp8:
                return {layer_name: fp8.decode(tensors[0], tensors[1], self.block).to(dtype)}
            if is_affine and tensors[0].dtype in (torch.uint32, torch.int32):
                return {layer_name: split.decode_affine(tensors[0], tensors[1], tensors[2], weight.shape[-1]).to(dtype)}
            assert self.dialect is not None
            decoded = self.dialect.decode(*tensors)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{layer_name}: {error}") from error
        return {layer_name: decoded.dequantize(dtype) if isinstance(decoded, MXFP4Tensor) else decoded.to(dtype)}


def _renamed(name: str, renamings: list[WeightRenaming]) -> str:
    """What a key is called after a model's own renamings."""
    for renaming in renamings:
        name, _ = renaming.rename_source_key(name)
    return name
