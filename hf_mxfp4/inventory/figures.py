"""Figures of every group of 32 weights in a checkpoint's MXFP4 tensors, read a matrix at a time.

A group is zero if all its codes are 0 or 8, saturated if one of them is 7 or 15 (the magnitude 6, the largest that a
code has), and NaN if its scale byte is 255. Codes and scales are judged apart: a zero group can have any scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from ..formats import CheckpointError, Dialect, gguf
from ..formats.checkpoint import Checkpoint
from ..mxfp4 import SCALE_NAN
from .kinds import EXPERTS, kind_of
from .sources import Index, Source
from .tables import table

_CHUNK = 1 << 16
_BIAS = 127
_MAGNITUDES = 0x7777777777777777
_LOW_BITS = 0x1111111111111111


@dataclass(frozen=True)
class Groups:
    """The groups of one projection in all layers.

    Attributes:
        projection: as the layout calls it; a kind of tensors for those beside the experts.
        groups: how many.
        zero: of these, those whose codes are all zero.
        saturated: those with a code of the largest magnitude.
        nan: those whose scale byte is 255.
        low: the least scale byte other than 255; None if there is none.
        high: the greatest.
        first_nan: the name of the first tensor with a scale byte of 255.
    """

    projection: str
    groups: int
    zero: int
    saturated: int
    nan: int
    low: int | None
    high: int | None
    first_nan: str | None


class GroupReport(NamedTuple):
    """The groups of every projection. `str()` is a table, `to_dict()` is ready for JSON."""

    rows: tuple[Groups, ...]

    @property
    def total(self) -> Groups:
        """All of them as one."""
        lows = [row.low for row in self.rows if row.low is not None]
        highs = [row.high for row in self.rows if row.high is not None]
        return Groups(
            "all",
            sum(row.groups for row in self.rows),
            sum(row.zero for row in self.rows),
            sum(row.saturated for row in self.rows),
            sum(row.nan for row in self.rows),
            min(lows, default=None),
            max(highs, default=None),
            next((row.first_nan for row in self.rows if row.first_nan is not None), None),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report in plain types."""
        return {"projections": [vars(row) for row in self.rows], "all": vars(self.total)}

    def __str__(self) -> str:
        """A line for each projection and one for all, and where NaN was found."""
        if not self.rows:
            return "no groups of MXFP4 weights"
        lines = [["projection", "groups", "scales", "as powers", "zero", "saturated", "0xFF"]]
        for row in (*self.rows, self.total):
            parts = [f"{100 * part / row.groups:.3f} %" for part in (row.zero, row.saturated)]
            lines.append([row.projection, f"{row.groups:,}", *_range(row), *parts, f"{row.nan:,}"])
        found = self.total.first_nan
        return table(lines, (1, 4, 5, 6)) + (f"\nscale bytes of 0xFF, NaN, first in {found}" if found else "")


def groups(source: Source, progress: bool = False) -> GroupReport:
    """Counts the groups of all MXFP4 tensors of a checkpoint. Reads all of their bytes, a matrix at a time.

    Args:
        source: of `sources.open_source`.
        progress: show a progress bar.

    Raises:
        CheckpointError: an index without its files, or tensors that contradict each other.
    """
    if isinstance(source, Index):
        raise CheckpointError(
            f"{source.path} holds an index and not the files that it lists: there are no bytes to read"
        )
    total, parts = _of_gguf(source) if isinstance(source, gguf.GGUFHeader) else _of_checkpoint(source)
    tallies: dict[str, _Tally] = {}
    with tqdm(total=total, desc="groups", unit=" tensors", disable=not progress) as bar:
        previous = ""
        for name, projection, codes, scales in parts:
            tallies.setdefault(projection, _Tally()).add(name, codes, scales)
            bar.update(name != previous)
            previous = name
    return GroupReport(tuple(tally.result(projection) for projection, tally in tallies.items()))


_Part = tuple[str, str, Tensor, Tensor]  # a tensor's name, its projection, codes uint8 [G, 16], scales uint8 [G]


