"""MXFP4 layouts on disk: what a file's tensors are called and shaped, and the way to canonical bytes and back.

One module a layout, each with pure functions between the tensors that a file names and canonical `MXFP4Tensor`s (see
`mxfp4`). Dialects that differ only in names are rows of a module; `DIALECTS` has them all, see `base.Dialect`.

    per_expert   a tensor for each matrix of each expert: compressed-tensors, auto-round, quark, modelopt, mimo,
                 deepseek-v4, ling
    stacked      a tensor for all experts: gpt-oss, gpt-oss-original, hf_mxfp4, vllm
    split        a tensor for all experts' gates, one for their ups: mlx
    gguf         blocks of scale and codes together, in files of their own
    nvfp4, q4_k  formats that are not MXFP4 and can be made so, with a loss
    fp8          layers beside experts

The tensors of a file decide; its config tells dialects of the same tensors apart.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from . import fp8, nvfp4, per_expert, split, stacked
from .base import CheckpointError, Dialect, FormatError, Name, TensorInfo

__all__ = [
    "DIALECTS",
    "CheckpointError",
    "Dialect",
    "FormatError",
    "Found",
    "Name",
    "TensorInfo",
    "claimed",
    "detect",
    "float_dtypes",
    "is_activation_scale",
    "is_expert",
    "named",
    "named_formats",
    "read_headers",
]


DIALECTS: tuple[Dialect, ...] = (
    stacked.GPT_OSS,
    stacked.HF_MXFP4,
    stacked.VLLM,
    stacked.GPT_OSS_ORIGINAL,
    *per_expert.ROWS,
    split.MLX,
    nvfp4.COMPRESSED_TENSORS,
    nvfp4.MODELOPT,
)
"""Every dialect of safetensors files. Of those with the same tensors the first counts if no config says otherwise."""

_CODES = {row.blocks: [other for other in DIALECTS if other.blocks == row.blocks] for row in DIALECTS}
_SIBLINGS = {ending: tuple(dict.fromkeys(e for row in rows for e in row.endings)) for ending, rows in _CODES.items()}
_CODES_ENDINGS = tuple(_CODES)

_READ_AS = {
    "U8": ("U8", "I8", "F8_E8M0", "F4"),
    "I8": ("U8", "I8", "F8_E8M0", "F4"),
    "F8_E8M0": ("U8", "I8", "F8_E8M0"),
    "U32": ("U32", "I32"),
}
"""The dtypes that hold what a dialect writes as another."""

_WEIGHT = re.compile(r"\.(?:q?weight|qzeros|weight_\w+)$")
_INDEX_DTYPES = ("BOOL", "I16", "I32", "I64", "U16", "U32", "U64")
_FLOAT_DTYPES = ("BF16", "F16", "F32", "F64")
_EXPERT = re.compile(r"(?:^|\.)(?:experts?|switch_mlp)\.(\d+\.|.*proj|w\d+_)|\.mlp\.mlp[12]_")
_ACTIVATION_SCALE = re.compile(r"\.(?:input|output|k|v|q)_(?:global_)?(?:scale|zero_point|amax)$|_input_scale$")


class Found(NamedTuple):
    """What a checkpoint's tensors are held in.

    Attributes:
        dialect: of the experts; None for a checkpoint that holds no packed ones.
        experts: the names of their codes.
        layers: the dialect of each layer beside the experts that is packed, by the name of its codes.
        fp8: the name of the scales of each FP8 weight beside the experts, by its own.
        affine: the names of the scales and biases of each layer in MLX's affine format, by that of its codes.
    """

    dialect: Dialect | None
    experts: list[str]
    layers: dict[str, Dialect]
    fp8: dict[str, str]
    affine: dict[str, tuple[str, str]]


def named(name: str) -> Dialect | None:
    """The dialect of that name."""
    return next((row for row in DIALECTS if row.name == name), None)


def claimed(config: Any) -> Dialect | None:
    """The first dialect of MXFP4 that a checkpoint's `quantization_config` names."""
    if not isinstance(config, Mapping):
        return None
    return next((row for row in DIALECTS if not row.is_lossy and row.claims(config)), None)


_FORMAT_KEYS: dict[Any, tuple[str, ...]] = {
    "mxfp4": ("format",),
    "modelopt": ("quant_algo",),
    "auto-round": ("data_type",),
    "fp8": ("expert_dtype", "store_dtype", "routed_experts_quant_method"),
    "mlx": ("mode",),
    None: ("mode",),
}


