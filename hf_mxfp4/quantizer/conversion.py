"""Conversions that Transformers' loader runs: expert weights from a checkpoint into packed (or dense) projections.

The loader collects the checkpoint tensors of one target and calls `convert`. Stock conversions read all of a layer's
experts, stack them and copy the stack; here one expert is read, converted and written to its place before the next.
E experts, N output features, K input features.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    SplitModulelist,
    Transpose,
    WeightConverter,
)

from .. import mxfp4
from ..experts import MXFP4Experts, Source
from ..formats import CheckpointError, Dialect, stacked

_Converter = TypeVar("_Converter", bound=WeightConverter)

STREAMED_OPS = (MergeModulelist, Concatenate, Transpose)
"""The ops of a model's own conversion that may run on one expert at a time."""


class Task(NamedTuple):
    """What the converters of one load share.

    Attributes:
        dialect: how the checkpoint holds packed experts; None if it holds dense ones.
        rules: scale rule and ties, for dense experts.
        targets: what the converters may fill, by every name that the loader may use for it: the module and the full
            name of its projection. An `MXFP4Experts` is filled packed, a dense module is filled with decoded weights.
        filled: names of parameters that have been filled.
        reports: the loader's running report, once there is one.
    """

    dialect: Dialect | None
    rules: tuple[mxfp4.ScaleRule, mxfp4.Ties]
    targets: dict[str, tuple[nn.Module, str]]
    filled: set[str]
    reports: list[Any]