def _of_checkpoint(checkpoint: Checkpoint) -> tuple[int, Iterator[_Part]]:
    found = checkpoint.detect()
    pairs = [(name, found.dialect) for name in found.experts] + list(found.layers.items())
    wanted = [(name, row) for name, row in pairs if row is not None and not row.is_lossy]
    wanted.sort(key=lambda pair: checkpoint.files.index(checkpoint.homes[pair[0]]))
    return len(wanted), _read(checkpoint, wanted)


def _read(checkpoint: Checkpoint, wanted: list[tuple[str, Dialect]]) -> Iterator[_Part]:
    file = None
    for name, row in wanted:
        if checkpoint.homes[name] != file:  # files that were read are let go of
            checkpoint.close()
            file = checkpoint.homes[name]
        parsed = row.parse(name)
        kind = kind_of(name)
        projection = parsed.proj if parsed is not None and kind == EXPERTS else kind
        names = row.siblings(name)[:2]
        count = checkpoint.tensors[name].shape[0]
        for i in range(count) if row.dims > 2 and kind == EXPERTS else (None,):
            raw = [checkpoint.read(part) if i is None else checkpoint.read_slice(part, i) for part in names]
            codes, scales = row.decode(*raw)
            yield name, projection, codes.reshape(-1, 16), scales.reshape(-1)
    checkpoint.close()


def _of_gguf(header: gguf.GGUFHeader) -> tuple[int, Iterator[_Part]]:
    wanted = [name for name, tensor in header.tensors.items() if tensor.dtype == gguf.TYPE]
    return len(wanted), _read_gguf(header, wanted)


def _read_gguf(header: gguf.GGUFHeader, wanted: list[str]) -> Iterator[_Part]:
    for name in wanted:
        kind = kind_of(name)
        projection = name.split(".")[-2] if kind == EXPERTS else kind
        stored = header.tensors[name].bytes()
        for matrix in stored if stored.ndim > 2 else (stored,):
            blocks = matrix.reshape(-1, gguf.BLOCK_BYTES)
            # In which order a group's codes stand makes no difference.
            yield name, projection, blocks[:, 1:], blocks[:, 0]


class _Tally:
    """What is counted of one projection."""

    def __init__(self) -> None:
        self.zero, self.saturated = 0, 0
        self.scales = torch.zeros(256, dtype=torch.int64)
        self.first_nan: str | None = None

    def add(self, name: str, codes: Tensor, scales: Tensor) -> None:
        """Counts codes uint8 [G, 16] and scales uint8 [G]."""
        for top in range(0, len(scales), _CHUNK):
            # A copy of its own: what is viewed as words must be aligned.
            chunk = codes[top : top + _CHUNK].clone(memory_format=torch.contiguous_format)
            words = chunk.view(torch.int64)
            self.zero += int((words & _MAGNITUDES).eq(0).all(dim=1).sum())
            largest = words & words >> 1 & words >> 2 & _LOW_BITS  # a bit where a code's three are set
            self.saturated += int(largest.ne(0).any(dim=1).sum())
            found = torch.bincount(scales[top : top + _CHUNK], minlength=256)
            if self.first_nan is None and found[SCALE_NAN]:
                self.first_nan = name
            self.scales += found

    def result(self, projection: str) -> Groups:
        """The figures."""
        there = self.scales[:SCALE_NAN].nonzero().flatten().tolist()
        return Groups(
            projection=projection,
            groups=int(self.scales.sum()),
            zero=self.zero,
            saturated=self.saturated,
            nan=int(self.scales[SCALE_NAN]),
            low=there[0] if there else None,
            high=there[-1] if there else None,
            first_nan=self.first_nan,
        )


def _range(row: Groups) -> tuple[str, str]:
    """The scales' range, as bytes and as powers of two."""
    if row.low is None or row.high is None:
        return "-", "-"
    return f"{row.low} to {row.high}", f"2^{row.low - _BIAS} to 2^{row.high - _BIAS}"