def named_formats(config: Mapping[str, Any]) -> list[str]:
    """What a checkpoint's `quantization_config` calls the format of experts; its method if that is not known.

    Nothing where the method is known and the rest is left out.
    """
    method = config.get("quant_method")
    if method == per_expert.COMPRESSED_TENSORS.name:
        names = per_expert.formats(config)
    elif method == per_expert.QUARK.name:
        names = [spec.get("dtype") for spec in per_expert.quark_weights(config)]
    elif method in _FORMAT_KEYS:
        names = [config.get(key) for key in _FORMAT_KEYS[method]]
    else:
        names = [method]
    return [str(name) for name in names if name is not None]


def detect(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any] | None = None) -> Found:
    """Finds the dialect in which a checkpoint holds its experts.

    Args:
        tensors: every tensor of the checkpoint by name.
        config: its `quantization_config`, which decides between dialects of the same tensors.

    Returns:
        The dialect of its experts, and what other layers are held in.

    Raises:
        CheckpointError: experts in more than one dialect, a tensor of codes without its scales or the reverse, or a
            pair whose shapes do not fit.
    """
    found: dict[Dialect, str] = {}
    experts: list[str] = []
    layers: dict[str, Dialect] = {}
    owned: set[str] = set()
    known: dict[Any, Dialect | None] = {}
    affine = _affine_layers(tensors)
    for name, info in tensors.items():
        if not name.endswith(_CODES_ENDINGS) or name in affine:
            continue
        if info.dtype in _FLOAT_DTYPES and name.endswith(("weight", "bias")):  # most tensors of a dense checkpoint
            continue
        expert = is_expert(name)
        row = _row_of(name, expert, tensors, config or {}, known)
        if row is None:
            continue
        stem = name.removesuffix(row.blocks)
        owned.update([stem + ending for ending in row.endings])
        if expert:
            found.setdefault(row, name)
            experts.append(name)
        else:
            layers[name] = row
    if len(found) > 1:
        examples = ", ".join(f"{name} ({row.name})" for row, name in found.items())
        raise CheckpointError(f"this checkpoint holds experts in more than one layout: {examples}")
    if len(set(layers.values())) > 1:
        examples = ", ".join(sorted({row.name for row in layers.values()}))
        raise CheckpointError(f"this checkpoint holds layers beside its experts in more than one layout: {examples}")
    owned.update(affine, *affine.values())
    scaled = _fp8_layers(tensors)
    owned.update(scaled, scaled.values())
    rest = {name: info for name, info in tensors.items() if name not in owned}
    _check_the_rest(rest, next(iter(found), None), config or {})
    return Found(next(iter(found), None), experts, layers, scaled, affine)


def is_expert(name: str) -> bool:
    """Whether a tensor's name is one of routed experts."""
    return _EXPERT.search(name) is not None


def is_activation_scale(name: str) -> bool:
    """Whether a tensor is a scale that activations were to be rounded with, which weights do not need."""
    return _ACTIVATION_SCALE.search(name) is not None


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
    alike: dict[TensorInfo, TensorInfo] = {}  # one object for tensors that are alike, of which there may be many
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
                    info = TensorInfo(part.get_dtype(), tuple(part.get_shape()))
                    tensors[name] = alike.setdefault(info, info)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is no whole safetensors file: {error}") from error
    return tensors


def _row_of(
    name: str,
    expert: bool,
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    known: dict[Any, Dialect | None],
) -> Dialect | None:
    """The dialect that a tensor of codes belongs to, by a name that ends like one's; None for any other tensor.

    It follows from the tensor and what may stand beside it, and is looked up in `known` where these are alike: there
    are checkpoints of half a million tensors.
    """
    ending = next(ending for ending in _CODES_ENDINGS if name.endswith(ending))
    stem = name.removesuffix(ending)
    key = (ending, expert, *[tensors.get(stem + other) for other in _SIBLINGS[ending]])
    if key not in known:
        rows = [row for row in _CODES[ending] if _is_layered(row) or expert]
        known[key] = _choose(name, tensors[name], tensors, config, rows)
    return known[key]


def _choose(
    name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any], rows: list[Dialect]
) -> Dialect | None:
    """That of `rows`, which all call their codes so, whose tensors a weight has; None if it is none of theirs."""
    expert = is_expert(name)
    if not rows or (rows[0].blocks == ".weight" and info.dtype == fp8.DTYPE):
        return None
    whole = [row for row in rows if all(sibling in tensors for sibling in row.siblings(name))]
    if not whole:
        claims = [row for row in rows if row.claims(config)]
        if rows[0].blocks != ".weight" or (expert and claims):
            raise _missing((claims or rows)[0], name, tensors)
        return None
    # More tensors are more particular: NVFP4's have a third.
    most = max(len(row.endings) for row in whole)
    fitting = [row for row in whole if len(row.endings) == most]
    fitting = _narrow(fitting, name, info, tensors)
    return next((row for row in fitting if row.claims(config)), fitting[0])


