"""GGUF files: one file that holds metadata and tensors, as llama.cpp and what is built on it read them.

Tensor type 39, MXFP4, keeps 32 weights of a row in 17 bytes: the scale byte, then 16 bytes of codes in halves.

    byte 0          scale, E8M0
    byte 1 + j      codes j (low nibble) and 16 + j (high nibble) of the block, j in 0..15

A file has [E, N, K / 32 * 17] bytes of it for all experts of a matrix, `blk.{n}.ffn_{gate, up, down}_exps.weight`.
Canonical tensors hold the same codes and scales in another order, so that nothing is rounded either way.

Source: the GGUF specification and `block_mxfp4` of ggml. The package `gguf` knows the other types and writes files.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mxfp4 import BLOCK_SIZE, MXFP4Tensor, canonical
from . import Found, nvfp4, q4_k
from .base import CheckpointError, Dialect, TensorInfo

BLOCK_BYTES = 17
"""Bytes of a block of 32 weights: a scale byte and 16 bytes of codes."""

TYPE = "MXFP4"
"""What the package `gguf` calls tensor type 39."""

FILE_TYPE = 38
"""The value of `general.file_type` for files whose experts are MXFP4."""

TORCH_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Tensor types that are no blocks."""

# Swaps of neighbouring fields in eight bytes: the fields' distance in bits, and the lower one of each pair. In this
# order the 16 nibbles go from low, high, low, high ... to all low ones, then all high ones; in reverse, back.
_SWAPS = ((4, 0x00F000F000F000F0), (8, 0x0000FF000000FF00), (16, 0x00000000FFFF0000))
_SPLITS = "split.count"
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
_CHUNK_BLOCKS = 1 << 14

# How the header of a file says values: by kind, in the terms of `struct`; kinds 8 and 9 have a size of their own.
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT, _TEXT, _ARRAY = 6, 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4

# What files that are cut short, are something else, or contradict themselves lead to.
_READ_ERRORS = (
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
    ZeroDivisionError,
    OSError,
    struct.error,
)


class GGUFTensor(NamedTuple):
    """A tensor in a file.

    Attributes:
        dtype: its type, as the package `gguf` calls it, such as "MXFP4", "Q4_K" or "F32".
        shape: of the weights, the fastest dimension last.
        data: uint8 numpy array [..., bytes of a row], mapped and not read yet.
    """

    dtype: str
    shape: tuple[int, ...]
    data: Any

    def bytes(self) -> Tensor:
        """The bytes as uint8 [..., bytes of a row], mapped and not read yet."""
        return torch.from_numpy(self.data)


class GGUFHeader(NamedTuple):
    """What a file says of itself.

    Attributes:
        path: the file.
        architecture: such as "gpt-oss".
        metadata: the keys with one value each, by their full names. Arrays, as of tokens, are left out.
        tensors: by name.
    """

    path: Path
    architecture: str
    metadata: dict[str, bool | int | float | str]
    tensors: dict[str, GGUFTensor]


class Entry(NamedTuple):
    """A tensor to be written.

    Attributes:
        name: in the file.
        dtype: "MXFP4" or one of `TORCH_TYPES`.
        shape: of the weights.
        read: gives it when its turn comes: an MXFP4Tensor, or a tensor of any floating point dtype, which is cast; or
            one for each index of the first dimension, each made when the one before is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor | MXFP4Tensor | Iterator[Tensor | MXFP4Tensor]]

    @property
    def nbytes(self) -> int:
        """In the file; ValueError for a width that is not whole blocks."""
        if self.dtype in TORCH_TYPES:
            return prod(self.shape) * TORCH_TYPES[self.dtype].itemsize
        if self.dtype != TYPE or self.shape[-1] % BLOCK_SIZE:
            raise ValueError(f"{self.name}: {list(self.shape)} cannot be written as {self.dtype}")
        return prod(self.shape) // BLOCK_SIZE * BLOCK_BYTES

    def tofile(self, stream: Any) -> None:
        """Writes it, for the package's writer; ValueError if `read` gives another shape."""
        given = self.read()
        if isinstance(given, (Tensor, MXFP4Tensor)):
            _payload(self, given, self.shape).numpy().tofile(stream)
            return
        count = 0
        for part in given:
            _payload(self, part, self.shape[1:]).numpy().tofile(stream)
            count += 1
        if count != self.shape[0]:
            raise ValueError(f"{self.name}: got {count} parts, announced was {self.dtype} {list(self.shape)}")


