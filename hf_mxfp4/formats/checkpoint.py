"""A checkpoint as it lies on disk: which file holds which tensor, and what its config says. Reads no weights itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from typing_extensions import Self

from . import Found, detect, read_headers
from .base import CheckpointError, TensorInfo

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """A folder of safetensors files with a config.json, or one safetensors file.

    Attributes:
        path: as given.
        config: of config.json; empty where there is none.
        files: that hold tensors, in order.
        tensors: every tensor's dtype and shape, by name, in the order of files.
        homes: the file of each tensor.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads headers and config.

        Args:
            path: a folder, or a file `*.safetensors`.

        Raises:
            CheckpointError: no checkpoint there, or one that is not whole, named.
        """
        self.path = Path(path)
        folder = self.path if self.path.is_dir() else self.path.parent
        self.config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        self.files = _files(self.path)
        self.tensors: dict[str, TensorInfo] = {}
        self.homes: dict[str, Path] = {}
        for file in self.files:
            for name, info in read_headers([file]).items():
                if name in self.homes:
                    raise CheckpointError(f"{name} is in {self.homes[name]} and in {file}")
                self.tensors[name], self.homes[name] = info, file
        if (folder / INDEX).is_file() and self.path.is_dir():
            listed = _read_json(folder / INDEX).get("weight_map", {})
            lost = next((name for name in listed if name not in self.homes), None)
            if lost is not None:
                raise CheckpointError(f"{folder / INDEX} names {lost}, which {folder / listed[lost]} does not hold")
        self._open = ExitStack()
        self._handles: dict[Path, Any] = {}

    @property
    def quantization(self) -> Mapping[str, Any]:
        """What the config says of the weights, wherever it says it; empty if it says nothing."""
        return described(self.config)

    @property
    def model_type(self) -> str:
        """Of the language model, empty if the config does not say."""
        text = self.config.get("text_config")
        inner = text.get("model_type") if isinstance(text, Mapping) else None
        return str(inner or self.config.get("model_type") or "")

    def detect(self) -> Found:
        """How its experts and other layers are held, see `formats.detect`."""
        return detect(self.tensors, self.quantization)

    def read(self, name: str) -> Tensor:
        """A tensor, a view of the file that is read when it is used."""
        tensor: Tensor = self._handle(name).get_tensor(name)
        return tensor

    def read_slice(self, name: str, index: int) -> Tensor:
        """One entry of a tensor's first dimension."""
        tensor: Tensor = self._handle(name).get_slice(name)[index]
        return tensor

    def _handle(self, name: str) -> Any:
        file = self.homes[name]
        if file not in self._handles:
            self._handles[file] = self._open.enter_context(safe_open(file, framework="pt"))
        return self._handles[file]

    def close(self) -> None:
        """Closes the files."""
        self._handles.clear()
        self._open.close()

    def __enter__(self) -> Self:
        """Nothing more."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the files."""
        self.close()


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's config.json says of its weights, as one dictionary; empty if it says nothing.

    It may stand in `quantization_config`, at the top or in `text_config`. Two kinds of checkpoint say it elsewhere
    too: DeepSeek-V4 has `expert_dtype` beside it, and MLX has `quantization`.

    Args:
        config: of config.json.
    """
    text = config.get("text_config")
    levels = [level for level in (config, text) if isinstance(level, Mapping)]

    def look(key: str) -> Any:
        return next((level[key] for level in levels if level.get(key) is not None), None)

    stored = look("quantization_config")
    found = dict(stored) if isinstance(stored, Mapping) else {}
    if found.get("quant_method") == "fp8" and look("expert_dtype") is not None:
        found.setdefault("expert_dtype", look("expert_dtype"))
    mlx = look("quantization")
    if "quant_method" not in found and isinstance(mlx, Mapping):
        found = {**mlx, **found}
    return found


def _files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix == ".safetensors":
        return [path]
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_file():
        raise CheckpointError(f"{path} is no safetensors file; expected a folder of them, or one")
    if (path / INDEX).is_file():
        listed = _read_json(path / INDEX).get("weight_map")
        if not isinstance(listed, Mapping) or not all(isinstance(file, str) for file in listed.values()):
            raise CheckpointError(f"{path / INDEX} has no weight_map of names and files")
        return [path / name for name in dict.fromkeys(listed.values())]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise CheckpointError(f"{path} holds no safetensors files")
    return found


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    if not isinstance(read, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return read