def _narrow(rows: list[Dialect], name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> list[Dialect]:
    """The rows whose dtypes and shapes a weight's tensors have; CheckpointError if there are none."""
    for i, sibling in enumerate(rows[0].siblings(name)):
        found = {row: row.siblings(name)[i] for row in rows}
        fitting = [row for row in rows if tensors[found[row]].dtype in _READ_AS.get(row.dtypes[i], (row.dtypes[i],))]
        if not fitting:
            what = "MXFP4 codes are U8, two a byte" if i == 0 else "scale bytes are U8 or F8_E8M0"
            raise CheckpointError(f"{sibling} has dtype {tensors[found[rows[0]]].dtype}; {what}")
        rows = fitting
    dims = [row for row in rows if len(info.shape) in _dims(row, is_expert(name))]
    if not dims:
        expected = " or ".join(sorted({str(dim) for row in rows for dim in _dims(row, is_expert(name))}))
        raise CheckpointError(f"{name} has shape {list(info.shape)}; expected {expected} dimensions")
    scales_name = dims[0].siblings(name)[1]
    scales = tensors[scales_name]
    fits = [row for row in dims if scales.shape and info.shape == _codes_shape(row, info, scales.shape)]
    if not fits:
        shape = _codes_shape(dims[0], info, scales.shape) if scales.shape else ()
        raise CheckpointError(
            f"{name} {list(info.shape)} does not fit {scales_name} {list(scales.shape)}; expected {list(shape)}"
        )
    return fits


def _is_layered(row: Dialect) -> bool:
    """Whether other layers than experts can be packed in a dialect."""
    return row.layout != "stacked"


def _dims(row: Dialect, expert: bool) -> tuple[int, ...]:
    return (row.dims,) if expert or row.layout == "per expert" else (2,)


def _codes_shape(row: Dialect, info: TensorInfo, scales: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of codes for that of scales; codes that are stored as F4 count weights."""
    *lead, width = row.codes_shape(scales)
    return (*lead, 2 * width) if info.dtype == "F4" else (*lead, width)


def _affine_layers(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[str, str]]:
    """The layers beside experts in MLX's affine format, and the names of their scales and biases."""
    found = {}
    for name, info in tensors.items():
        if name.endswith(".biases") and info.dtype in _FLOAT_DTYPES and not is_expert(name):
            base = name.removesuffix(".biases")
            codes = tensors.get(f"{base}.weight")
            if codes is not None and codes.dtype in _READ_AS["U32"] and f"{base}.scales" in tensors:
                found[f"{base}.weight"] = (f"{base}.scales", name)
    return found


def _fp8_layers(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The FP8 weights beside experts, and the names of their scales."""
    found = {}
    for name, info in tensors.items():
        if info.dtype == fp8.DTYPE and name.endswith(".weight") and not is_expert(name):
            for ending in fp8.SCALE_ENDINGS:
                scales = name.removesuffix(".weight") + ending
                if scales in tensors and tensors[scales].dtype in fp8.SCALE_DTYPES:
                    found[name] = scales
    return found


def _missing(row: Dialect, name: str, tensors: Mapping[str, TensorInfo]) -> CheckpointError:
    lost = next(sibling for sibling in row.siblings(name) if sibling not in tensors)
    return CheckpointError(f"{lost} is missing from the checkpoint, which holds {name}")


def _check_the_rest(tensors: Mapping[str, TensorInfo], dialect: Dialect | None, config: Mapping[str, Any]) -> None:
    """Raises for tensors in another low-bit format, and for scales of experts whose codes are lost."""
    likely = sorted(DIALECTS, key=lambda row: (row is not dialect, not row.claims(config)))
    for name, info in tensors.items():
        if is_activation_scale(name):
            continue
        for row in likely:
            if name.endswith(row.scales) and info.dtype in ("U8", "F8_E8M0") and is_expert(name):
                codes = name.removesuffix(row.scales) + row.blocks
                if codes in tensors:
                    raise CheckpointError(f"{codes} has dtype {tensors[codes].dtype}; MXFP4 codes are U8, two a byte")
                raise CheckpointError(f"{codes} is missing from the checkpoint, which holds {name}")
        if dialect is not None and is_expert(name) and name.endswith(dialect.blocks) and info.dtype in _READ_AS["U8"]:
            raise _missing(dialect, name, tensors)
        is_weight = is_expert(name) or _WEIGHT.search(name) or info.dtype not in _INDEX_DTYPES
        low_bit = info.dtype not in _FLOAT_DTYPES and is_weight
        if low_bit and len(info.shape) >= 2:
            raise FormatError(
                f"{name} is stored as {info.dtype}, a format that this version does not read; weights beside MXFP4"
                f" experts are {', '.join(_FLOAT_DTYPES)}, or FP8 with scales"
            )
