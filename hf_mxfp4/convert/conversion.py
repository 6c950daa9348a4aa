"""From one checkpoint to another, file by file, without building a model.

The experts are as the target's dialect has them, the same canonical bytes; dense ones are quantized. What becomes of
other tensors stands in `sources`. Everything is made in `TARGET.partial`, with a journal, and takes the target's name
when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from ..families import INTERLEAVED_MODELS
from ..formats import Dialect, named, stacked
from ..formats.checkpoint import INDEX, Checkpoint
from ..mxfp4 import ScaleRule, Ties, check_options
from ..quantizer.config import SAVE_FORMATS
from . import gguf, shards
from .experts import Rules, takes_turns
from .layout import Unit, check_names, units
from .sources import Options, Source, open_checkpoint, target_config

TARGETS = (*(name for name in SAVE_FORMATS if name != "auto"), gguf.NAME)
"""What a checkpoint can be converted to."""

_JOURNAL, _NEW = "journal.json", "new"


class Conversion(NamedTuple):
    """What was done.

    Attributes:
        path: what was written.
        experts: modules of experts.
        files: of weights.
        nbytes: of all tensors.
        decoded: layers beside experts that were decoded to bfloat16.
        error: that requantizing added, relative: the root of squared differences over squared weights; None if all
            bytes of experts are the source's own, or their weights were dense.
    """

    path: Path
    experts: int
    files: int
    nbytes: int
    decoded: int
    error: float | None


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    from_dense: bool = False,
    requantize: bool = False,
    rule: ScaleRule = "mse",
    ties: Ties = "even",
    progress: bool = True,
) -> Conversion:
    """Writes a checkpoint anew with its experts in another dialect of MXFP4.

    Reads and writes a matrix of one expert at a time. One that was interrupted goes on where it was when it is called
    again with the same arguments and the source has not changed, and ends with the same bytes; to GGUF it begins anew.

    Args:
        source: a folder of safetensors files with a config.json, or a GGUF file.
        target: a folder that does not exist, or a file `*.gguf`. It appears whole or not at all.
        to: one of `TARGETS`.
        from_dense: the source's experts are dense and are quantized.
        requantize: the source's experts are in NVFP4 and are decoded and quantized, which loses precision.
        rule: how weights that are not MXFP4 get their scales, see `mxfp4.quantize`.
        ties: where weights halfway between two values go, see `mxfp4.quantize`.
        progress: show a bar on standard error.

    Returns:
        What was done.

    Raises:
        CheckpointError: a source that is not whole, or holds no experts that can be converted.
        ValueError: an option that does not fit the source.
        FileExistsError: the target exists.
        OSError: it cannot be written. What was is kept for another try.
    """
    check_options(rule, ties)
    if to not in TARGETS:
        raise ValueError(f"to is {to!r}; expected one of {', '.join(TARGETS)}")
    options, dialect = Options(to, from_dense, requantize, rule, ties), named(to)
    rules, target = Rules(rule, ties, {}), Path(target)
    with ExitStack() as opened:
        if gguf.is_file(source):
            found = gguf.open_file(Path(source), options)
        else:
            found = open_checkpoint(opened.enter_context(Checkpoint(source)), dialect, options, rules)
        if dialect is None:
            _refuse_existing(target)
            size = gguf.write(found, target, progress)
            return _conversion(found, target, (1, size), [_summed(rules)])
        return _to_folder(found, target, dialect, options, rules, progress)


def _to_folder(
    source: Source, target: Path, dialect: Dialect, options: Options, rules: Rules, progress: bool
) -> Conversion:
    """Converts into a folder of safetensors files."""
    files = _files(source, dialect)
    work = target.with_name(f"{target.name}.partial")
    journal = shards.Journal(work / _JOURNAL, _identity(source, options))
    size = sum(shards.unit_bytes(unit) for made in files.values() for unit in made)
    # With no new folder in its own, a conversion was killed after its last step.
    if not (journal.is_taken_up and target.is_dir() and not (work / _NEW).exists()):
        _refuse_existing(target)
        if os.path.lexists(work) and not _is_ours(work):
            raise FileExistsError(f"{work} is in the way, and no conversion made it; move or remove it")
        if not journal.is_taken_up:
            shutil.rmtree(work, ignore_errors=True)
        (work / _NEW).mkdir(parents=True, exist_ok=True)
        journal.save()
        with tqdm(total=size, unit="B", unit_scale=True, disable=not progress, desc="Converting") as bar:
            _write_files(files, work / _NEW, journal, rules, bar)
        _write_rest(source, files, target_config(source, dialect, options), work / _NEW)
        (work / _NEW).rename(target)
    result = _conversion(source, target, (len(files), size), list(journal.done.values()))
    shutil.rmtree(work)
    return result


def _is_ours(work: Path) -> bool:
    """Whether a folder holds nothing but what a conversion that was stopped leaves."""
    if work.is_symlink() or not work.is_dir():
        return False
    return all(entry.name == _NEW or entry.name.startswith(_JOURNAL) for entry in work.iterdir())


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already; give a path that does not, or remove it")


def _conversion(source: Source, target: Path, size: tuple[int, int], losses: list[list[float]]) -> Conversion:
    error, norm = (sum(noted[i] for noted in losses) for i in (0, 1))
    modules = {group.module for group in source.groups}
    lost = (error / norm) ** 0.5 if norm else None
    return Conversion(target, len(modules), *size, source.decoded, lost)


def _identity(source: Source, options: Options) -> dict[str, Any]:
    """What tells this conversion from any other."""
    stats = {file.name: file.stat() for file in source.files}
    config = json.dumps([source.config, source.stored], sort_keys=True).encode()
    return {
        "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "config": hashlib.sha256(config).hexdigest(),
        "options": options._asdict(),
        "version": metadata.version("hf_mxfp4"),
    }


def _files(source: Source, dialect: Dialect) -> dict[str, list[Unit]]:
    """What each file is to hold; ValueError for a dialect that does not fit the source."""
    if dialect is stacked.GPT_OSS and source.model_type not in INTERLEAVED_MODELS:
        raise ValueError(f"gpt-oss is for gpt-oss models, not {source.model_type or 'others'}; use hf_mxfp4")
    turns = takes_turns(source.model_type)
    made = {name: [unit] for name, unit in source.others.items()}
    for group in source.groups:
        check_names(group, dialect)
        made[group.sources[0]] = units(group, dialect, turns)
    ordered = [unit for name in source.order for unit in made.get(name, ())]
    return shards.into_files(ordered, min(shards.MAX_BYTES, max(file.stat().st_size for file in source.files)))


def _write_files(files: dict[str, list[Unit]], folder: Path, journal: shards.Journal, rules: Rules, bar: Any) -> None:
    """Writes the files of weights that the journal does not say are whole."""
    assert rules.losses is not None
    for name, made in files.items():
        if name in journal.done and (folder / name).is_file():
            bar.update(sum(map(shards.unit_bytes, made)))
            continue
        rules.losses.clear()
        shards.write(folder / name, made, bar.update)
        journal.note(name, *_summed(rules))


def _summed(rules: Rules) -> list[float]:
    """The squares of the errors that requantizing added, and of the weights."""
    losses = list((rules.losses or {}).values())
    return [sum(error for error, _ in losses), sum(norm for _, norm in losses)]


def _write_rest(source: Source, files: dict[str, list[Unit]], config: dict[str, Any], folder: Path) -> None:
    """Writes the index and the config, and copies files that hold no weights."""
    source.copy_rest(folder)
    if len(files) > 1:
        homes = {name: file for file, made in files.items() for unit in made for name in unit.tensors}
        size = sum(shards.unit_bytes(unit) for made in files.values() for unit in made)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(homes.items()))}
        _write_json(folder / INDEX, index)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(value, indent=2, sort_keys=True) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
