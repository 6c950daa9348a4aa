"""llama.cpp as a peer: one MoE layer as a graph of its library ggml, through ctypes.

The library comes with the package llama-cpp-python, which pip builds for the machine. The graph is that of llama.cpp's
`build_moe_ffn`: `mul_mat_id` for gate, up and down, biases by `add_id`, SwiGLU, weights, and k - 1 additions. Tokens
and results are float32, as in llama.cpp; ggml itself rounds them to 8 bits, in blocks of 32, before each product.

A ggml block of MXFP4 is a scale byte and 16 bytes of codes; byte j holds column j in its low half and column j + 16 in
its high half. Dimensions are listed innermost first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import pages
from .sides import ALPHA, CLAMPED_SWIGLU, LIMIT, Batch, Layer

INSTALL = "pip install 'hf_mxfp4[peers]' (builds llama-cpp-python, a few minutes)"

_F32, _I32, _MXFP4 = 0, 26, 39
_OVERHEAD = 1 << 20
_USAGE_WEIGHTS = 1

_POINTER, _SIZE, _INT, _LONG = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", _SIZE), ("mem_buffer", _POINTER), ("no_alloc", ctypes.c_bool))


_LOGGER = ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _POINTER)
_SILENT = _LOGGER(lambda level, text, data: None)

_TENSOR_2 = (_POINTER, (_POINTER, _POINTER, _POINTER))
_TENSOR_3 = (_POINTER, (_POINTER, _POINTER, _POINTER, _POINTER))
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_init": (_POINTER, (_InitParams,)),
    "ggml_log_set": (None, (_LOGGER, _POINTER)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_new_tensor_2d": (_POINTER, (_POINTER, _INT, _LONG, _LONG)),
    "ggml_new_tensor_3d": (_POINTER, (_POINTER, _INT, _LONG, _LONG, _LONG)),
    "ggml_nbytes": (_SIZE, (_POINTER,)),
    "ggml_mul_mat_id": _TENSOR_3,
    "ggml_add_id": _TENSOR_3,
    "ggml_add": _TENSOR_2,
    "ggml_mul": _TENSOR_2,
    "ggml_swiglu_split": _TENSOR_2,
    "ggml_swiglu_oai": (_POINTER, (_POINTER, _POINTER, _POINTER, ctypes.c_float, ctypes.c_float)),
    "ggml_view_2d": (_POINTER, (_POINTER, _POINTER, _LONG, _LONG, _SIZE, _SIZE)),
    "ggml_set_output": (None, (_POINTER,)),
    "ggml_new_graph": (_POINTER, (_POINTER,)),
    "ggml_build_forward_expand": (None, (_POINTER, _POINTER)),
    "ggml_gallocr_new": (_POINTER, (_POINTER,)),
    "ggml_gallocr_free": (None, (_POINTER,)),
    "ggml_gallocr_alloc_graph": (ctypes.c_bool, (_POINTER, _POINTER)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_POINTER, (_POINTER, _POINTER)),
    "ggml_backend_buffer_free": (None, (_POINTER,)),
    "ggml_backend_buffer_get_base": (_POINTER, (_POINTER,)),
    "ggml_backend_buffer_get_size": (_SIZE, (_POINTER,)),
    "ggml_backend_buffer_set_usage": (None, (_POINTER, _INT)),
    "ggml_backend_buft_name": (ctypes.c_char_p, (_POINTER,)),
    "ggml_backend_tensor_set": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_backend_tensor_get": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_backend_get_default_buffer_type": (_POINTER, (_POINTER,)),
    "ggml_backend_get_device": (_POINTER, (_POINTER,)),
    "ggml_backend_reg_get_proc_address": (_POINTER, (_POINTER, ctypes.c_char_p)),
    "ggml_backend_graph_compute": (_INT, (_POINTER, _POINTER)),
    "ggml_backend_free": (None, (_POINTER,)),
    "ggml_backend_cpu_init": (_POINTER, ()),
    "ggml_backend_cpu_reg": (_POINTER, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_POINTER, _INT)),
}


def unavailable() -> str | None:
    """Why there is no ggml here, or None if there is."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None:
        return f"llama.cpp is left out: {INSTALL}"
    try:
        _library()
    except (OSError, AttributeError) as error:
        return f"llama.cpp is left out, because its library cannot be used: {error}"
    return None


