"""A save that is there whole or not at all.

Transformers writes a checkpoint file by file over what stands in the folder, and leaves weight files behind that the
new index does not name. Here a packed model is first written to a folder inside the target; only when all of it is on
disk do its files take the place of the old ones, weights before the config that describes them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STAGING = ".hf_mxfp4-saving"

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
        shutil.rmtree(staging, ignore_errors=True)  # of a save that was killed
        staging.mkdir()
        result = stock(model, staging, *args, **kwargs)
        _sync(staging)
        _move(staging, folder)
    except BaseException:
        shutil.rmtree(folder if is_new else staging, ignore_errors=True)
        raise
    staging.rmdir()
    return result


def applies(target: str | os.PathLike[str], kwargs: dict[str, Any]) -> bool:
    """Whether a save can go through a folder of its own: not to the Hub, and not from several processes at once."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    elsewhere = kwargs.get("push_to_hub") or kwargs.get("distributed_checkpoint") or kwargs.get("variant")
    return not (elsewhere or distributed or Path(target).is_file())


def _sync(folder: Path) -> None:
    """Waits until every file is on disk, so that a full or failing disk is noticed before anything is replaced."""
    for file in folder.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


def _move(staging: Path, folder: Path) -> None:
    """Puts the new files in the place of the old, and removes weights of an older checkpoint."""
    new = sorted((file.name for file in staging.iterdir()), key=lambda name: (name == "config.json", name))
    for name in new:
        (staging / name).replace(folder / name)
    for file in folder.iterdir():
        if file.name not in new and _WEIGHTS.fullmatch(file.name):
            file.unlink()
