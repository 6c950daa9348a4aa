"""One MoE layer, and the sides that compute it from the same packed bytes: hf_mxfp4, Transformers in bfloat16, ggml.

E experts, T tokens, k experts a token, H hidden size, I intermediate size. Weights are random MXFP4 bytes. The modules
of Transformers hold the same weights decoded to bfloat16, which is exact, so that all sides compute one function.
`exact` computes it in float64 from the bytes, in NumPy, sharing no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from .. import mxfp4, pages
from ..experts import MXFP4Experts

CLAMPED_SWIGLU = "clamped-swiglu"
ALPHA, LIMIT = 1.702, 7.0
"""Of the clamped SwiGLU of gpt-oss."""

Matrix = np.ndarray[Any, np.dtype[np.float64]]

_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_CPU = torch.device("cpu")
_SAMPLES = 8
_REFERENCE_LIMIT = 1e-5


class Shape(Protocol):
    """The sizes of a layer, as `hf_mxfp4.configs.ExpertsShape` has them and describes them."""

    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    bias: bool
    activation: str


class Batch(NamedTuple):
    """What one call of a layer gets: tokens bfloat16 [T, H], ids int64 [T, k], weights bfloat16 [T, k]."""

    tokens: Tensor
    ids: Tensor
    weights: Tensor


class Side(Protocol):
    """Something that computes the layer. `load` and `output` are not timed, `run` is.

    Attributes:
        name: in the tables.
        limit: the relative error up to which its results are right.
        most_tokens: T above which it is not run, or None.
    """

    name: str
    limit: float
    most_tokens: int | None

    def load(self, batch: Batch) -> None:
        """Takes in what the next run works on."""

    def run(self) -> None:
        """Computes the layer."""

    def output(self) -> Tensor:
        """What the last run gave, [T, H]."""

    def close(self) -> None:
        """Gives back memory; nothing is run afterwards."""


@dataclass
class ModuleSide:
    """A torch module, called as a model calls it."""

    name: str
    module: nn.Module
    limit: float
    most_tokens: int | None = None
    _batch: Batch | None = None
    _output: Tensor | None = None

    def load(self, batch: Batch) -> None:
        """As in `Side`."""
        self._batch, self._output = batch, None

    def run(self) -> None:
        """As in `Side`."""
        self._output = self.module(*self._batch or ())

    def output(self) -> Tensor:
        """As in `Side`."""
        assert self._output is not None
        return self._output

    def close(self) -> None:
        """As in `Side`."""
        del self.module


@dataclass(frozen=True)
class Layer:
    """The packed bytes and biases of a layer.

    Attributes:
        shape: its sizes.
        packed: by projection, `blocks` uint8 [E, N, K / 2] and `scales` uint8 [E, N, K / 32]. The rows of
            gate_up_proj are interleaved for the clamped SwiGLU, else gates come first.
        bias: bfloat16 [E, N] by projection; empty if the shape has none.
    """

    shape: Shape
    packed: dict[str, mxfp4.MXFP4Tensor]
    bias: dict[str, Tensor]

    @property
    def bytes_per_expert(self) -> int:
        """Packed bytes and biases of one expert."""
        tensors = [tensor for pair in self.packed.values() for tensor in pair] + list(self.bias.values())
        return sum(tensor.nbytes for tensor in tensors) // self.shape.num_experts

    def bytes_touched(self, batch: Batch) -> int:
        """Bytes of the experts that a batch selects, each once."""
        return int(batch.ids.unique().numel()) * self.bytes_per_expert

    def operations(self, tokens: int) -> int:
        """Floating-point operations of both projections; a multiply and an add are two."""
        weights = sum(2 * pair.blocks[0].numel() for pair in self.packed.values())
        return 2 * tokens * self.shape.experts_per_token * weights


def random_layer(shape: Shape, generator: torch.Generator) -> Layer:
    """A layer of random codes and scales of 2^-9 to 2^-5, on huge pages.

    Raises:
        ValueError: a shape that no experts class here has.
    """
    _stock_class(shape)
    packed, bias = {}, {}
    outputs = {"gate_up_proj": 2 * shape.intermediate_size, "down_proj": shape.hidden_size}
    inputs = {"gate_up_proj": shape.hidden_size, "down_proj": shape.intermediate_size}
    for proj, rows in outputs.items():
        mxfp4.check_width((rows, inputs[proj]), proj)
        blocks = pages.empty((shape.num_experts, rows, inputs[proj] // 2), _CPU)
        scales = pages.empty((shape.num_experts, rows, inputs[proj] // mxfp4.BLOCK_SIZE), _CPU)
        blocks.random_(0, 256, generator=generator)
        scales.random_(118, 123, generator=generator)
        packed[proj] = mxfp4.MXFP4Tensor(blocks, scales)
        if shape.bias:
            bias[proj] = torch.randn(shape.num_experts, rows, generator=generator).mul_(0.5).bfloat16()
    return Layer(shape, packed, bias)


def random_batch(shape: Shape, tokens: int, generator: torch.Generator) -> Batch:
    """Normal tokens with uniform routing, all ids of a token different, and weights that add up to 1."""
    x = torch.randn(tokens, shape.hidden_size, generator=generator).bfloat16()
    ids = torch.rand(tokens, shape.num_experts, generator=generator).topk(shape.experts_per_token, dim=-1).indices
    weights = torch.rand(tokens, shape.experts_per_token, generator=generator).softmax(dim=-1).bfloat16()
    return Batch(x, ids, weights)


def packed_side(layer: Layer, name: str, backend: str) -> ModuleSide:
    """The layer as `MXFP4Experts`; the backend in use is part of the name's meaning, not of this side's work."""
    with torch.device("meta"):
        stock = _stock_class(layer.shape)(_stock_config(layer.shape, "eager"))
    module = MXFP4Experts(stock.bfloat16(), name="experts", backend=backend)
    for proj, pair in layer.packed.items():
        for suffix, tensor in zip(("blocks", "scales"), pair, strict=True):
            module.register_parameter(f"{proj}_{suffix}", nn.Parameter(tensor, requires_grad=False))
    _set_biases(module, layer)
    return ModuleSide(name, module, limit=2.6e-3)


def stock_sides(layer: Layer, implementations: dict[str, int | None]) -> list[ModuleSide]:
    """Transformers' own module in bfloat16, once for each experts implementation; the weights are there once.

    Args:
        layer: whose bytes are decoded.
        implementations: for each name, T above which it is not run.

    Returns:
        The sides, in the same order.
    """
    shape = layer.shape
    weights = {}
    for proj, (blocks, scales) in layer.packed.items():
        experts, rows, half = blocks.shape
        is_transposed = shape.activation == CLAMPED_SWIGLU
        size = (experts, 2 * half, rows) if is_transposed else (experts, rows, 2 * half)
        weights[proj] = pages.empty(size, _CPU, torch.bfloat16)
        for e in range(experts):
            decoded = mxfp4.dequantize(blocks[e], scales[e], torch.bfloat16)
            weights[proj][e] = decoded.T if is_transposed else decoded
    sides = []
    for name, most_tokens in implementations.items():
        with torch.device("meta"):
            module = _stock_class(shape)(_stock_config(shape, name))
        for proj, weight in weights.items():
            module.register_parameter(proj, nn.Parameter(weight, requires_grad=False))
        _set_biases(module, layer)
        sides.append(ModuleSide(name, module, limit=2e-2, most_tokens=most_tokens))
    return sides


def _set_biases(module: nn.Module, layer: Layer) -> None:
    for proj, bias in layer.bias.items():
        module.register_parameter(f"{proj}_bias", nn.Parameter(bias, requires_grad=False))


def _stock_class(shape: Shape) -> Any:
    classes = {(CLAMPED_SWIGLU, True, True): GptOssExperts, ("silu", True, False): Qwen3MoeExperts}
    kind = (shape.activation, shape.gated, shape.bias)
    if kind not in classes:
        raise ValueError(
            f"no experts class to compare with for {shape.activation} experts; shapes like gpt-oss-20b fit"
        )
    return classes[kind]


def _stock_config(shape: Shape, implementation: str) -> Any:
    sizes = {"hidden_size": shape.hidden_size, "num_experts_per_tok": shape.experts_per_token}
    config: Any
    if shape.activation == CLAMPED_SWIGLU:
        config = GptOssConfig(num_local_experts=shape.num_experts, intermediate_size=shape.intermediate_size, **sizes)
    else:
        config = Qwen3MoeConfig(num_experts=shape.num_experts, moe_intermediate_size=shape.intermediate_size, **sizes)
    config._experts_implementation = implementation
    return config


class Check:
    """What the sides' results are compared with.

    Up to 8 tokens, the same in batches of all sizes, are computed in float64; they share a few experts, because
    decoding an expert to float64 takes a while. All other tokens are compared with the reference backend in float32,
    which has to be right on those 8 first.
    """

    def __init__(self, layer: Layer, reference: Side, generator: torch.Generator) -> None:
        self._layer, self._reference, self._generator = layer, reference, generator
        shape = layer.shape
        samples = random_batch(shape, _SAMPLES, generator)
        few = torch.randperm(shape.num_experts, generator=generator)[: shape.experts_per_token + 2]
        order = torch.rand(_SAMPLES, few.numel(), generator=generator).argsort(dim=-1)
        self._samples = samples._replace(ids=few[order[:, : shape.experts_per_token]])
        self._exact = exact(layer, self._samples)
        self._last: tuple[Batch, Tensor, Tensor] | None = None

    def error(self, side: Side, tokens: int) -> float:
        """The relative error of a side's results for T tokens, against float64, after it was found small enough.

        Raises:
            RuntimeError: results that are wrong.
        """
        batch, rows, expected = self._expected(tokens)
        got = self._run(side, batch)
        if got.shape != expected.shape:
            raise RuntimeError(f"{side.name} gives {list(got.shape)} for {tokens} tokens; nothing of it was timed")
        error = relative_error(got[rows], self._exact[: len(rows)])
        for what, off in (("float64", error), ("the reference backend", relative_error(got, expected))):
            if not off <= side.limit:  # NaN too
                raise RuntimeError(
                    f"{side.name} is wrong at {tokens} tokens: off by {off:.1e} from {what}, {side.limit:.1e} is "
                    "allowed; nothing of it was timed"
                )
        return error

    def _expected(self, tokens: int) -> tuple[Batch, Tensor, Tensor]:
        """A batch of T tokens, which of them are samples, and the reference backend's results, found to be right."""
        if self._last is None or self._last[0].tokens.shape[0] != tokens:
            batch = random_batch(self._layer.shape, tokens, self._generator)
            rows = torch.linspace(0, tokens - 1, min(tokens, _SAMPLES)).long()
            for own, sample in zip(batch, self._samples, strict=True):
                own[rows] = sample[: len(rows)]
            expected = self._run(self._reference, batch._replace(tokens=batch.tokens.float()))  # not rounded
            off = relative_error(expected[rows], self._exact[: len(rows)])
            if not off <= _REFERENCE_LIMIT:
                raise RuntimeError(f"the reference backend is off by {off:.1e} from float64; nothing was timed")
            self._last = batch, rows, expected
        return self._last

    @staticmethod
    def _run(side: Side, batch: Batch) -> Tensor:
        side.load(batch)
        side.run()
        return side.output().double()


