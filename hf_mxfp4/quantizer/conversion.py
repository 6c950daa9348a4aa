"""Conversions that Transformers' loader runs: expert weights from a checkpoint into packed (or dense) projections.

The loader collects the checkpoint tensors of one target and calls `convert`. Stock conversions read all of a layer's
experts, stack them and copy the stack; here one expert is read, converted and written to its place before the next.
E experts, N output features, K input features.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
)
from typing_extensions import Self

from .. import mxfp4, ops, pages
from ..experts import MXFP4Experts
from ..families import Layout, flat_rows, layout_of
from ..formats import CheckpointError
from ..packed import dtype_names, shard_of
from . import parallel
from .rows import JoinRows
from .task import FlatRows, KeepStack, Task, TaskConverter, check_shape, first, read

_Part = tuple[str, tuple[Tensor, ...]]
"""Rows of an expert: what errors call them, and the dense rows, or their codes and scales."""

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")

STREAMED_OPS = (MergeModulelist, Concatenate, Transpose)
"""The ops of a model's own conversion that may run on one expert at a time."""


class ExpertsConverter(TaskConverter):
    """Fills one projection of one layer, an expert at a time."""

    __slots__ = ("collected_keys", "dense_targets")

    def __init__(
        self,
        source_patterns: list[str],
        target_pattern: str,
        operations: list[ConversionOps],
        dense_targets: list[str],
        task: Task,
    ) -> None:
        """Takes the patterns of the loader.

        Args:
            source_patterns: of checkpoint keys. For low-bit experts first those of codes, then as many of scales, and
                as many of what else the dialect has.
            target_pattern: of the parameter that the loader knows the projection by.
            operations: from one-expert lists to a stack, the model's own; or one `KeepStack`, or with it what joins
                stacks.
            dense_targets: what the model's own conversion fills with them; the first is the projection.
            task: shared by all converters of the load.
        """
        super().__init__(source_patterns, target_pattern, operations, task)
        self.dense_targets = dense_targets
        self.collected_keys: dict[str, list[str]] = defaultdict(list)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A converter for the next layer."""
        copy = super().__deepcopy__(memo)
        copy.collected_keys = defaultdict(list)
        return copy

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Any) -> None:
        """Collects a tensor of the checkpoint, and its name with it."""
        super().add_tensor(target_key, source_key, source_pattern, future)
        self.collected_keys[source_pattern].append(source_key)

    def fill(
        self, module: nn.Module, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The projection, by the way that its sources need; see `TaskConverter`."""
        parallel.check_experts(module, name, self.task, self.operations)
        if self.task.dialect is None:
            pages.trim()  # what quantizing the projection before left free
        if isinstance(self.operations[0], FlatRows):
            return self._fill(module, name, self._read_flat(module, name, collected))
        if isinstance(self.operations[0], KeepStack) and len(self.operations) == 1:
            return self._fill_from_stacks(module, name, collected)
        if isinstance(self.operations[0], KeepStack):
            return self._fill(module, name, self._read_split(module, name, collected))
        if self._joins_rows():
            return self._fill(module, name, self._read_rows(module, name, collected))
        if all(isinstance(op, STREAMED_OPS) for op in self.operations):
            return self._fill(module, name, self._stream(module, name, collected, extra))
        return self._fill_from_whole_layer(name, collected, extra)

    def _fill_from_stacks(self, module: nn.Module, name: str, collected: dict[str, list[Any]]) -> dict[str, Tensor]:
        """From one tensor that holds all experts, or one of codes and one of scales."""
        self._check_single(name, collected)
        stacks = [read(collected.pop(pattern)[0]) for pattern in self.source_patterns]
        dialect = self.task.dialect
        if dialect is not None and not dialect.is_lossy and isinstance(module, MXFP4Experts):
            packed = self.task.pack(name, module, stacks)
            held, room = packed.blocks.shape[0], _codes_shape(module, name)[0]
            if held != room and held in _counts(module, name):  # a dense class has room for more than have weights
                packed = mxfp4.MXFP4Tensor(packed.blocks[:room], packed.scales[:room])
            check_shape(packed.blocks, _codes_shape(module, name), f"{name}_blocks")
            return self._packed(module, name, packed, dtype_names(stacks))
        self._check_stacks(module, name, stacks)
        return self._fill(module, name, _whole(name, zip(*stacks, strict=True)))

    def _fill_from_whole_layer(
        self, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        """By ops that need all experts of the layer at once, and may fill several modules."""
        outputs: dict[str, list[Tensor]] = {}
        for patterns in self._kinds():
            tensors: dict[str, Any] = {
                p: [tensor for tensor in map(read, collected.pop(p)) if tensor is not None]
                for p in patterns
                if p in collected
            }
            for target, stack in self._run(tensors, patterns, extra, None).items():
                outputs.setdefault(target, []).append(stack[0] if isinstance(stack, list) else stack)
        filled: dict[str, Tensor] = {}
        for target, stacks in outputs.items():
            full = name.replace(self.dense_targets[0], target)
            module, _ = self.task.targets.get(f"{full}_blocks") or self.task.targets.get(full) or (None, full)
            if module is None:
                filled[full] = stacks[0]
            else:
                filled |= self._fill(module, full, _whole(full, zip(*stacks, strict=True)))
        return filled

    def _read_split(self, module: nn.Module, name: str, collected: dict[str, list[Any]]) -> Iterator[list[_Part]]:
        """Each expert's matrices from stacks of them."""
        self._check_single(name, collected)
        stacks = {pattern: read(collected.pop(pattern)[0]) for pattern in self.source_patterns}
        self._check_stacks(module, name, list(stacks.values()))
        for e in range(_share(module, name).shape[0]):
            yield [
                (f"{self.collected_keys[group[0]][0]}, expert {e}", tuple(stacks[pattern][e] for pattern in group))
                for group in zip(*self._kinds(), strict=True)
            ]

    def _read_flat(self, module: nn.Module, name: str, collected: dict[str, list[Any]]) -> Iterator[list[_Part]]:
        """Each expert's rows from the tensors of a flat class."""
        proj, count = name.rpartition(".")[2], _share(module, name).whole[0]
        self._check_single(name, collected)
        sources = {self.collected_keys[p][0]: read(collected.pop(p)[0]) for p in self.source_patterns}
        for key, source in sources.items():
            if source.ndim != 2 or source.shape[0] % count:
                raise CheckpointError(f"{key} {list(source.shape)} holds no equal parts for {count} experts")
        for e in range(count):
            yield [(f"{key}, expert {e}", (flat_rows(proj, s, count, e),)) for key, s in sources.items()]

    def _check_single(self, name: str, collected: dict[str, list[Any]]) -> None:
        """Every source has one tensor."""
        for pattern in self.source_patterns:
            if len(collected.get(pattern, ())) != 1:
                raise CheckpointError(f"{name}: the checkpoint has no tensor {_plain(pattern)}; it has {self._keys()}")

    def _joins_rows(self) -> bool:
        """Whether the ops stack experts, and may join the matrices of one expert row by row, and no more."""
        merge, *rest = self.operations
        joins = all(isinstance(op, JoinRows) or (isinstance(op, Concatenate) and op.dim == 1) for op in rest)
        joins = joins and len(rest) <= 1
        return isinstance(merge, MergeModulelist) and merge.dim == 0 and joins

    def _read_rows(self, module: nn.Module, name: str, collected: dict[str, list[Any]]) -> Iterator[list[_Part]]:
        """Each expert's matrices as the file has them, read one at a time, but for those of other processes."""
        self._check_complete(module, name)
        for e in range(_share(module, name).whole[0]):
            parts = [
                (self.collected_keys[group[0]][e], tuple(read(_take(collected[pattern], e)) for pattern in group))
                for group in zip(*self._kinds(), strict=True)
            ]
            if parts[0][1][0] is not None:
                yield parts
            del parts

    def _stream(
        self, module: nn.Module, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> Iterator[list[_Part]]:
        """Each expert's matrix by the model's own ops on that expert alone.

        The sources are a tensor an expert, or tensors of all experts that the ops turn or join.
        """
        share, in_turn = _share(module, name), any("*" in pattern for pattern in self.source_patterns)
        rows, columns = share.shape[1:]
        expected = (columns, rows) if _layout(module).is_transposed else (rows, columns)
        if in_turn:
            self._check_complete(module, name)
        else:
            collected = {pattern: [read(items[0])] for pattern, items in collected.items()}
            self._check_stacks(module, name, [stack for (stack,) in collected.values()])
        for e in range(share.whole[0] if in_turn else share.shape[0]):
            sources: dict[str, Any] = {
                pattern: read(_take(items, e)) if in_turn else items[0][e : e + 1]
                for pattern, items in collected.items()
            }
            if any(source is None for source in sources.values()):
                continue  # the experts of other processes
            parts = tuple(
                first(self._run({p: [sources.pop(p)] for p in patterns}, patterns, extra, expected))[0]
                for patterns in self._kinds()
            )
            yield [(f"{name}, expert {e}", parts)]

    def _fill(self, module: nn.Module, name: str, experts: Iterator[list[_Part]]) -> dict[str, Tensor]:
        """From each expert's rows in turn: dense ones, or their codes and scales."""
        count, rows, columns = _share(module, name).shape
        turned = _layout(module).is_transposed
        takes_turns = any(isinstance(op, JoinRows) and op.takes_turns for op in self.operations)
        out: Any = None if count else self._room(module, name, None)
        dtypes: tuple[str, ...] = ()
        for e in range(count):
            top = 0
            parts = next(experts)
            for i, (where, tensors) in enumerate(parts):
                tensor = self._canonical(module, where, tensors)
                height = rows // len(parts)
                if isinstance(tensor, Tensor):
                    check_shape(tensor, (height, columns), where)
                else:
                    check_shape(tensor.blocks, (height, columns // 2), where)
                place = slice(i, None, len(parts)) if takes_turns else slice(top, top + height)
                if out is None:
                    dtypes, out = dtype_names(tensors), self._room(module, name, tensors[0].device)
                if isinstance(out, mxfp4.MXFP4Tensor):
                    assert isinstance(tensor, mxfp4.MXFP4Tensor)
                    out.blocks[e, place], out.scales[e, place] = tensor
                else:
                    matrix = out[e].mT if turned else out[e]
                    matrix[place] = tensor if isinstance(tensor, Tensor) else tensor.dequantize(out.dtype)
                top += height
                del tensors, tensor  # before the next are read
            del parts
        return self._packed(module, name, out, dtypes) if isinstance(out, mxfp4.MXFP4Tensor) else {name: out}

    def _room(self, module: nn.Module, name: str, device: torch.device | None) -> mxfp4.MXFP4Tensor | Tensor:
        """The tensors to fill. No device is known to a process that has none of the experts."""
        proj = name.rpartition(".")[2]
        if isinstance(module, MXFP4Experts):
            parts: Any = module.packed(proj)
            device = device or torch.device(parts.blocks.device_mesh.device_type)
            return mxfp4.MXFP4Tensor(*(pages.empty(shard_of(part)[0], device) for part in parts))
        parameter: Any = module.get_parameter(proj)
        device = device or torch.device(parameter.device_mesh.device_type)
        return torch.zeros(shard_of(parameter)[0], dtype=parameter.dtype, device=device)

    def _kinds(self) -> list[list[str]]:
        """Source patterns of dense weights; or of codes, of scales, and of what else a dialect has."""
        kinds = len(self.task.dialect.endings) if self.task.dialect else 1
        length = len(self.source_patterns) // kinds
        return [self.source_patterns[i * length : (i + 1) * length] for i in range(kinds)]

    def _run(
        self, tensors: dict[str, Any], patterns: list[str], extra: dict[str, Any], expected: tuple[int, ...] | None
    ) -> dict[str, Any]:
        """The model's own ops on one expert, whose dense matrix has the shape `expected`, or on all (None)."""
        for op in self.operations:
            if isinstance(op, Transpose) and expected is not None:
                tensor = first(tensors)
                turn = not op.check_dims or tuple(tensor.shape[1:]) != expected
                tensors = {next(iter(tensors)): tensor.transpose(op.dim0, op.dim1) if turn else tensor}
            else:
                tensors = op.convert(tensors, source_patterns=patterns, target_patterns=self.dense_targets, **extra)
        return tensors

    def _check_stacks(self, module: nn.Module, name: str, stacks: list[Tensor]) -> None:
        """Every stack has as many experts as the model, or this process's share of them."""
        share = _share(module, name)
        fits = {share.shape[0]} if share.ways else _counts(module, name)
        for stack in stacks:
            if stack.shape[0] not in fits:
                raise CheckpointError(
                    f"{name}: the model has {share.shape[0]} experts, the checkpoint has {stack.shape[0]}"
                    f" ({self._keys()})"
                )

    def _check_complete(self, module: nn.Module, name: str) -> None:
        """Every source has a tensor for each expert, and they are in order."""
        count = _share(module, name).whole[0]
        for pattern in self.source_patterns:
            keys = self.collected_keys[pattern]
            numbers = [int(_NUMBERS.findall(key)[-1]) for key in keys]
            if len(keys) in _counts(module, name) and numbers == list(range(len(keys))):
                continue
            missing = [str(e) for e in range(count) if e not in numbers]
            where = f"; missing of experts {', '.join(missing)}" if missing else ""
            raise CheckpointError(
                f"{name}: the model has {count} experts, the checkpoint has {len(keys)} of {_plain(pattern)}{where}"
            )

    def _keys(self) -> str:
        return ", ".join(sorted(key for keys in self.layer_targets.values() for key in keys))

    def _canonical(self, module: nn.Module, name: str, parts: tuple[Tensor, ...]) -> mxfp4.MXFP4Tensor | Tensor:
        if self.task.dialect is not None and isinstance(module, MXFP4Experts):
            return self.task.pack(name, module, parts)
        if self.task.dialect is not None:
            return self.task.decode(name, parts)
        matrix = parts[0].mT if _layout(module).is_transposed else parts[0]
        mxfp4.check_width(matrix.shape, name)
        return ops.quantize(matrix, *self.task.rules, name=name)

    def _packed(
        self, module: nn.Module, name: str, tensor: mxfp4.MXFP4Tensor, dtypes: tuple[str, ...]
    ) -> dict[str, Tensor]:
        assert isinstance(module, MXFP4Experts)
        layout = "per expert" if any(".*." in pattern for pattern in self.source_patterns) else "stacked"
        return self.task.hand_over(module, name, tensor, dtypes, layout)


class BiasConverter(ExpertsConverter):
    """Fills the bias of one projection of one layer, from one tensor an expert."""

    __slots__ = ()

    def fill(
        self, module: nn.Module, name: str, collected: dict[str, list[Any]], extra: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The bias [E, N] in the parameter's dtype; see `TaskConverter`."""
        self._check_complete(module, name)
        tensors: dict[str, Any] = {p: [t for item in collected[p] if (t := read(item)) is not None] for p in collected}
        for op in self.operations:
            tensors = op.convert(tensors, source_patterns=self.source_patterns, target_patterns=[name], **extra)
        bias, full = first(tensors), f"{name}_bias"
        parameter = module.get_parameter(full.rpartition(".")[2])
        expected = shard_of(parameter)[0]
        if tuple(bias.shape) != expected:
            raise CheckpointError(f"{full} is {list(bias.shape)}, the model's configuration makes it {list(expected)}")
        return {full: bias.to(parameter.dtype)}


def _whole(name: str, experts: Iterable[tuple[Tensor, ...]]) -> Iterator[list[_Part]]:
    """Whole matrices as the rows of each expert."""
    for e, parts in enumerate(experts):
        yield [(f"{name}, expert {e}", parts)]


def _layout(module: nn.Module) -> Layout:
    layout = layout_of(module)
    assert layout is not None
    return layout


def _share(module: nn.Module, name: str) -> parallel.Share:
    return parallel.share_of(module, name)


def _codes_shape(module: nn.Module, name: str) -> tuple[int, int, int]:
    experts, rows, columns = _share(module, name).shape
    return experts, rows, columns // 2


def _counts(module: nn.Module, name: str) -> set[int]:
    """How many experts a checkpoint may hold: those with weights, or all that the dense class has room for."""
    proj = name.rpartition(".")[2]
    room = module.dense_shape(proj) if isinstance(module, MXFP4Experts) else module.get_parameter(proj).shape
    return {_share(module, name).whole[0], room[0]}


def _plain(pattern: str) -> str:
    """A source pattern as it would stand in a file."""
    return pattern.removesuffix("(?:$)").removesuffix("$").replace("\\", "")


def _take(tensors: list[Any], index: int) -> Any:
    """The item, which the list then no longer holds."""
    item, tensors[index] = tensors[index], None
    return item