def version() -> str | None:
    """That of the package, or None if it is not installed."""
    try:
        return metadata.version("llama-cpp-python")
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def _library() -> dict[str, Callable[..., Any]]:
    """ggml's functions by name. torch is imported first, so that both share torch's OpenMP."""
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "lib"
    names = ("libggml-base", "libggml-cpu", "libggml")
    files = [
        next(iter(sorted(folder.glob(f"{name}.so*")) + sorted(folder.glob(f"{name}.dylib"))), None) for name in names
    ]
    libraries = [ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL) for file in files if file is not None]
    functions = {}
    for name, (result, arguments) in _FUNCTIONS.items():
        library = next((library for library in libraries if hasattr(library, name)), None)
        if library is None:
            raise AttributeError(f"{folder} has no {name}")
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        functions[name.removeprefix("ggml_")] = function
    functions["log_set"](_SILENT, None)
    return functions


class GgmlSide:
    """A layer in ggml, with its weights in the plain CPU buffer or in the one that repacks them."""

    limit = 3e-2
    most_tokens: int | None = None

    def __init__(self, layer: Layer, name: str, *, repack: bool) -> None:
        """Copies the layer's bytes into ggml's order.

        Raises:
            RuntimeError: this build of ggml does not repack on this machine.
        """
        self.name = name
        self._call, self._layer = _library(), layer
        self._backend = self._call["backend_cpu_init"]()
        self._plain = self._call["backend_get_default_buffer_type"](self._backend)
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        self._weights = self._upload(self._repack_type() if repack else self._plain)
        self._tokens = 0
        self._graph: _Graph | None = None

    def _repack_type(self) -> int:
        call = self._call
        address = call["backend_reg_get_proc_address"](call["backend_cpu_reg"](), b"ggml_backend_dev_get_extra_bufts")
        get = ctypes.CFUNCTYPE(ctypes.POINTER(_POINTER), _POINTER)(address)
        types = get(call["backend_get_device"](self._backend))
        for i in range(16):
            kind = types[i]
            if not kind:
                break
            if call["backend_buft_name"](kind) == b"CPU_REPACK":
                return int(kind)
        raise RuntimeError("this build of ggml has no CPU_REPACK buffer")

    def _context(self) -> int:
        context: int = self._call["init"](_InitParams(_OVERHEAD, None, True))
        self._contexts.append(context)
        return context

    def _place(self, context: int, kind: int) -> None:
        """Memory for a context's tensors, on huge pages."""
        buffer = self._call["backend_alloc_ctx_tensors_from_buft"](context, kind)
        if not buffer:
            raise RuntimeError("ggml got no memory")
        self._buffers.append(buffer)
        self._call["backend_buffer_set_usage"](buffer, _USAGE_WEIGHTS)
        base, size = self._call["backend_buffer_get_base"](buffer), self._call["backend_buffer_get_size"](buffer)
        pages.advise(base, size)

    def _upload(self, kind: int) -> dict[str, int]:
        """ggml's tensors by name: the weights in a buffer of their own kind, biases in a plain one."""
        sources: dict[str, tuple[Tensor, ...]] = {}
        for proj, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
            rows = _split_rows(self._layer, len(parts))
            for part, row in zip(parts, rows, strict=True):
                sources[part] = tuple(tensor[:, row] for tensor in self._layer.packed[proj])
                if self._layer.bias:
                    sources[f"{part}_bias"] = (self._layer.bias[proj][:, row],)
        tensors = {}
        for is_weight, where in ((True, kind), (False, self._plain)):
            names = [name for name in sources if name.endswith("_bias") != is_weight]
            if not names:
                continue
            context = self._context()
            for name in names:
                experts, rows_, *rest = sources[name][0].shape
                tensors[name] = (
                    self._call["new_tensor_3d"](context, _MXFP4, 2 * rest[0], rows_, experts)
                    if is_weight
                    else self._call["new_tensor_2d"](context, _F32, rows_, experts)
                )
            self._place(context, where)
            for name in names:
                data = ggml_blocks(*sources[name]) if is_weight else sources[name][0].float().contiguous()
                self._set(tensors[name], data)
        return tensors

    def _set(self, tensor: int, data: Tensor) -> None:
        assert self._call["nbytes"](tensor) == data.nbytes
        self._call["backend_tensor_set"](tensor, data.data_ptr(), 0, data.nbytes)

    def load(self, batch: Batch) -> None:
        """As in `Side`."""
        if self._graph is None or self._graph.tokens != batch.tokens.shape[0]:
            if self._graph is not None:
                self._graph.free()
            self._graph = _Graph(self._call, self._layer, self._weights, self._plain, batch.tokens.shape[0])
        self._call["backend_cpu_set_n_threads"](self._backend, torch.get_num_threads())
        self._set(self._graph.inputs["x"], batch.tokens.float().contiguous())
        self._set(self._graph.inputs["ids"], batch.ids.int().contiguous())
        self._set(self._graph.inputs["mixture"], batch.weights.float().contiguous())

    def run(self) -> None:
        """As in `Side`."""
        assert self._graph is not None
        if self._call["backend_graph_compute"](self._backend, self._graph.graph):
            raise RuntimeError("ggml could not compute the graph")

    def output(self) -> Tensor:
        """As in `Side`."""
        assert self._graph is not None
        out = torch.empty(self._graph.tokens, self._layer.shape.hidden_size)
        self._call["backend_tensor_get"](self._graph.output, out.data_ptr(), 0, out.nbytes)
        return out

    def close(self) -> None:
        """Frees all that ggml holds."""
        if self._graph is not None:
            self._graph.free()
            self._graph = None
        for buffer in self._buffers:
            self._call["backend_buffer_free"](buffer)
        for context in self._contexts:
            self._call["free"](context)
        self._call["backend_free"](self._backend)
        self._buffers, self._contexts = [], []


