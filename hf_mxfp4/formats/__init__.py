"""MXFP4 layouts on disk: what a file's tensors are called and shaped, and the way to canonical bytes and back.

One module a layout, each a pure pair `decode` / `encode` between the tensors that a file names and canonical
`MXFP4Tensor`s (see `mxfp4`), by view and reshape only. Dialects that differ only in names are rows of `DIALECTS`.

    gpt-oss              {experts}.{proj}_blocks [E, N, K/32, 16], {experts}.{proj}_scales [E, N, K/32]
    hf_mxfp4             {experts}.{proj}_blocks [E, N, K/2],      {experts}.{proj}_scales [E, N, K/32]
    compressed-tensors   {experts}.{e}.{proj}.weight_packed [N, K/2], {experts}.{e}.{proj}.weight_scale [N, K/32]

The tensors of a file decide; its config is not asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from . import per_expert, stacked
from .base import CheckpointError, Dialect, TensorInfo

__all__ = ["DIALECTS", "CheckpointError", "Dialect", "TensorInfo", "detect", "dialect", "float_dtypes", "read_headers"]


DIALECTS = (stacked.GPT_OSS, stacked.HF_MXFP4, per_expert.COMPRESSED_TENSORS)

_BYTE_DTYPES = ("U8", "I8", "F8_E8M0", "F4")
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_EXPERT = re.compile(r"(?:^|\.)experts?\.(\d+\.|.*proj)")


def dialect(name: str) -> Dialect:
    """The dialect of that name; ValueError that lists them for any other."""
    for row in DIALECTS:
        if row.name == name:
            return row
    raise ValueError(f"unknown MXFP4 layout {name!r}; known are {', '.join(row.name for row in DIALECTS)}")


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
    for name, info in tensors.items():
        row = _row_of(name, info)
        if row is None:
            continue
        found.setdefault(row, name)
        _check_pair(name, info, row, tensors)
    if len(found) > 1:
        examples = ", ".join(f"{name} ({row.name})" for row, name in found.items())
        raise CheckpointError(f"this checkpoint holds experts in more than one layout: {examples}")
    _check_orphans(tensors)
    return next(iter(found), None)


def float_dtypes(tensors: Mapping[str, TensorInfo]) -> set[str]:
    """The floating point dtypes of matrices and stacks, by safetensors' names."""
    return {info.dtype for info in tensors.values() if info.dtype in _FLOAT_DTYPES and len(info.shape) >= 2}


def read_headers(files: Iterable[str | Path]) -> dict[str, TensorInfo]:
    """Reads the headers of safetensors files, no weights.

    Args:
        files: paths; others than `*.safetensors` are passed over.

    Returns:
        Every tensor by name.

    Raises:
        CheckpointError: a file that is cut short or no safetensors file, or a tensor that is in two files, named.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in map(Path, files):
        if file.suffix != ".safetensors":
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
    if info.dtype not in _BYTE_DTYPES or not _EXPERT.search(name):
        return None
    for row in DIALECTS:
        if name.endswith(row.blocks) and len(info.shape) == row.block_dims:
            return row
    return None


def _check_pair(name: str, info: TensorInfo, row: Dialect, tensors: Mapping[str, TensorInfo]) -> None:
    scales_name = name.removesuffix(row.blocks) + row.scales
    scales = tensors.get(scales_name)
    if scales is None:
        raise CheckpointError(f"{scales_name} is missing from the checkpoint, which holds {name}")
    grouped = row.block_dims == len(scales.shape) + 1
    fits = (*scales.shape, 16) if grouped else (*scales.shape[:-1], 16 * scales.shape[-1])
    if info.dtype == "F4" and not grouped:  # recorded by its logical width, two codes a byte
        fits = (*fits[:-1], 2 * fits[-1])
    if scales.dtype not in _BYTE_DTYPES:
        raise CheckpointError(f"{scales_name} has dtype {scales.dtype}; scale bytes are U8 or F8_E8M0")
    if info.shape != fits:
        raise CheckpointError(
            f"{name} {list(info.shape)} does not fit {scales_name} {list(scales.shape)}; expected {list(fits)}"
        )


def _check_orphans(tensors: Mapping[str, TensorInfo]) -> None:
    """A tensor of scales for stacked experts whose codes are missing."""
    for name, info in tensors.items():
        if name.endswith("_scales") and info.dtype in _BYTE_DTYPES and _EXPERT.search(name):
            codes = name.removesuffix("_scales") + "_blocks"
            if codes not in tensors:
                raise CheckpointError(f"{codes} is missing from the checkpoint, which holds {name}")
