"""The tensors of a checkpoint by kind, from the headers of its files: half a million of them in seconds."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ..formats import CheckpointError, Dialect, FormatError, Found, TensorInfo, claimed, gguf
from ..formats.checkpoint import described
from .kinds import ACTIVATION_SCALES, EXPERTS, KINDS, kind_of, place_of
from .sources import Index, Source
from .tables import size, table

_BITS = {"BOOL": 8, "BF16": 16}  # other dtypes say it: F4, I8, F8_E4M3
_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789"))
_FLOATS = ("BF16", "F16", "F32", "F64")
_FILE_TYPE = "general.file_type"


@dataclass(frozen=True)
class Row:
    """Tensors of one kind, part, format and dtype.

    Attributes:
        kind: one of `kinds.KINDS`.
        part: "codes" and "scales" of a format that keeps them in tensors of their own, else "weights".
        format: such as "MXFP4", "NVFP4", "FP8", GGUF's name of a type, or the dtype itself.
        dialect: the layout on disk, as `formats` names it; "" for tensors that are what their dtype says.
        dtype: as the file calls it; "" if only names are known.
        name: of one of them.
        shape: of that one, as stored.
        shapes: how many different ones there are.
        tensors: how many.
        weights: numbers that they stand for; none for scales.
        bytes: that they take in the file.
    """

    kind: str
    part: str
    format: str
    dialect: str
    dtype: str
    name: str
    shape: tuple[int, ...]
    shapes: int
    tensors: int
    weights: int
    bytes: int


@dataclass(frozen=True)
class Share:
    """A line of a recipe: what the tensors of a kind are in.

    Attributes:
        kind: one of `kinds.KINDS`.
        format: as in `Row`.
        dialect: as in `Row`.
        tensors: how many, scales among them.
        weights: numbers that they stand for.
        bytes: that they take in the file, scales among them.
    """

    kind: str
    format: str
    dialect: str
    tensors: int
    weights: int
    bytes: int

    @property
    def bits_per_weight(self) -> float | None:
        """Bits a weight takes, its share of scales included; None where there are no weights."""
        return 8 * self.bytes / self.weights if self.weights else None


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint holds. `str()` is a page of tables, `to_dict()` is ready for JSON.

    Attributes:
        path: of the checkpoint.
        model_type: as its config says; "" if it does not.
        config: of config.json, or the metadata of a GGUF file.
        dialect: of its packed experts, as `formats` names it; None if it has none.
        file_type: the recipe that GGUF's `general.file_type` names, such as "Q4_K_M"; None if nothing names one.
        layers: how many have experts.
        experts_per_layer: how many each has; more than one number if layers differ.
        names_only: the files are not there, and nothing but names is known.
        listed_bytes: what the index of such files says they take.
        rows: the tensors.
        refusal: why it cannot be loaded; "" if it can.
    """

    path: str
    model_type: str
    config: Mapping[str, Any] = field(repr=False)
    dialect: str | None
    file_type: str | None
    layers: int
    experts_per_layer: tuple[int, ...]
    names_only: bool
    listed_bytes: int
    rows: tuple[Row, ...]
    refusal: str = ""

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return sum(row.tensors for row in self.rows)

    @property
    def weights(self) -> int:
        """The numbers that all of them stand for."""
        return sum(row.weights for row in self.rows)

    @property
    def bytes(self) -> int:
        """What all of them take in the files."""
        return sum(row.bytes for row in self.rows)

    @cached_property
    def recipe(self) -> tuple[Share, ...]:
        """What the tensors of each kind are in."""
        groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[row.kind, row.format, row.dialect].append(row)
        return tuple(
            Share(*key, sum(r.tensors for r in rows), sum(r.weights for r in rows), sum(r.bytes for r in rows))
            for key, rows in groups.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """The inventory in plain types."""
        return {
            "path": self.path,
            "model_type": self.model_type,
            "dialect": self.dialect,
            "file_type": self.file_type,
            "names_only": self.names_only,
            "refusal": self.refusal,
            "layers_with_experts": self.layers,
            "experts_per_layer": list(self.experts_per_layer),
            "tensors": self.tensors,
            "weights": self.weights,
            "bytes": self.listed_bytes if self.names_only else self.bytes,
            "recipe": [{**vars(share), "bits_per_weight": share.bits_per_weight} for share in self.recipe],
            "rows": [{**vars(row), "shape": list(row.shape)} for row in self.rows],
        }

    def __str__(self) -> str:
        """What it is, its recipe, and its tensors."""
        lines = [["kind", "held in", "dialect", "tensors", "weights", "size", "bits/weight"]]
        for share in self.recipe:
            bits = "-" if share.bits_per_weight is None else f"{share.bits_per_weight:.4g}"
            known = ["-", "-", "-"] if self.names_only else [f"{share.weights:,}", size(share.bytes), bits]
            lines.append([share.kind, share.format or "-", share.dialect or "-", f"{share.tensors:,}", *known])
        rows = [["kind", "part", "dtype", "shape", "tensors", "size", "example"]]
        for row in self.rows:
            shape = f"{list(row.shape)}" + (f" and {row.shapes - 1} more" if row.shapes > 1 else "")
            line = [row.kind, row.part, row.dtype or "-", shape, f"{row.tensors:,}", size(row.bytes), row.name]
            rows.append(line if not self.names_only else [*line[:2], "-", "-", line[4], "-", row.name])
        return "\n".join([*self._summary(), "", table(lines, (3, 4, 5, 6)), "", table(rows, (4, 5))])

    def _summary(self) -> Iterator[str]:
        yield f"{self.path}" + (f", {self.model_type}" if self.model_type else "")
        if self.names_only:
            listed = f", {size(self.listed_bytes)} as it says" if self.listed_bytes else ""
            yield f"the files are not here: {self.tensors:,} tensors by the names in the index{listed}"
        elif self.weights:
            bits = 8 * self.bytes / self.weights
            yield f"{self.tensors:,} tensors, {self.weights:,} weights in {size(self.bytes)}, {bits:.4g} bits each"
        if self.layers:
            counts = " or ".join(f"{count:,}" for count in self.experts_per_layer) or "an unknown number of"
            yield f"{self.layers} layers with {counts} experts each, {self.dialect or 'not packed'}"
        else:
            yield "no experts"
        if self.refusal:
            yield f"not loaded by hf_mxfp4: {self.refusal}"
        if self.file_type is not None:
            yield f"recipe by its name ({_FILE_TYPE}): {self.file_type}"


def inventory(source: Source) -> Inventory:
    """What a checkpoint holds, in the order of `kinds.KINDS`.

    Args:
        source: of `sources.open_source`.

    Raises:
        CheckpointError: tensors that contradict each other, or that are in no known format.
    """
    if isinstance(source, gguf.GGUFHeader):
        return _of_gguf(source)
    if isinstance(source, Index):
        return _of_index(source)
    refusal = ""
    try:
        found = source.detect()
    except FormatError as error:  # what it holds can be said all the same
        found, refusal = Found(None, [], {}, {}, {}), str(error)
    alike = _alike(source.tensors, _roles(found))
    return _inventory(source, source.config, alike, _stored_bytes, found.dialect, refusal=refusal)


class _Role(NamedTuple):
    """What a tensor is in the format of its weight."""

    part: str
    format: str
    dialect: str


def _roles(found: Found) -> dict[str, _Role]:
    """The role of each tensor of a packed or scaled weight beside the experts, by name."""
    roles: dict[str, _Role] = {}
    for name, row in found.layers.items():
        codes, scales = _parts(row)
        first, *others = row.siblings(name)
        roles.update({first: codes, **dict.fromkeys(others, scales)})
    for name, scale in found.fp8.items():
        roles[name], roles[scale] = _Role("weights", "FP8", ""), _Role("scales", "FP8", "")
    return roles


def _role(kind: str, name: str, info: TensorInfo, packed: tuple[Dialect, _Role, _Role] | None) -> _Role:
    """The role of a tensor that is an expert's, or neither packed nor scaled."""
    if packed is not None and kind == EXPERTS:
        row, codes, scales = packed
        if name.endswith(row.blocks) and info.dtype not in _FLOATS:
            return codes
        if name.endswith(row.endings[1:]):
            return scales
    return _Role("scales" if kind == ACTIVATION_SCALES else "weights", info.dtype, "")


def _parts(row: Dialect) -> tuple[_Role, _Role]:
    form = row.name.partition(" ")[0].upper() if row.is_lossy else "MXFP4"
    return _Role("codes", form, row.name), _Role("scales", form, row.name)


_Alike = dict[tuple[str, TensorInfo, _Role | None], list[str]]


def _alike(tensors: Mapping[str, TensorInfo], roles: Mapping[str, _Role]) -> _Alike:
    """The names of tensors that differ in the numbers in their names alone."""
    found: _Alike = defaultdict(list)
    for name, info in tensors.items():
        found[name.translate(_WITHOUT_DIGITS), info, roles.get(name)].append(name)
    return found


def _inventory(
    source: Source,
    config: Mapping[str, Any],
    alike: _Alike,
    stored_bytes: Callable[[str, TensorInfo], int],
    row: Dialect | None = None,
    **known: Any,
) -> Inventory:
    """The inventory of tensors that are sorted into those alike."""
    rows: dict[tuple[str, _Role, str], list[Row]] = defaultdict(list)
    packed = (row, *_parts(row)) if row is not None else None
    experts: dict[str, set[int]] = defaultdict(set)
    for (_, info, role), names in alike.items():
        kind, count = kind_of(names[0]), stored_bytes(names[0], info)
        role = role or _role(kind, names[0], info, packed)
        weights = {"codes": 2 * count, "scales": 0}.get(role.part, prod(info.shape) if info.dtype else 0)
        if kind == EXPERTS and role.part != "scales":
            _count_experts(names, info, experts)
        total = len(names)
        part = Row(kind, *role, info.dtype, names[0], info.shape, 1, total, weights * total, count * total)
        rows[kind, role, info.dtype].append(part)
    merged = sorted(map(_merged, rows.values()), key=lambda part: (KINDS.index(part.kind), part.format, part.part))
    is_packed = any(kind == EXPERTS and role.part == "codes" for kind, role, _ in rows)
    values = {
        "dialect": row.name if row is not None and is_packed else None,
        "file_type": None,
        "names_only": False,
        "listed_bytes": 0,
        "model_type": _model_type(config),
        **known,
    }
    return Inventory(
        path=str(source.path),
        config=config,
        layers=len(experts),
        experts_per_layer=tuple(sorted({len(ids) for ids in experts.values()} - {0})),
        rows=tuple(merged),
        **values,
    )


def _merged(rows: list[Row]) -> Row:
    """One row of rows that differ in names and shapes."""
    first = max(rows, key=lambda row: row.tensors)
    return Row(
        **{
            **vars(first),
            "shapes": len({row.shape for row in rows}),
            "tensors": sum(row.tensors for row in rows),
            "weights": sum(row.weights for row in rows),
            "bytes": sum(row.bytes for row in rows),
        }
    )


def _count_experts(names: list[str], info: TensorInfo, experts: dict[str, set[int]]) -> None:
    """Adds the experts that tensors are of to those of their layers."""
    for name in names:
        place = place_of(name)
        if place is None:
            continue
        if place.expert is not None:
            experts[place.module].add(place.expert)
        else:
            experts[place.module].update(range(info.shape[0] if len(info.shape) > 2 else 0))


def _model_type(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    inner = text.get("model_type") if isinstance(text, Mapping) else None
    return str(inner or config.get("model_type") or "")


def _stored_bytes(name: str, info: TensorInfo) -> int:
    """What a tensor takes in a safetensors file."""
    digits = re.match(r"[A-Z](\d+)", info.dtype)
    bits = _BITS.get(info.dtype) or (int(digits[1]) if digits else 0)
    if not bits:
        raise CheckpointError(f"{name} is stored as {info.dtype}, a dtype that this version does not know")
    return prod(info.shape) * bits // 8


def _of_gguf(header: gguf.GGUFHeader) -> Inventory:
    infos = gguf.tensor_infos(header)
    kinds = {info.dtype for name, info in infos.items() if kind_of(name) == EXPERTS} & {*gguf.ROWS}
    return _inventory(
        header,
        header.metadata,
        _alike(infos, {}),
        lambda name, info: int(header.tensors[name].data.nbytes),
        dialect=f"GGUF {' and '.join(sorted(kinds))}" if kinds else None,
        file_type=_file_type(header),
        model_type=header.architecture,
    )


def _file_type(header: gguf.GGUFHeader) -> str | None:
    """The name of the recipe that the file says it was made by."""
    number = header.metadata.get(_FILE_TYPE)
    if number is None:
        return None
    try:
        name: str = gguf.package().LlamaFileType(number).name
    except ValueError:
        return f"unknown ({number})"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _of_index(index: Index) -> Inventory:
    return _inventory(
        index,
        index.config,
        _alike(dict.fromkeys(index.names, TensorInfo("", ())), {}),
        lambda name, info: 0,
        claimed(described(index.config)),
        names_only=True,
        listed_bytes=index.bytes,
    )
