"""PackedModule: what every module that holds packed weights has in common.

Packed tensors are uint8 parameters, because buffers are neither offloaded to disk nor sharded. They need no gradient,
and casts leave them alone. A weight called `proj` is held as `{proj}_blocks` uint8 [..., N, K / 2] and `{proj}_scales`
uint8 [..., N, K / 32].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Self

from . import mxfp4, ops
from .backends import Choice, choose, choose_name

ACTIVATIONS = ("auto", "int8")
"""How activations can be asked to be multiplied: with what they have, or rounded to 8 bits."""


def dtype_names(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """What torch calls the tensors' dtypes, such as "bfloat16"."""
    return tuple(str(tensor.dtype).removeprefix("torch.") for tensor in tensors)


def shard_of(parameter: Any) -> tuple[tuple[int, ...], dict[int, int]]:
    """What a process holds of a parameter: the shape of its part, and the number of parts of each split dimension."""
    if not hasattr(parameter, "device_mesh"):  # of a `DTensor`, whose import is a heavy one
        return tuple(parameter.shape), {}
    ways: dict[int, int] = {}
    for axis, placement in enumerate(parameter.placements):
        parts, dim = parameter.device_mesh.size(axis), getattr(placement, "dim", None)
        if dim is not None and parts > 1:
            dim %= parameter.ndim
            ways[dim] = ways.get(dim, 1) * parts
    return tuple(parameter.to_local().shape), ways


class Source(NamedTuple):
    """Where packed weights came from.

    Attributes:
        format: the layout on disk.
        dtypes: of the tensors there.
        conversion: what made them what is held.
        loss: the error that this added to what was of few bits already: norm of the difference over norm of the
            weights; None where bytes were kept, or weights were dense.
    """

    format: str
    dtypes: tuple[str, ...]
    conversion: str
    loss: float | None = None


