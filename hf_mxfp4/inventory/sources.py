"""Where an inventory is taken: a checkpoint that is open, of which no weights are read yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..formats import gguf
from ..formats.checkpoint import INDEX, Checkpoint


class Index(NamedTuple):
    """An index without the files that it lists.

    Attributes:
        path: of the folder.
        config: of config.json.
        names: of all tensors.
        bytes: that the index says they take; 0 if it does not.
    """

    path: Path
    config: Mapping[str, Any]
    names: list[str]
    bytes: int


Source = Checkpoint | gguf.GGUFHeader | Index


def open_source(path: str | Path) -> Source:
    """Opens a checkpoint; reads headers and no weights.

    Args:
        path: a folder of safetensors files, one `*.safetensors` or one `*.gguf`; or a folder with an index of
            safetensors files none of which is there.

    Raises:
        CheckpointError: no checkpoint there, or one that is not whole, named.
        ImportError: a GGUF file, and the package `gguf` is missing.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return gguf.read_header(path)
    return _index_alone(path) or Checkpoint(path)


def _index_alone(path: Path) -> Index | None:
    """The index in a folder; None if there is none, or a file that it lists."""
    if not (path / INDEX).is_file():
        return None
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        files, metadata = index["weight_map"], index.get("metadata") or {}
        if any((path / file).exists() for file in set(files.values())):
            return None
        config = (
            json.loads((path / "config.json").read_text(encoding="utf-8")) if (path / "config.json").is_file() else {}
        )
        return Index(path, config, list(files), int(metadata.get("total_size", 0)))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None  # no index; whoever opens the folder as a checkpoint says why