def decode(blocks: Tensor) -> MXFP4Tensor:
    """Canonical tensors from the bytes of a tensor of type MXFP4.

    Args:
        blocks: uint8 [..., K / 32 * 17].

    Returns:
        `blocks` uint8 [..., K / 2] and `scales` uint8 [..., K / 32], in memory of their own.

    Raises:
        TypeError: a dtype other than uint8.
        ValueError: a width that is no multiple of 17.
    """
    return MXFP4Tensor(decode_blocks(blocks), decode_scales(blocks))


def decode_blocks(blocks: Tensor) -> Tensor:
    """The codes that `decode` gives, uint8 [..., K / 2]."""
    *lead, groups = _groups(blocks)
    found = torch.empty(*lead, 16 * groups, dtype=torch.uint8, device=blocks.device)
    flat, out = blocks.reshape(-1, BLOCK_BYTES), found.view(torch.int32).view(-1, 2, 2)
    for top in range(0, len(flat), _CHUNK_BLOCKS):
        words = _copy(flat[top : top + _CHUNK_BLOCKS, 1:]).view(torch.int64)
        _swap_nibbles(words, _SWAPS)
        # Each word has its low codes in one half and its high ones in the other; a block has all low ones first.
        out[top : top + _CHUNK_BLOCKS] = words.view(torch.int32).view(-1, 2, 2).mT
    return found


def decode_scales(blocks: Tensor) -> Tensor:
    """The scales that `decode` gives, uint8 [..., K / 32]."""
    return blocks.view(*_groups(blocks), BLOCK_BYTES)[..., 0].contiguous()


def encode(tensor: MXFP4Tensor) -> Tensor:
    """The bytes of a tensor of type MXFP4 from canonical tensors.

    Args:
        tensor: `blocks` uint8 [..., K / 2] and `scales` uint8 [..., K / 32].

    Returns:
        uint8 [..., K / 32 * 17].

    Raises:
        TypeError: tensors that do not hold bytes.
        ValueError: shapes that do not fit each other.
    """
    blocks, scales = canonical(tensor.blocks, tensor.scales)
    *lead, groups = scales.shape
    found = torch.empty(*lead, groups, BLOCK_BYTES, dtype=torch.uint8, device=blocks.device)
    found[..., 0] = scales
    flat, out = blocks.reshape(-1, 16), found.view(-1, BLOCK_BYTES)
    for top in range(0, len(flat), _CHUNK_BLOCKS):
        halves = _copy(flat[top : top + _CHUNK_BLOCKS]).view(torch.int32).view(-1, 2, 2)
        words = _copy(halves.mT).view(torch.int64).view(-1, 2)
        _swap_nibbles(words, _SWAPS[::-1])
        out[top : top + _CHUNK_BLOCKS, 1:] = words.view(torch.uint8)
    return found.flatten(-2)