class _Graph:
    """The graph for one number of tokens."""

    def __init__(
        self, call: dict[str, Callable[..., Any]], layer: Layer, weights: dict[str, int], kind: int, tokens: int
    ) -> None:
        self._call, self.tokens = call, tokens
        shape = layer.shape
        hidden, active = shape.hidden_size, shape.experts_per_token
        self._context = call["init"](_InitParams(_OVERHEAD, None, True))
        new = call["new_tensor_3d"]
        x = new(self._context, _F32, hidden, 1, tokens)
        ids = call["new_tensor_2d"](self._context, _I32, active, tokens)
        mixture = new(self._context, _F32, 1, active, tokens)
        self.inputs = {"x": x, "ids": ids, "mixture": mixture}
        self._buffer = call["backend_alloc_ctx_tensors_from_buft"](self._context, kind)

        def product(name: str, source: int) -> int:
            out: int = call["mul_mat_id"](self._context, weights[name], source, ids)
            bias = weights.get(f"{name}_bias")
            return out if bias is None else call["add_id"](self._context, out, bias, ids)

        up, gate = product("up", x), product("gate", x)
        if shape.activation == CLAMPED_SWIGLU:
            between = call["swiglu_oai"](self._context, gate, up, ALPHA, LIMIT)
        else:
            between = call["swiglu_split"](self._context, gate, up)
        weighted = call["mul"](self._context, product("down", between), mixture)
        parts = [
            call["view_2d"](self._context, weighted, hidden, tokens, 4 * hidden * active, 4 * hidden * j)
            for j in range(active)
        ]
        self.output = functools.reduce(lambda total, part: call["add"](self._context, total, part), parts)
        call["set_output"](self.output)
        self.graph = call["new_graph"](self._context)
        call["build_forward_expand"](self.graph, self.output)
        self._allocator = call["gallocr_new"](kind)
        if not call["gallocr_alloc_graph"](self._allocator, self.graph):
            raise RuntimeError("ggml got no memory for the graph")

    def free(self) -> None:
        """Frees the graph and its memory."""
        self._call["gallocr_free"](self._allocator)
        self._call["backend_buffer_free"](self._buffer)
        self._call["free"](self._context)


def _split_rows(layer: Layer, parts: int) -> list[slice]:
    if parts == 1:
        return [slice(None)]
    if layer.shape.activation == CLAMPED_SWIGLU:
        return [slice(0, None, 2), slice(1, None, 2)]
    return [slice(0, layer.shape.intermediate_size), slice(layer.shape.intermediate_size, None)]


def ggml_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """Packed bytes in ggml's order.

    Args:
        blocks: uint8 [E, N, K / 2], the even column in the low half of a byte.
        scales: uint8 [E, N, K / 32].

    Returns:
        uint8 [E, N, K / 32, 17].
    """
    out = torch.empty(*scales.shape, 17, dtype=torch.uint8)
    for e in range(blocks.shape[0]):
        packed = blocks[e].reshape(*scales[e].shape, 16)
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        out[e, ..., 0] = scales[e]
        out[e, ..., 1:] = codes[..., :16] | (codes[..., 16:] << 4)
    return out
