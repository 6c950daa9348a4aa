"""The ops on a CPU by the native kernels: loading the library, choosing the instruction set, and calling it.

The library is optional: a plain C interface, built by setup.py where there is a compiler, opened with ctypes. It has as
many threads as torch is set to use, but its own, which sleep between calls: OpenMP's wait for each other at every
step, and where one of them shares its core with other work, all wait for it. A thread that calls the library keeps up
to 64 MB of working memory for its next call, since fresh memory costs more than the work of a small call.

E experts, N output features, K input features, T tokens, k experts a token, S rows sorted by expert.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import CONSTANTS, KINDS, Activation
from ..mxfp4 import SCALE_RULES, TIES, MXFP4Tensor
from . import reference

ISA_VARIABLE = "HF_MXFP4_CPU_ISA"
"""The environment variable that makes the native kernels use a lesser instruction set than the processor has."""

INSTRUCTION_SETS = ("avx512_bf16", "avx512", "avx2", "neon", "scalar")
"""What the kernels are written for, best first."""

_INTERFACE = 1
_FOLDER = Path(__file__).parent
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_OPERANDS = {"float32": 0, "bfloat16": 1, "int8": 2}
_ROOM = 256 << 20
"""The most bytes that outputs of single experts take while an experts call runs; more tokens are run in turn."""


class _Activation(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "gated", "interleaved")),
        *((name, ctypes.c_float) for name in CONSTANTS),
    )


class _Native(NamedTuple):
    library: ctypes.CDLL
    isa: int
    name: str


@cache
def _library() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    found = sorted(_FOLDER.glob("_native*.so"))
    if not found:
        failure = _FOLDER / "native_failure.txt"
        return failure.read_text(encoding="utf-8").strip() if failure.exists() else "it was not built"
    try:
        library = ctypes.CDLL(str(found[0]))
        version = library.mxfp4_interface()
    except (OSError, AttributeError) as error:
        return f"{found[0].name} cannot be loaded: {error}"
    if version != _INTERFACE:
        return f"{found[0].name} was built for another version of hf_mxfp4; install it again"
    i, p, n = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    library.mxfp4_name.restype = ctypes.c_char_p
    library.mxfp4_grouped_linear.argtypes = (i, i, i, i, p, p, p, p, n, n, n, p)
    library.mxfp4_experts.argtypes = (i, i, i, i, p, p, p, n, n, n, n, n, p, p, p, p, p, p, p, i, n, p)
    library.mxfp4_quantize.argtypes = (i, i, p, i, n, i, i, p, p, p)
    library.mxfp4_probe_read.argtypes = (i, i, p, n)
    library.mxfp4_probe_read.restype = ctypes.c_uint64
    library.mxfp4_probe_multiply.argtypes = (i, i, n)
    library.mxfp4_probe_multiply.restype = n
    return library


@cache
def _native(isa: str) -> _Native | str:
    """The library with the instruction set of that name, or the best if it is empty; or why it cannot be had."""
    library = _library()
    if isinstance(library, str):
        return f"the native kernel is not there: {library}"
    names = [library.mxfp4_name(i).decode() for i in range(library.mxfp4_count())]
    usable = [name for i, name in enumerate(names) if library.mxfp4_usable(i)]
    if isa and isa not in INSTRUCTION_SETS:
        raise ValueError(f"{ISA_VARIABLE} is {isa!r}; expected one of {', '.join(INSTRUCTION_SETS)}")
    if isa and isa not in usable:
        raise ValueError(f"{ISA_VARIABLE} is {isa!r}, which cannot be used here; usable are {', '.join(usable)}")
    name = isa or usable[0]
    return _Native(library, names.index(name), name)


def _ready() -> _Native:
    native = _native(os.environ.get(ISA_VARIABLE, ""))
    if isinstance(native, str):
        raise RuntimeError(native)
    return native


def unavailable() -> str | None:
    """Why the native kernels cannot be used here, or None if they can.

    Raises:
        ValueError: HF_MXFP4_CPU_ISA names no instruction set, or one that this processor cannot run.
    """
    native = _native(os.environ.get(ISA_VARIABLE, ""))
    return native if isinstance(native, str) else None


def instruction_set() -> str:
    """The instruction set that runs."""
    return _ready().name


def _check(status: int) -> None:
    if status:
        raise MemoryError("the native kernel got no memory for what it works with")


def _bytes(*tensors: Tensor) -> Sequence[Tensor]:
    return [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]


def grouped_linear(x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool, operand: str) -> Tensor:
    """As `reference.grouped_linear`, which computes what is in float64."""
    if x.dtype is torch.float64:
        return reference.grouped_linear(x, blocks, scales, offsets, transpose, operand)
    bounds = reference.check_offsets(offsets, x.shape[0])
    native = _ready()
    experts, features, half = blocks.shape
    out = x.new_empty(x.shape[0], 2 * half if transpose else features)
    x, blocks, scales, offsets = _bytes(x, blocks, scales, offsets)
    out[bounds[-1] :] = 0
    if not half or not features:
        return out.zero_()
    status = native.library.mxfp4_grouped_linear(
        native.isa,
        torch.get_num_threads(),
        _OPERANDS[operand],
        transpose,
        x.data_ptr(),
        blocks.data_ptr(),
        scales.data_ptr(),
        offsets.data_ptr(),
        experts,
        features,
        2 * half,
        out.data_ptr(),
    )
    _check(status)
    return out


@cache
def _activation(activation: Activation) -> _Activation:
    return _Activation(KINDS.index(activation.kind), activation.gated, activation.interleaved, *activation.constants)


def experts_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: reference.Projection,
    second: reference.Projection,
    activation: Activation,
    operand: str,
) -> Tensor:
    """Whole expert MLPs of a batch in one call.

    Args:
        x: float32 or bfloat16 [T, H].
        ids: int64 [T, k]; ids outside 0 to E - 1 contribute nothing.
        weights: float32 [T, k].
        first: blocks uint8 [E, 2 I or I, H / 2], scales and bias (float32 or bfloat16 [E, 2 I or I], or None).
        second: the same for [E, H, I].
        activation: between the two.
        operand: what activations may be rounded to.

    Returns:
        [T, H] in the dtype of `x`.
    """
    native = _ready()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return out
    if not ids.numel():
        return out.zero_()
    x, ids, weights, *packed = _bytes(x, ids, weights, *first[:2], *second[:2])
    biases = [None if bias is None else bias.contiguous() for bias in (first[2], second[2])]
    pointers = [None if bias is None else bias.data_ptr() for bias in biases]
    status = native.library.mxfp4_experts(
        native.isa,
        torch.get_num_threads(),
        _OPERANDS[operand],
        _DTYPES[x.dtype],
        x.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        x.shape[0],
        ids.shape[1],
        packed[0].shape[0],
        x.shape[1],
        2 * packed[2].shape[2],
        ctypes.byref(_activation(activation)),
        packed[0].data_ptr(),
        packed[1].data_ptr(),
        pointers[0],
        packed[2].data_ptr(),
        packed[3].data_ptr(),
        pointers[1],
        _DTYPES[next((bias.dtype for bias in biases if bias is not None), torch.float32)],
        _ROOM,
        out.data_ptr(),
    )
    _check(status)
    return out


def quantize_chunk(weights: Tensor, scale_rule: str, ties: str) -> MXFP4Tensor | None:
    """Quantizes contiguous weights on the CPU, byte for byte as torch does in `mxfp4.quantize`.

    Args:
        weights: float32, bfloat16 or float16 [n, 32].
        scale_rule: see `mxfp4.quantize`.
        ties: see `mxfp4.quantize`.

    Returns:
        `blocks` uint8 [n, 16] and `scales` uint8 [n], or None if a weight is not finite.
    """
    native, bad = _ready(), ctypes.c_int64()
    count = weights.shape[0]
    packed = MXFP4Tensor(
        *(torch.empty(shape, dtype=torch.uint8, device=weights.device) for shape in ((count, 16), (count,)))
    )
    native.library.mxfp4_quantize(
        native.isa,
        torch.get_num_threads(),
        weights.data_ptr(),
        _DTYPES[weights.dtype],
        count,
        SCALE_RULES.index(scale_rule),
        TIES.index(ties),
        packed.blocks.data_ptr(),
        packed.scales.data_ptr(),
        ctypes.byref(bad),
    )
    return packed if bad.value < 0 else None


def probe_read(data: Tensor) -> int:
    """Reads a contiguous uint8 tensor once, as fast as the threads can; returns the number of bytes that were read."""
    native, whole = _ready(), data.numel() >> 20 << 20
    native.library.mxfp4_probe_read(native.isa, torch.get_num_threads(), data.data_ptr(), whole)
    return whole


def probe_multiply(rounds: int) -> int:
    """Multiplies and adds in registers only; returns the number of floating-point operations that were done."""
    native = _ready()
    operations: int = native.library.mxfp4_probe_multiply(native.isa, torch.get_num_threads(), rounds)
    return operations
