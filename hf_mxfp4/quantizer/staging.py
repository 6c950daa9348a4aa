"""A save that is there whole or not at all.

Transformers writes a checkpoint file by file over what stands in the folder, and leaves weight files behind that the
new index does not name. Here a packed model is first written to a folder inside the target. Only when all of it is on
disk do its files take the place of the old ones, which are put aside and come back if that fails half way. While
files change places the target has no config.json, so what a killed process leaves does not load as a model that
is neither the old nor the new; the next save puts the old files back before it begins.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STAGING = ".hf_mxfp4-saving"
_NEW, _OLD, _NAMES = "new", "old", "names.json"  # inside it: what is saved, what it replaces, the names of the former

_WEIGHTS = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def save(stock: Callable[..., Any], model: Any, target: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
    """Saves a packed model through Transformers' own `save_pretrained`, into `target` whole or not at all.

    Args:
        stock: `PreTrainedModel.save_pretrained`.
        model: what to save.
        target: the folder.
        args: further arguments of `stock`.
        kwargs: further arguments of `stock`.

    Returns:
        What `stock` returns.

    Raises:
        OSError: the folder cannot be made or written to; what was in it is as it was.
    """
    folder = Path(target)
    is_new = not folder.exists()
    staging = folder / STAGING
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _undo(folder)  # a save that was killed
        (staging / _NEW).mkdir(parents=True)
        result = stock(model, staging / _NEW, *args, **kwargs)
        _sync(staging / _NEW)
        _exchange(folder)
    except BaseException:
        if is_new:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _undo(folder)
        raise
    shutil.rmtree(staging)
    return result


def applies(target: str | os.PathLike[str], kwargs: dict[str, Any]) -> bool:
    """Whether a save can go through a folder of its own: not to the Hub, and not from several processes at once."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    elsewhere = kwargs.get("push_to_hub") or kwargs.get("distributed_checkpoint") or kwargs.get("variant")
    return not (elsewhere or distributed or Path(target).is_file())


def _sync(folder: Path) -> None:
    """Waits until every file is on disk, so that a full or failing disk is noticed before anything is replaced."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _config_last(name: str) -> tuple[bool, str]:
    return name == "config.json", name


def _exchange(folder: Path) -> None:
    """Puts the old files aside, weights of any older checkpoint with them, and the new ones in their place."""
    staging = folder / STAGING
    names = sorted((file.name for file in (staging / _NEW).iterdir()), key=_config_last)
    replaced = [file.name for file in folder.iterdir() if file.name in names or _WEIGHTS.fullmatch(file.name)]
    (staging / _OLD).mkdir()
    (staging / "written").write_text(json.dumps(names), encoding="utf-8")
    (staging / "written").replace(staging / _NAMES)  # whole when it is there: from here on files move
    for name in sorted(replaced, key=_config_last, reverse=True):
        (folder / name).replace(staging / _OLD / name)
    for name in names:
        (staging / _NEW / name).replace(folder / name)


def _undo(folder: Path) -> None:
    """Clears up after a save that stopped somewhere: the old files are back, or all the new ones are in place.

    A new file goes back to where it came from, so that this too can be stopped anywhere and done again.
    """
    staging = folder / STAGING
    names = json.loads((staging / _NAMES).read_text(encoding="utf-8")) if (staging / _NAMES).exists() else []
    if any((staging / _NEW / name).exists() for name in names):
        for name in reversed(names):
            if not (staging / _NEW / name).exists():
                (folder / name).replace(staging / _NEW / name)
        for name in sorted((file.name for file in (staging / _OLD).iterdir()), key=_config_last):
            (staging / _OLD / name).replace(folder / name)
    shutil.rmtree(staging, ignore_errors=True)
