"""Safetensors files written piece by piece, and a journal of those that are whole.

A file is its header's length (8 bytes, the low byte first), a header in JSON with every tensor's dtype, shape and
place, and the tensors' bytes without gaps, wider dtypes first so that each lies at a multiple of its own size. All
places are known before the first weight is read, so that pieces go where they belong in any order and none is kept.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..formats import TensorInfo
from .layout import Unit

MAX_BYTES = 5 * 10**9
"""The most that a file holds, unless one tensor is larger."""

_BITS = {"BOOL": 8}
_ALIGNMENT = 8


def bits(dtype: str) -> int:
    """Of an element of a dtype by safetensors' name, such as 16 of "BF16"."""
    digits = re.search(r"\d+", dtype)
    return _BITS[dtype] if digits is None else int(digits[0])


def nbytes(info: TensorInfo) -> int:
    """Of a tensor."""
    return prod(info.shape) * bits(info.dtype) // 8


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, by view where they lie together."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def unit_bytes(unit: Unit) -> int:
    """Of all tensors of a unit."""
    return sum(map(nbytes, unit.tensors.values()))


def into_files(units: Iterable[Unit], limit: int) -> dict[str, list[Unit]]:
    """The units of each file by its name, in order, each file of at most `limit` bytes unless one unit is larger."""
    files: list[list[Unit]] = []
    size = 0
    for unit in units:
        added = unit_bytes(unit)
        if not files or size + added > limit:
            files.append([])
            size = 0
        files[-1].append(unit)
        size += added
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": units for i, units in enumerate(files, 1)}


def write(path: Path, units: list[Unit], advance: Callable[[int], Any]) -> None:
    """Writes a file under another name until all of it is on disk.

    Args:
        path: of the file.
        units: its tensors.
        advance: called with the bytes of each piece.
    """
    tensors = {name: info for unit in units for name, info in unit.tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name in sorted(tensors, key=lambda name: (-bits(tensors[name].dtype), name)):
        info, places[name] = tensors[name], end
        end += nbytes(info)
        header[name] = {"dtype": info.dtype, "shape": info.shape, "data_offsets": (places[name], end)}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    start, written = 8 + len(text), 0
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for unit in units:
            for piece in unit.make():
                view = raw(piece.tensor)
                stream.seek(start + places[piece.name] + piece.offset)
                stream.write(view)
                written += len(view)
                advance(len(view))
        stream.flush()
        os.fsync(stream.fileno())
    if written != end:
        raise RuntimeError(f"{path.name} was to hold {end} bytes of tensors, and {written} were made")
    part.replace(path)


class Journal:
    """What a conversion that may be interrupted has done, in a file that is whole at any time.

    Attributes:
        done: the files that are whole, each with what was noted of it.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        """Takes up what `path` says if it is of the same identity.

        Args:
            path: of the journal.
            identity: what the conversion is of and how, so that another one does not take this one's files for its own.
        """
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.done: dict[str, list[float]] = {}
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            stored = {}
        self.is_taken_up = stored.get("identity") == self.identity
        if self.is_taken_up:
            self.done = stored["done"]

    def note(self, file: str, *what: float) -> None:
        """Notes that a file is whole."""
        self.done[file] = list(what)
        self.save()

    def save(self) -> None:
        """Writes the journal."""
        fresh = self.path.with_name(f"{self.path.name}.part")
        with fresh.open("w", encoding="utf-8") as stream:
            json.dump({"identity": self.identity, "done": self.done}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(self.path)
