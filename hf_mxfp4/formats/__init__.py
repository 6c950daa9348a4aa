"""MXFP4 layouts on disk: what a file's tensors are called and shaped, and the way to canonical bytes and back.

One module a layout, each with pure functions between the tensors that a file names and canonical `MXFP4Tensor`s (see
`mxfp4`). Dialects that differ only in names are rows of `DIALECTS`. A new dialect is a row with its `decode`; what its
config looks like, for reading and for writing, stands in `quantizer/config.py`.

    gpt-oss              {experts}.{proj}_blocks [E, N, K/32, 16], {experts}.{proj}_scales [E, N, K/32]
    hf_mxfp4             {experts}.{proj}_blocks [E, N, K/2],      {experts}.{proj}_scales [E, N, K/32]
    compressed-tensors   {experts}.{e}.{proj}.weight_packed [N, K/2], {experts}.{e}.{proj}.weight_scale [N, K/32]

The tensors of a file decide; its config is not asked.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from ..mxfp4 import blocks_shape
from . import per_expert, stacked
from .base import CheckpointError, Dialect, TensorInfo

__all__ = [
    "DIALECTS",
    "CheckpointError",
    "Dialect",
    "TensorInfo",
    "detect",
    "float_dtypes",
    "is_expert",
    "read_headers",
]


DIALECTS = (stacked.GPT_OSS, stacked.HF_MXFP4, per_expert.COMPRESSED_TENSORS)

_CODE_DTYPES = ("U8", "I8")
_SCALE_DTYPES = ("U8", "I8", "F8_E8M0")
_INDEX_DTYPES = ("BOOL", "I16", "I32", "I64", "U16", "U32", "U64")
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_EXPERT = re.compile(r"(?:^|\.)experts?\.(\d+\.|.*proj)")


def detect(tensors: Mapping[str, TensorInfo]) -> Dialect | None:
    """Finds the dialect in which a checkpoint holds its experts.

    Args:
        tensors: every tensor of the checkpoint by name.

    Returns:
        The dialect, or None for a checkpoint that holds no MXFP4 experts.

    Raises:
        CheckpointError: experts in more than one dialect, a tensor of codes without its scales or the reverse, or a
            pair whose shapes do not fit.
    """
    found: dict[Dialect, str] = {}
    owned: set[str] = set()
    for name, info in tensors.items():
        row = _row_of(name, info)
        if row is None:
            continue
        owned |= {name, _check_pair(name, info, row, tensors)}
        if is_expert(name):
            found.setdefault(row, name)
    if len(found) > 1:
        examples = ", ".join(f"{name} ({row.name})" for row, name in found.items())
        raise CheckpointError(f"this checkpoint holds experts in more than one layout: {examples}")
    _check_the_rest({name: info for name, info in tensors.items() if name not in owned})
    return next(iter(found), None)


def is_expert(name: str) -> bool:
    """Whether a tensor's name is one of routed experts."""
    return _EXPERT.search(name) is not None


def float_dtypes(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The floating point dtypes of matrices and stacks, by safetensors' names."""
    return {info.dtype for info in tensors.values() if info.dtype in _FLOAT_DTYPES and len(info.shape) >= 2}


def read_headers(files: Iterable[str | Path]) -> dict[str, TensorInfo]:
    """Reads the headers of safetensors files, no weights.

    Args:
        files: paths; of others than `*.safetensors` only those that torch.save wrote are looked at, for being whole.

    Returns:
        Every tensor by name.

    Raises:
        CheckpointError: a file that is missing, cut short or no safetensors file, or a tensor that is in two files,
            named.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in map(Path, files):
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.suffix != ".safetensors":
            with file.open("rb") as stream:
                if b"PK".startswith(stream.read(2)) and not zipfile.is_zipfile(stream):  # an empty file is neither
                    raise CheckpointError(f"{file} is cut short: it begins like a file of torch.save and has no end")
            continue
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a dictionary
                    if name in tensors:
                        raise CheckpointError(f"{name} is in {file} and in another file of the checkpoint")
                    part = opened.get_slice(name)
                    tensors[name] = TensorInfo(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is no whole safetensors file: {error}") from error
    return tensors


def _row_of(name: str, info: TensorInfo) -> Dialect | None:
    """The dialect that a tensor of codes belongs to; None for any other tensor."""
    rows = [
        row for row in DIALECTS if name.endswith(row.blocks) and (row.layout == "per expert" or _EXPERT.search(name))
    ]
    fitting = [row for row in rows if row.block_dims == len(info.shape)]
    if rows and info.dtype not in _CODE_DTYPES:
        raise CheckpointError(f"{name} has dtype {info.dtype}; MXFP4 codes are U8, two a byte")
    if rows and not fitting:
        raise CheckpointError(f"{name} has shape {list(info.shape)}; expected {rows[0].block_dims} dimensions")
    return fitting[0] if fitting else None


def _check_pair(name: str, info: TensorInfo, row: Dialect, tensors: Mapping[str, TensorInfo]) -> str:
    """The name of the scales that belong to a tensor of codes, whose dtype and shape fit it."""
    scales_name = name.removesuffix(row.blocks) + row.scales
    scales = tensors.get(scales_name)
    if scales is None:
        raise CheckpointError(f"{scales_name} is missing from the checkpoint, which holds {name}")
    if scales.dtype not in _SCALE_DTYPES:
        raise CheckpointError(f"{scales_name} has dtype {scales.dtype}; scale bytes are U8 or F8_E8M0")
    grouped = row.block_dims == len(scales.shape) + 1
    fits = blocks_shape(scales.shape, grouped=grouped) if scales.shape else ()
    if info.shape != fits:
        raise CheckpointError(
            f"{name} {list(info.shape)} does not fit {scales_name} {list(scales.shape)}; expected {list(fits)}"
        )
    return scales_name


def _check_the_rest(tensors: Mapping[str, TensorInfo]) -> None:
    """Raises for tensors in another low-bit format, and for scales of experts whose codes are lost."""
    for name, info in tensors.items():
        for row in DIALECTS:
            lost = name.removesuffix(row.scales) + row.blocks
            if name.endswith(row.scales) and info.dtype in _SCALE_DTYPES and is_expert(name):
                raise CheckpointError(f"{lost} is missing from the checkpoint, which holds {name}")
        low_bit = info.dtype not in _FLOAT_DTYPES and (is_expert(name) or info.dtype not in _INDEX_DTYPES)
        if low_bit and len(info.shape) >= 2:
            raise CheckpointError(
                f"{name} is stored as {info.dtype}, a format that this version does not read; weights beside MXFP4"
                f" experts are {', '.join(_FLOAT_DTYPES)}"
            )