class PackedModule(nn.Module):
    """A module that holds packed weights in the place of a dense one."""

    dense_class: Any
    """The class of the module whose place this one took."""

    dense_dtype: torch.dtype
    """What the weights would be if they were dense."""

    source: Source | None
    """Where the weights came from, once they are there."""

    projection_names: tuple[str, ...]
    """The names of the packed weights."""

    def _pack_init(self, dense_class: type, dtype: torch.dtype, backend: str, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
        self.dense_class = dense_class
        self.dense_dtype = dtype
        self.requested_backend = backend
        self.requested_activation = activation
        self.source = None
        self._choices: dict[str, Choice] = {}
        self._narrow: dict[str, tuple[tuple[int, int], bool]] = {}

    def _make_room(self, proj: str, shape: tuple[int, ...], name: str, device: torch.device) -> None:
        """Registers the packed parameters of a weight [..., N, K]; ValueError, naming it, if K cannot be packed."""
        mxfp4.check_width(shape, name)
        for suffix, width in (("blocks", shape[-1] // 2), ("scales", shape[-1] // mxfp4.BLOCK_SIZE)):
            packed = torch.empty(*shape[:-1], width, dtype=torch.uint8, device=device)
            self.register_parameter(f"{proj}_{suffix}", nn.Parameter(packed, requires_grad=False))

    def packed(self, proj: str) -> mxfp4.MXFP4Tensor:
        """The packed bytes of a weight: `blocks` uint8 [..., N, K / 2], `scales` uint8 [..., N, K / 32]."""
        return mxfp4.MXFP4Tensor(self.get_parameter(f"{proj}_blocks").data, self.get_parameter(f"{proj}_scales").data)

    def packed_here(self, proj: str) -> mxfp4.MXFP4Tensor:
        """As `packed`; ValueError for bytes that are offloaded, or split over processes."""
        tensor = self.packed(proj)
        if shard_of(tensor.blocks)[1]:
            raise ValueError(f"{proj} is split over processes and cannot be dequantized; load the model in one process")
        if tensor.blocks.is_meta:
            raise ValueError(f"{proj} is offloaded and cannot be dequantized; load the model without offloading")
        return tensor

    def dense_shape(self, proj: str) -> tuple[int, ...]:
        """The shape of a weight in the class that this module stands for."""
        *lead, half = self.get_parameter(f"{proj}_blocks").shape
        return (*lead, 2 * half)

    def dequantize(self, dtype: torch.dtype | None = None) -> nn.Module:
        """A module of the class that this one stands for, with the weights that it holds decoded."""
        raise NotImplementedError

    def backend_choice(self, device_type: str) -> Choice:
        """The backend that runs on a device, and why: chosen at the first call, then kept."""
        if device_type not in self._choices:
            self._choices[device_type] = choose(self.requested_backend, device_type)
        return self._choices[device_type]

    def backend(self, device_type: str) -> str:
        """The name of the backend that runs on a device."""
        if torch.compiler.is_compiling():
            name: str = choose_name(self.requested_backend, device_type)
            return name
        return self.backend_choice(device_type).name

    def operand(self, dtype: torch.dtype) -> str:
        """What activations may be rounded to where tokens have a dtype, see `ops.OPERANDS`."""
        return "int8" if self.requested_activation == "int8" else ops.operand_of(dtype)

    def is_narrow(self) -> bool:
        """Whether every scale byte is known to be 1 to 128, which faster kernels can count on.

        Looked at once for each tensor that is loaded or changed, by one question to its device; not while a graph is
        captured or traced, where what is not known yet is taken to be false.
        """
        return all(self._is_narrow(f"{proj}_scales") for proj in self.projection_names)

    def _is_narrow(self, name: str) -> bool:
        scales: Any = self.get_parameter(name)
        scales = scales.to_local() if hasattr(scales, "device_mesh") else scales
        seen, narrow = self._narrow.get(name, (None, False))
        if torch.compiler.is_compiling() or not ops.nobody_listens() or scales.is_meta:
            return narrow
        now = scales._version, scales.numel()  # the latter changes where FSDP gathers parameters for a forward
        if seen != now and not (scales.is_cuda and torch.cuda.is_current_stream_capturing()):
            narrow = not scales.numel() or bool(((scales - 1) < _NARROW).all())  # 0 - 1 is 255
            self._narrow[name] = (now, narrow)
        return narrow

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As for any module."""
        super().register_parameter(name, param)
        if "_narrow" in self.__dict__:
            self._narrow.pop(name, None)

    def _stand_in(self, proj: str) -> nn.Parameter:
        """A parameter on meta with the dense shape and dtype, for model code that looks at the weight it once had."""
        if proj not in self.projection_names:
            raise AttributeError(f"{type(self).__name__} for {self.dense_class.__name__} has no {proj}")
        stand_in = nn.Parameter(torch.empty(self.dense_shape(proj), dtype=self.dense_dtype, device="meta"))
        stand_in._is_hf_initialized = True  # type: ignore[attr-defined]  # the flag that Transformers looks at
        return stand_in

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """As for any module, but bytes of another dtype are viewed, never cast, and other tensors refused."""
        for proj in self.projection_names:
            for suffix in ("_blocks", "_scales"):
                given = state_dict.get(prefix + proj + suffix)
                if isinstance(given, Tensor) and given.dtype is not torch.uint8:
                    state_dict[prefix + proj + suffix] = mxfp4.as_bytes(given, prefix + proj + suffix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._narrow.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As for any module; a cast leaves packed bytes alone, and is kept in mind for `dequantize`."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.dense_dtype = fn(torch.empty(0, dtype=self.dense_dtype)).dtype
        return self


_NARROW = 128  # the largest byte of narrow scales
PACKED_ATTRIBUTES = (
    "dense_class",
    "dense_dtype",
    "requested_backend",
    "requested_activation",
    "source",
    "_choices",
    "_narrow",
)
"""Attributes that a packed module has and the dense one has not."""
