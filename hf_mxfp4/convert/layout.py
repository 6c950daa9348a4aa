"""Which tensors a file has for experts, in a dialect, and where in them the matrices of each expert lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from ..formats import Dialect, Name, TensorInfo
from ..mxfp4 import BLOCK_SIZE, MXFP4Tensor
from .experts import Group, join_rows


class Piece(NamedTuple):
    """Part of a tensor of a file.

    Attributes:
        name: of the tensor.
        offset: where it begins, in bytes from the tensor's first.
        tensor: what stands there.
    """

    name: str
    offset: int
    tensor: Tensor


class Unit(NamedTuple):
    """Tensors of a file that are made together.

    Attributes:
        tensors: what they are, by name.
        make: gives them piece by piece, each when it is asked for.
    """

    tensors: dict[str, TensorInfo]
    make: Callable[[], Iterator[Piece]]


class _Slot(NamedTuple):
    """A tensor of codes, of scales or of biases, of one expert or of all (None), and the matrices that it joins."""

    proj: str
    members: tuple[int, ...]
    expert: int | None


def units(group: Group, dialect: Dialect, turns: bool) -> list[Unit]:
    """What a file of a dialect holds for a group: a unit for each expert, or one for all.

    Args:
        group: of experts.
        dialect: of the file.
        turns: rows of gates and ups take turns where they are in one tensor.
    """
    if dialect.layout != "per expert":
        slots = _stacked_slots(group, dialect)
        return [_unit(group, dialect, turns, slots, range(group.experts))]
    found = []
    for e in range(group.experts):
        slots = [_Slot(proj, (i,), e) for i, proj in enumerate(group.spelled)]
        found.append(_unit(group, dialect, turns, slots, range(e, e + 1)))
    return found


def check_names(group: Group, dialect: Dialect) -> None:
    """Raises ValueError for matrices that a dialect of stacks has no name for."""
    if dialect.layout == "per expert":
        return
    known = dialect.projections.values()
    for slot in _stacked_slots(group, dialect):
        if slot.proj not in known:
            raise ValueError(f"{dialect.name} has no name for {slot.proj} of {group.module}; use compressed-tensors")


def _stacked_slots(group: Group, dialect: Dialect) -> list[_Slot]:
    if dialect.layout == "stacked" and len(group.matrices) > 1:
        return [_Slot("gate_up_proj", tuple(range(len(group.matrices))), None)]
    return [_Slot(matrix, (i,), None) for i, matrix in enumerate(group.matrices)]


def _unit(group: Group, dialect: Dialect, turns: bool, slots: list[_Slot], experts: range) -> Unit:
    names = [_spell(group, dialect, slot) for slot in slots]
    tensors = {name: info for slot, ours in zip(slots, names, strict=True) for name, info in ours.items()}

    def make() -> Iterator[Piece]:
        for e in experts:
            matrices = group.read(e)
            for slot, ours in zip(slots, names, strict=True):
                joined = join_rows([matrices[i] for i in slot.members], turns)
                parts = dialect.encoded(joined) if isinstance(joined, MXFP4Tensor) else (joined,)
                for name, part in zip(ours, parts, strict=True):
                    yield Piece(name, 0 if slot.expert is not None else e * part.nbytes, part)

    return Unit(tensors, make)


def _spell(group: Group, dialect: Dialect, slot: _Slot) -> dict[str, TensorInfo]:
    """The tensors of a slot."""
    lead = (group.experts,) if slot.expert is None else ()
    rows = len(slot.members) * group.shape[0]

    def name(part: int) -> str:
        return dialect.spell(Name(group.module, slot.expert, slot.proj, part))

    if group.is_bias:
        return {name(-1): TensorInfo(group.dtype, (*lead, rows))}
    scales = (*lead, rows, group.shape[1] // BLOCK_SIZE)
    codes = TensorInfo(dialect.dtypes[0], dialect.codes_shape(scales))
    return {name(0): codes, name(1): TensorInfo(dialect.dtypes[1], scales)}