class KeepStack(ConversionOps):  # type: ignore[misc]  # Transformers has no type marker
    """Stands for the conversion of a tensor that already holds all experts: none."""

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The input as it is."""
        return input_dict


class ExpertsConverter(WeightConverter):  # type: ignore[misc]
    """Fills one projection of one layer, an expert at a time."""

    __slots__ = ("task",)

    def __init__(
        self, source_patterns: list[str], target_patterns: list[str], operations: list[ConversionOps], task: Task
    ) -> None:
        """Takes the patterns of the loader.

        Args:
            source_patterns: of checkpoint keys. For packed experts first those of codes, then as many of scales.
            target_patterns: one, of the parameter that the loader knows the projection by.
            operations: the model's own, from one-expert lists to a stack; or one `KeepStack`.
            task: shared by all converters of the load.
        """
        super().__init__(source_patterns, target_patterns, operations)
        self.task = task

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertsConverter:
        """A converter for the next layer; the loader copies one for each, and the task is shared."""
        copy = ExpertsConverter(
            list(self._original_source_patterns), list(self._original_target_patterns), list(self.operations), self.task
        )
        return scoped_like(self, copy)

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """As stock, but only for keys of the projections of this load: others go on to the model's own converter."""
        renamed, pattern = super().rename_source_key(source_key)
        if pattern is None or renamed not in self.task.targets:
            return source_key, None
        return renamed, pattern

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        loading_info: Any = None,
    ) -> dict[str, Tensor]:
        """Fills the projection. Called by the loader, with every key of this layer collected.

        Returns:
            `{projection}_blocks` and `{projection}_scales`, or the dense `{projection}`, by full name.

        Raises:
            CheckpointError: experts or scales that are missing, or of a shape that does not fit the model.
        """
        self.task.reports[:] = [loading_info]
        module, name = self.task.targets[layer_name]
        collected = {pattern: self.collected_tensors.pop(pattern) for pattern in list(self.collected_tensors)}
        extra = {"full_layer_name": name, "model": model, "config": config, "missing_keys": set()}
        filled = self._fill(module, name, collected, extra)
        self.task.filled.update(filled)
        return filled

    def _fill(
        self, module: nn.Module, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        count, *matrix = _canonical_shape(module, name)
        self._check_complete(name, count, collected)
        dtypes: list[str] = []
        keep = isinstance(module, MXFP4Experts)
        if self.task.dialect is not None and self.task.dialect.layout == "stacked" and keep:
            blocks, scales = (_read(collected.pop(pattern)[0]) for pattern in self.source_patterns)
            dtypes = [_dtype_name(blocks), _dtype_name(scales)]
            packed = stacked.decode(blocks, scales)
            _check_shape(packed.blocks, (count, matrix[0], matrix[1] // 2), f"{name}{self.task.dialect.blocks}")
            return self._packed(module, name, packed, dtypes)
        out: Any = None
        for e, parts in enumerate(self._experts(count, collected, extra)):
            if not dtypes:
                dtypes = [_dtype_name(part) for part in parts]
            tensor = self._canonical(module, f"{name}, expert {e}", parts)
            _check_shape(tensor.blocks, (matrix[0], matrix[1] // 2), f"{name}, expert {e}")
            if keep:
                out = (
                    mxfp4.MXFP4Tensor(*(part.new_empty(count, *part.shape) for part in tensor)) if out is None else out
                )
                out.blocks[e], out.scales[e] = tensor
            else:
                out = self._dense_stack(module, name, tensor) if out is None else out
                (out[e].mT if module.is_transposed else out[e]).copy_(tensor.dequantize(out.dtype))
        return self._packed(module, name, out, dtypes) if keep else {name: out}

    def _check_complete(self, name: str, count: int, collected: dict[str, list[Any]]) -> None:
        """Every source has as many tensors as there are experts (one, if they are stacked)."""
        expected = 1 if isinstance(self.operations[0], KeepStack) else count
        for pattern in self.source_patterns:
            found = len(collected.get(pattern, ()))
            if found == expected:
                continue
            keys = sorted(key for keys in self.layer_targets.values() for key in keys)
            what = pattern.removesuffix("$")
            if expected == 1:
                raise CheckpointError(f"{name}: the checkpoint has no tensor {what}; it has {', '.join(keys)}")
            regex = re.compile(pattern.replace("*.", r"(\d+)\."))
            held = {int(match[1]) for key in keys if (match := regex.search(key))}
            missing = [str(e) for e in range(count) if e not in held]
            where = f"; missing of experts {', '.join(missing)}" if missing else ""
            raise CheckpointError(f"{name}: the model has {count} experts, the checkpoint has {found} of {what}{where}")

    def _experts(
        self, count: int, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Each expert's matrix, or its codes and scales, read one expert at a time."""
        half = len(self.source_patterns) // (2 if self.task.dialect else 1)
        kinds = [self.source_patterns[i : i + half] for i in range(0, len(self.source_patterns), half)]
        operations = self.operations
        if not all(isinstance(op, (*STREAMED_OPS, KeepStack)) for op in operations):
            yield from zip(*(self._whole_layer(patterns, collected, extra) for patterns in kinds), strict=True)
            return
        if isinstance(operations[0], KeepStack):
            stacks = [_read(collected.pop(patterns[0])[0]) for patterns in kinds]
            if any(stack.shape[0] != count for stack in stacks):
                raise CheckpointError(
                    f"{extra['full_layer_name']}: the model has {count} experts, the checkpoint has "
                    f"{[list(stack.shape) for stack in stacks]}"
                )
            yield from zip(*stacks, strict=True)
            return
        for e in range(count):
            yield tuple(
                self._run({p: [_read(_take(collected[p], e))] for p in patterns}, patterns, extra)[0]
                for patterns in kinds
            )

    def _whole_layer(self, patterns: list[str], collected: dict[str, list[Any]], extra: dict[str, Any]) -> Tensor:
        """The stack that the model's own ops make of all experts at once, for ops that cannot run on one."""
        return self._run({p: [_read(tensor) for tensor in collected.pop(p)] for p in patterns}, patterns, extra)

    def _run(self, tensors: dict[str, Any], patterns: list[str], extra: dict[str, Any]) -> Tensor:
        for op in self.operations:
            tensors = op.convert(tensors, source_patterns=patterns, target_patterns=self.target_patterns, **extra)
        return _first(tensors)

    def _canonical(self, module: nn.Module, name: str, parts: tuple[Tensor, ...]) -> mxfp4.MXFP4Tensor:
        if len(parts) == 2:
            return mxfp4.canonical(*parts)
        matrix = parts[0].mT if module.is_transposed else parts[0]
        mxfp4.check_width(matrix.shape, name)
        return mxfp4.quantize(matrix, *self.task.rules, name=name)

    def _packed(self, module: nn.Module, name: str, tensor: mxfp4.MXFP4Tensor, dtypes: list[str]) -> dict[str, Tensor]:
        if isinstance(module, MXFP4Experts):
            module.source = self._source(dtypes)
        proj = name.rpartition(".")[2]
        result = {}
        for suffix, part in zip(("_blocks", "_scales"), tensor, strict=True):
            # While dense experts load, the parameter stands on meta in their dtype (see MXFP4HfQuantizer); from here
            # on it is what it will be, which offloading to disk looks at.
            meta = torch.empty(part.shape, dtype=torch.uint8, device="meta")
            module.register_parameter(proj + suffix, nn.Parameter(meta, requires_grad=False))
            result[name + suffix] = part
        return result

    def _source(self, dtypes: list[str]) -> Source:
        layout = "stacked" if isinstance(self.operations[0], KeepStack) else "per expert"
        if self.task.dialect is None:
            rule, ties = self.task.rules
            return Source(f"dense, {layout}", tuple(dtypes), f"quantized: {rule}, ties {ties}")
        return Source(self.task.dialect.name, tuple(dtypes), "kept byte for byte")

    def _dense_stack(self, module: nn.Module, name: str, tensor: mxfp4.MXFP4Tensor) -> Tensor:
        parameter = module.get_parameter(name.rpartition(".")[2])
        return torch.empty(parameter.shape, dtype=parameter.dtype, device=tensor.blocks.device)


class DecodeLinear(ConversionOps):  # type: ignore[misc]
    """Decodes a linear layer that is packed in the checkpoint and not one of the experts."""

    def convert(self, input_dict: dict[str, Any], source_patterns: list[str], **kwargs: Any) -> dict[str, Tensor]:
        """The dense weight [N, K] in the parameter's dtype, from its codes and scales.

        Raises:
            CheckpointError: codes without scales, or the reverse.
        """
        name = kwargs["full_layer_name"]
        if len(input_dict) != len(source_patterns):
            raise CheckpointError(f"{name}: the checkpoint has {', '.join(input_dict)} without its other half")
        packed, scale = (_first({pattern: input_dict[pattern]}) for pattern in source_patterns)
        return {name: mxfp4.dequantize(packed, scale, kwargs["model"].get_parameter(name).dtype)}


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
            parts = _first({pattern: stack}).unbind(self.dim)
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
        blocks = _first(input_dict)
        if self.encode:
            groups = blocks.shape[-1] // 16
            scales = blocks.new_empty(*blocks.shape[:-1], groups, device="meta")
            return {target_patterns[0]: stacked.encode(mxfp4.MXFP4Tensor(blocks, scales), self.dialect)[0]}
        return {target_patterns[0]: blocks.flatten(2)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The other direction."""
        return StackedLayout(self.dialect, encode=not self.encode)


def saving_conversions(original: WeightConverter, dialect: Dialect) -> list[WeightConverter]:
    """What saves packed projections under a model's own per-expert names, given its conversion for dense ones.

    Transformers turns a load's conversions round to save, so these are written as if for loading: the sources are the
    names in the file.
    """
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


def scoped_like(original: WeightConverter, converter: _Converter) -> _Converter:
    """The converter, with the scope of the original: the part of the model whose keys it is for."""
    for scope in ("scope_prefix", "base_model_prefix"):
        if hasattr(original, scope):
            setattr(converter, scope, getattr(original, scope))
    return converter


def _canonical_shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    """[E, N, K] of a projection, packed or dense."""
    proj = name.rpartition(".")[2]
    shape = module.dense_shape(proj) if isinstance(module, MXFP4Experts) else tuple(getattr(module, proj).shape)
    count, a, b = shape
    return (count, b, a) if module.is_transposed else (count, a, b)


def _take(tensors: list[Any], index: int) -> Any:
    """The item, which the list then no longer holds."""
    item, tensors[index] = tensors[index], None
    return item


def _read(item: Future[Tensor] | Callable[[], Tensor] | Tensor) -> Tensor:
    """The tensor of what the loader collected: a promise of one, a function that reads one, or one."""
    if isinstance(item, Tensor):
        return item
    return item.result() if isinstance(item, Future) else item()


def _first(tensors: dict[str, Any]) -> Tensor:
    """The first tensor of a dictionary of tensors or lists of them."""
    value = next(iter(tensors.values()))
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_shape(tensor: Tensor, expected: tuple[int, ...], name: str) -> None:
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"{name}: packed bytes are {list(tensor.shape)}, the model's configuration makes them {list(expected)}"
        )
