"""Whether two checkpoints hold the same experts, in whatever dialects, and the same tensors beside them.

Experts are compared as canonical bytes, matrix by matrix; then their biases, by value where the files store them in
different dtypes; then tensors that have one name in both, byte by byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..formats import CheckpointError, TensorInfo
from ..formats import gguf as layout
from ..formats.checkpoint import Checkpoint
from ..mxfp4 import MXFP4Tensor, dequantize
from . import gguf
from .experts import Group, Matrix, Rules, names_of, packed_groups

_LAYER = re.compile(r"(?:^|\.)(?:layers|block|blk)\.(\d+)\.")
_CHUNK = 1 << 24


class Difference(NamedTuple):
    """The first that was found.

    Attributes:
        tensor: a matrix of experts, such as `model.layers.0.mlp.experts.gate_proj`, or any other tensor.
        what: how the two differ, in words.
        expert: which; None for tensors beside experts and for what is missing.
        place: row and column of a matrix, row of a bias, index of any other tensor; empty if that says nothing.
        values: there, in the first checkpoint and in the second; None if nothing is there to compare.
        stored: the code and the scale byte of both, where it is a weight of experts.
    """

    tensor: str
    what: str
    expert: int | None = None
    place: tuple[int, ...] = ()
    values: tuple[float, float] | None = None
    stored: tuple[tuple[int, int], tuple[int, int]] | None = None

    def __str__(self) -> str:
        """One line."""
        line = self.tensor if self.expert is None else f"{self.tensor}, expert {self.expert}"
        if self.place and self.expert is None:
            line += f", index {list(self.place)}"
        elif self.place:
            line += "".join(f", {name} {i}" for name, i in zip(("row", "column"), self.place, strict=False))
        line += f": {self.what}"
        if self.values is not None:
            line += ", {:.9g} and {:.9g}".format(*self.values)
        if self.stored is not None:
            (code_a, scale_a), (code_b, scale_b) = self.stored
            line += f" (code {code_a}, scale byte {scale_a} and code {code_b}, scale byte {scale_b})"
        return line


class Verdict(NamedTuple):
    """What a comparison found.

    Attributes:
        difference: the first; None if there is none.
        matrices: of experts, and biases, that were found the same.
        tensors: beside the experts that were found the same.
        not_compared: tensors beside the experts that only one of the two has under that name.
    """

    difference: Difference | None
    matrices: int
    tensors: int
    not_compared: list[str]


class Opened(NamedTuple):
    """A checkpoint to be compared.

    Attributes:
        groups: of experts and their biases.
        others: tensors beside them, by name.
        read: one of these.
    """

    groups: list[Group]
    others: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]


def verify(first: str | Path, second: str | Path, *, progress: bool = True) -> Verdict:
    """Compares two checkpoints, one expert's matrix at a time, up to the first difference.

    Args:
        first: a folder of safetensors files, one such file or a GGUF file, with experts in any dialect of MXFP4.
        second: another.
        progress: show a bar on standard error.

    Returns:
        What was found.

    Raises:
        CheckpointError: a checkpoint that is not whole, or holds no MXFP4 experts.
    """
    with ExitStack() as stack:
        a, b = (_opened(path, stack) for path in (first, second))
        return _compare(a, b, progress)


def _opened(path: str | Path, stack: ExitStack) -> Opened:
    if gguf.is_file(path):
        header = layout.read_header(path)
        groups = gguf.groups(header, {}, names_of(""))
        used = {name for group in groups for name in group.sources}
        others = {name: info for name, info in layout.tensor_infos(header).items() if name not in used}
        return Opened(groups, others, lambda name: header.tensors[name].bytes())
    checkpoint = stack.enter_context(Checkpoint(path))
    found = checkpoint.detect()
    if found.dialect is None or found.dialect.is_lossy:
        held = "no packed experts" if found.dialect is None else f"experts in {found.dialect.name}"
        raise CheckpointError(f"{checkpoint.path} holds {held}; what is compared is MXFP4")
    groups = packed_groups(checkpoint, found.dialect, found.experts, Rules())
    used = {name for group in groups for name in group.sources}
    others = {name: info for name, info in checkpoint.tensors.items() if name not in used}
    return Opened(groups, others, checkpoint.read)


def _compare(a: Opened, b: Opened, progress: bool) -> Verdict:
    pairs, difference = _pairs(a.groups, b.groups)
    same_name = [name for name in a.others if name in b.others]
    not_compared = sorted(a.others.keys() ^ b.others.keys())
    matrices = tensors = 0
    if difference is not None:
        return Verdict(difference, matrices, tensors, not_compared)
    total = sum(group.experts for group, _ in pairs) + len(same_name)
    with tqdm(total=total, disable=not progress, desc="Comparing") as bar:
        for one, other in pairs:
            for e in range(one.experts):
                difference = _first_difference(one, other, e)
                if difference is not None:
                    return Verdict(difference, matrices, tensors, not_compared)
                matrices += len(one.matrices)
                bar.update()
        for name in same_name:
            difference = _tensor_difference(name, a, b)
            if difference is not None:
                return Verdict(difference, matrices, tensors, not_compared)
            tensors += 1
            bar.update()
    return Verdict(None, matrices, tensors, not_compared)


def _pairs(a: list[Group], b: list[Group]) -> tuple[list[tuple[Group, Group]], Difference | None]:
    """Groups of the same matrices, weights first; or what only one of the two has."""
    key = _module_key(a, b)
    ours, theirs = ({(g.is_bias, key(g.module), g.matrices): g for g in groups} for groups in (a, b))
    for groups, against, where in ((ours, theirs, "first"), (theirs, ours, "second")):
        for place, group in groups.items():
            if place not in against:
                what = f"only the {where} checkpoint has {'such a bias' if group.is_bias else 'it'}"
                return [], Difference(f"{group.module}.{group.matrices[0]}", what)
    pairs = [(ours[place], theirs[place]) for place in sorted(ours, key=lambda place: place[0])]
    for one, other in pairs:
        name = f"{one.module}.{one.matrices[0]}"
        if one.experts != other.experts:
            return [], Difference(name, f"{one.experts} experts and {other.experts}")
        if one.shape != other.shape:
            return [], Difference(name, f"shapes of a matrix are {list(one.shape)} and {list(other.shape)}")
    return pairs, None


def _module_key(a: list[Group], b: list[Group]) -> Callable[[str], str]:
    """What modules are paired by: their names, or the numbers of their layers where no name is in both."""
    if {group.module for group in a} & {group.module for group in b}:
        return lambda module: module
    return lambda module: match[1] if (match := _LAYER.search(module)) else module


def _first_difference(one: Group, other: Group, e: int) -> Difference | None:
    for matrix, ours, theirs in zip(one.matrices, one.read(e), other.read(e), strict=True):
        found = _matrix_difference(f"{one.module}.{matrix}", ours, theirs)
        if found is not None:
            return found._replace(expert=e)
    return None


def _matrix_difference(name: str, ours: Matrix, theirs: Matrix) -> Difference | None:
    if not (isinstance(ours, MXFP4Tensor) and isinstance(theirs, MXFP4Tensor)):
        assert isinstance(ours, Tensor)
        assert isinstance(theirs, Tensor)
        return _bias_difference(name, ours, theirs)
    if torch.equal(ours.blocks, theirs.blocks) and torch.equal(ours.scales, theirs.scales):
        return None
    # Values first: bytes that mean the same are the smaller difference, but a matrix may have both.
    decoded = [dequantize(*tensor, torch.float64) for tensor in (ours, theirs)]
    differs = _differs(*decoded)
    what = "values differ"
    if not bool(differs.any()):
        what = "bytes differ, values equal"
        codes = _codes(ours) != _codes(theirs)
        differs = codes | (ours.scales != theirs.scales).repeat_interleave(32, dim=-1)
    row, column = differs.nonzero()[0].tolist()
    values = (float(decoded[0][row, column]), float(decoded[1][row, column]))
    stored = [(int(_codes(t)[row, column]), int(t.scales[row, column // 32])) for t in (ours, theirs)]
    return Difference(name, what, None, (row, column), values, (stored[0], stored[1]))


def _bias_difference(name: str, ours: Tensor, theirs: Tensor) -> Difference | None:
    is_same = _same_bytes(ours, theirs) if ours.dtype == theirs.dtype else not bool(_differs(ours, theirs).any())
    if is_same:
        return None
    return _element(name, ours, theirs)


def _tensor_difference(name: str, a: Opened, b: Opened) -> Difference | None:
    one, other = a.others[name], b.others[name]
    if one != other:
        described = [f"{info.dtype} {list(info.shape)}" for info in (one, other)]
        return Difference(name, f"{described[0]} and {described[1]}")
    ours, theirs = a.read(name), b.read(name)
    return None if _same_bytes(ours, theirs) else _element(name, ours, theirs)


def _element(name: str, ours: Tensor, theirs: Tensor) -> Difference:
    """The first element of two tensors of a shape, one of which differs."""
    what, differs = "values differ", _differs(ours, theirs)
    if not bool(differs.any()):
        what = "bytes differ, values equal"
        bytes_ = [tensor.reshape(-1, 1).contiguous().view(torch.uint8) for tensor in (ours, theirs)]
        differs = (bytes_[0] != bytes_[1]).any(-1).view(ours.shape)
    index = tuple(differs.nonzero()[0].tolist())
    values = (_number(ours[index]), _number(theirs[index]))
    return Difference(name, what, None, index, values)


def _number(value: Tensor) -> float:
    return float(value.float() if value.is_floating_point() else value)


def _differs(ours: Tensor, theirs: Tensor) -> Tensor:
    """Where values differ; NaN is NaN."""
    one, other = (tensor.double() if tensor.is_floating_point() else tensor for tensor in (ours, theirs))
    differs: Tensor = one != other
    return differs & ~(one.isnan() & other.isnan()) if one.is_floating_point() else differs


def _same_bytes(ours: Tensor, theirs: Tensor) -> bool:
    """Of two tensors of a dtype and a shape, a chunk at a time."""
    flat: list[Any] = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs)]
    return all(torch.equal(x, y) for x, y in zip(flat[0].split(_CHUNK), flat[1].split(_CHUNK), strict=True))


def _codes(tensor: MXFP4Tensor) -> Tensor:
    """The codes, uint8 [N, K]."""
    return torch.stack([tensor.blocks & 15, tensor.blocks >> 4], dim=-1).flatten(-2)