def read_header(path: str | Path) -> GGUFHeader:
    """What a file says of itself; the tensors in it are mapped and not read.

    Of a model in several files, `{name}-00001-of-00003.gguf`, the first names it, and tensors are those of all.

    Raises:
        CheckpointError: a file that is no GGUF, is cut short, or stores the high byte first.
        ImportError: the package `gguf` is missing.
    """
    header = _read(Path(path))
    count = header.metadata.get(_SPLITS, 1)
    ending = f"-00001-of-{count:05}.gguf"
    if count == 1:
        return header
    if not header.path.name.endswith(ending):
        raise CheckpointError(f"{header.path} is one of {count} files; name the first, which ends in {ending}")
    stem = header.path.name.removesuffix(ending)
    for i in range(2, int(count) + 1):
        header.tensors.update(_read(header.path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf"), header).tensors)
    return header


def tensor_infos(header: GGUFHeader) -> dict[str, TensorInfo]:
    """Every tensor of a file by name, its dtype as the package `gguf` calls it and the shape of its weights."""
    return {name: TensorInfo(tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}


def dequantize(name: str, tensor: GGUFTensor) -> Any:
    """The weights of a tensor of any type that the package `gguf` decodes, as a float32 numpy array.

    Raises:
        CheckpointError: a type that it does not decode, naming `name`.
    """
    gguf = package()
    try:
        return gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.dtype])
    except NotImplementedError as error:
        raise CheckpointError(f"{name} is of type {tensor.dtype}, which cannot be decoded") from error


def write(path: str | Path, architecture: str, metadata: Mapping[str, Any], entries: Iterable[Entry]) -> None:
    """Writes a file, one tensor or part of one in memory at a time, under another name until it is complete.

    Args:
        path: the file, which is replaced if it is there. Until then it is called as this and `.part`.
        architecture: such as "gpt-oss".
        metadata: values by their full keys; bool, int, float, str, or a list of one of these.
        entries: the tensors, in the order in which they are written.

    Raises:
        ValueError: an entry that gives another shape than it says, or a width that is not whole blocks.
        ImportError: the package `gguf` is missing.
    """
    path, gguf, entries = Path(path), package(), list(entries)
    part = path.with_name(f"{path.name}.part")
    if part.is_dir() or part.is_symlink():
        raise FileExistsError(f"{part} is in the way; move or remove it")
    writer = gguf.GGUFWriter(None, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for entry in entries:
        writer.add_tensor_info(entry.name, entry.shape, None, entry.nbytes, gguf.GGMLQuantizationType[entry.dtype])
    try:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entry in entries:
            writer.write_tensor_data(entry)
        writer.close()
        part.replace(path)
    except BaseException:
        with suppress(OSError):  # a full disk, of which the caller hears already
            writer.close()
        part.unlink(missing_ok=True)
        raise


def package() -> Any:
    """The package `gguf`, which is optional."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files need the package gguf: pip install gguf") from error
    return gguf


def _read(path: Path, first: GGUFHeader | None = None) -> GGUFHeader:
    """What one file says of itself, or of the model that the first of its files describes.

    The package's own reader takes many seconds for a large vocabulary.
    """
    import numpy as np

    try:
        cursor = _Cursor(np.memmap(path, mode="c"))  # torch warns of memory that is read-only
        if bytes(cursor.data[:4]) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if cursor.value(4) not in _VERSIONS:
            raise ValueError("it is of another version, or stores the high byte first")
        tensor_count, key_count = cursor.value(10), cursor.value(10)
        pairs = ((cursor.text(), cursor.value(cursor.value(4))) for _ in range(key_count))
        metadata = {key: value for key, value in pairs if value is not None}
        described = [_described(cursor) for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-cursor.at // alignment) * alignment
        tensors = {name: _tensor(cursor.data, start + at, shape, kind) for name, at, shape, kind in described}
        architecture = first.architecture if first is not None else str(metadata["general.architecture"])
    except _READ_ERRORS as error:
        raise CheckpointError(f"{path} cannot be read as a GGUF file: {error}") from error
    return GGUFHeader(path, architecture, metadata, tensors)


class _Cursor:
    """A place in a file, which moves past what is read."""

    def __init__(self, data: Any) -> None:
        self.data, self.at = data, 4
        self._view = memoryview(data)

    def value(self, kind: int) -> Any:
        """A value of one of GGUF's kinds; None for an array."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            inner, count = self.value(4), self.value(10)
            if inner in _SCALARS:
                self.at += struct.calcsize(_SCALARS[inner]) * count
            else:
                for _ in range(count):
                    self.value(inner)
            return None
        (value,) = struct.unpack_from(_SCALARS[kind], self._view, self.at)
        self.at += struct.calcsize(_SCALARS[kind])
        return _shortest(value) if kind == _FLOAT else value

    def text(self) -> str:
        """A string."""
        size = self.value(10)
        self.at += size
        if self.at > len(self._view):
            raise ValueError("it is cut short")
        return str(self._view[self.at - size : self.at], encoding="utf-8")


def _described(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """A tensor's name, its place after the start of all, its shape and type."""
    name, dims = cursor.text(), cursor.value(4)
    if dims > _MAX_DIMS:
        raise ValueError(f"{name} has {dims} dimensions")
    shape = tuple(reversed([cursor.value(10) for _ in range(dims)]))
    kind = cursor.value(4)
    return name, cursor.value(10), shape, kind


def _tensor(data: Any, start: int, shape: tuple[int, ...], kind: int) -> GGUFTensor:
    gguf = package()
    dtype = gguf.GGMLQuantizationType(kind)
    weights, size = gguf.GGML_QUANT_SIZES[dtype]
    width = shape[-1] if shape else 1
    rows = prod(shape[:-1])
    if width % weights or start + rows * (width // weights * size) > len(data):
        raise ValueError(f"a tensor of type {dtype.name} and shape {list(shape)} is cut short")
    width = width // weights * size
    return GGUFTensor(dtype.name, shape, data[start : start + rows * width].reshape(*shape[:-1], width))


def _shortest(value: float) -> float:
    """The shortest decimal that means a float of 32 bits, such as 1e-06."""
    short = float(f"{value:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", value) else value


def _groups(blocks: Tensor) -> tuple[int, ...]:
    """The shape of the scales; see `decode` for what is raised."""
    if blocks.dtype != torch.uint8:
        raise TypeError(f"blocks have dtype {blocks.dtype}; a tensor of type MXFP4 is torch.uint8")
    if blocks.ndim == 0 or blocks.shape[-1] % BLOCK_BYTES:
        raise ValueError(f"blocks {list(blocks.shape)} are not whole blocks of {BLOCK_BYTES} bytes")
    return (*blocks.shape[:-1], blocks.shape[-1] // BLOCK_BYTES)


def _copy(tensor: Tensor) -> Tensor:
    """A copy, contiguous and aligned whatever the tensor is a view of."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _swap_nibbles(words: Tensor, swaps: Sequence[tuple[int, int]]) -> None:
    """Runs `swaps` on each int64 word, in place."""
    moved = torch.empty_like(words)
    for distance, lower in swaps:
        torch.bitwise_right_shift(words, distance, out=moved)
        moved.bitwise_xor_(words).bitwise_and_(lower)
        words.bitwise_xor_(moved)
        words.bitwise_xor_(moved.bitwise_left_shift_(distance))


def _add(writer: Any, key: str, value: Any) -> None:
    """A key and its value, in the type that llama.cpp expects for a value of that kind."""
    if isinstance(value, (list, tuple)):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _payload(entry: Entry, given: Tensor | MXFP4Tensor, expected: tuple[int, ...]) -> Tensor:
    """What stands in the file for an entry or a part of it, in one dimension of bytes."""
    if isinstance(given, MXFP4Tensor):
        shape, dtype = (*given.scales.shape[:-1], BLOCK_SIZE * given.scales.shape[-1]), TYPE
    else:
        shape, dtype = tuple(given.shape), entry.dtype
    if shape != expected or dtype != entry.dtype or isinstance(given, MXFP4Tensor) != (dtype == TYPE):
        raise ValueError(f"{entry.name}: got {dtype} {list(shape)}, announced was {entry.dtype} {list(expected)}")
    if isinstance(given, MXFP4Tensor):
        return encode(given).cpu().reshape(-1)
    return given.detach().cpu().to(TORCH_TYPES[dtype]).contiguous().reshape(-1).view(torch.uint8)


def _is_never_named(config: Mapping[str, Any]) -> bool:
    return False


def _no_config(dense: list[str]) -> dict[str, Any]:
    raise ValueError("a GGUF file has no config.json")


def _decode_nvfp4(blocks: Tensor, scale: Tensor) -> Tensor:
    """Weights of one expert, from its blocks [N, bytes] and its scale []."""
    return nvfp4.decode_gguf(blocks) * scale


def _row(name: str, endings: tuple[str, ...], dtypes: tuple[str, ...], decode: Callable[..., Any]) -> Dialect:
    return Dialect(
        name=name,
        layout="split",
        endings=endings,
        dtypes=dtypes,
        decode=decode,
        encode=None,
        claims=_is_never_named,
        config=_no_config,
        dims=3,
        bias="_bias",
        is_lossy=name != "gguf",
    )


MXFP4 = _row("gguf", ("_blocks", "_scales"), ("U8", "U8"), canonical)
Q4_K = _row("gguf q4_k", ("_q4_k",), ("U8",), q4_k.decode)
NVFP4 = _row("gguf nvfp4", ("_nvfp4", "_nvfp4_scale"), ("U8", "F32"), _decode_nvfp4)
ROWS = {"MXFP4": MXFP4, "Q4_K": Q4_K, "NVFP4": NVFP4}
"""How experts of a type are given to Transformers' loader, see `quantizer.gguf`."""


def detect(header: GGUFHeader) -> Found:
    """Finds in which type a file holds its experts.

    Raises:
        CheckpointError: experts in a type that is not read, or in more than one.
    """
    found: dict[str, str] = {}
    for name, tensor in header.tensors.items():
        if _EXPERTS.fullmatch(name):
            found.setdefault("floats" if tensor.dtype in TORCH_TYPES else tensor.dtype, name)
    for kind, name in found.items():
        if kind != "floats" and kind not in ROWS:
            known = ", ".join((*ROWS, *TORCH_TYPES))
            raise CheckpointError(f"{name} is of type {kind}; experts are loaded from {known}")
    if len(found) > 1:
        examples = ", ".join(f"{name} ({kind})" for kind, name in found.items())
        raise CheckpointError(f"{header.path} holds experts in more than one type: {examples}")
    return Found(ROWS.get(next(iter(found), "")), [], {}, {}, {})