def exact(layer: Layer, batch: Batch) -> Tensor:
    """The layer in float64, [T, H], by NumPy from the packed bytes."""
    x, mixture = batch.tokens.double().numpy(), batch.weights.double().numpy()
    out = np.zeros_like(x)
    for e in batch.ids.unique().tolist():
        tokens, choice = np.nonzero(batch.ids.numpy() == e)
        first = x[tokens] @ _decode(layer, "gate_up_proj", e).T + _bias(layer, "gate_up_proj", e)
        hidden = _clamped_swiglu(first) if layer.shape.activation == CLAMPED_SWIGLU else _swiglu(first)
        second = hidden @ _decode(layer, "down_proj", e).T + _bias(layer, "down_proj", e)
        out[tokens] += mixture[tokens, choice][:, None] * second
    return torch.from_numpy(out)


def _clamped_swiglu(x: Matrix) -> Matrix:
    gate, up = np.minimum(x[:, ::2], LIMIT), np.clip(x[:, 1::2], -LIMIT, LIMIT)
    hidden: Matrix = gate / (1 + np.exp(-ALPHA * gate)) * (up + 1)
    return hidden


def _swiglu(x: Matrix) -> Matrix:
    gate, up = np.split(x, 2, axis=-1)
    hidden: Matrix = gate / (1 + np.exp(-gate)) * up
    return hidden


def _bias(layer: Layer, proj: str, e: int) -> Any:
    return layer.bias[proj][e].double().numpy() if layer.bias else 0


def _decode(layer: Layer, proj: str, e: int) -> Matrix:
    """One expert's weight in float64 [N, K]. Bit 3 of a code is the sign; the low half of a byte is the even column."""
    blocks, scales = (tensor[e].numpy() for tensor in layer.packed[proj])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(blocks.shape[0], -1)
    values = np.where(codes & 8, -1.0, 1.0) * _MAGNITUDES[codes & 7]
    weight: Matrix = np.ldexp(values, np.repeat(scales.astype(np.int32) - 127, 32, axis=-1))
    return weight


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
