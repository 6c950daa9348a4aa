"""Layers of experts, batches for them, and what they compute.

E experts, N output features, K input features, H hidden size, I intermediate size, T tokens, k experts a token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hf_mxfp4.configs import ExpertsShape
from torch import Tensor

from hf_mxfp4.activations import Activation
from hf_mxfp4.backends import triton
from hf_mxfp4.backends.reference import Projection
from hf_mxfp4.backends.triton import Config

from .device import Device

ACTIVATIONS = {
    "clamped-swiglu": Activation(interleaved=True, alpha=1.702, gate_max=7.0, up_max=7.0, up_add=1.0),
    "silu": Activation(),
    "silu, interleaved": Activation(interleaved=True),
    "soft caps": Activation(gate_cap=4.0, up_cap=25.0),
    "cut": Activation(act_max=1.5, gate_max=2.0),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh", interleaved=True),
    "relu": Activation("relu"),
    "relu2 without a gate": Activation("relu2", gated=False),
}


class Batch(NamedTuple):
    """Tokens [T, H], ids int64 [T, k], weights float32 [T, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


class Layer(NamedTuple):
    """The experts of a layer; `run` and `exact` compute them."""

    first: Projection
    second: Projection
    activation: Activation

    def run(self, device: Device, batch: Batch, config: Config | None = None, narrow: bool = True) -> Tensor:
        """Through the kernels, launched as the table says or as told."""
        if config is None:
            return triton.experts_mlp(*batch, *self, narrow)
        launches, out = triton.experts_launches(*batch, *self, config, narrow=narrow, multiply=device.multiply)
        for launch in launches:
            launch.run()
        return out

    def exact(self, batch: Batch) -> Tensor:
        """In float64, by plain torch, from the bytes."""
        x, weights = batch.x.double(), batch.weights.double()
        out = torch.zeros_like(x)
        for e in batch.ids.unique().tolist():
            if 0 <= e < self.first.blocks.shape[0]:
                token, choice = (batch.ids == e).nonzero(as_tuple=True)
                rows = x[token]
                for projection in self[:2]:
                    rows = rows @ decode(projection.blocks[e], projection.scales[e]).mT
                    rows = rows if projection.bias is None else rows + projection.bias[e].double()
                    rows = self.activation(rows) if projection is self.first else rows
                out.index_add_(0, token, weights[token, choice][:, None] * rows)
        return out


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 [..., K / 2] and [..., K / 32] to float64 [..., K] on their device; shares no code with the package."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values = torch.tensor(magnitudes + [-m for m in magnitudes], dtype=torch.float64, device=blocks.device)
    powers = torch.tensor([math.ldexp(1, byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return values[codes.int()] * powers.to(blocks.device)[scales.int()].repeat_interleave(32, dim=-1)


def random_layer(
    device: Device, experts: int, hidden: int, middle: int, activation: Activation, bias: torch.dtype | None, seed: int
) -> Layer:
    """Random codes, scales of 2^-9 to 2^-5, and biases if they have a dtype."""
    generator = torch.Generator(device.device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device.device}
    made = []
    for rows, width in ((2 * middle if activation.gated else middle, hidden), (hidden, middle)):
        blocks = torch.randint(256, (experts, rows, width // 2), dtype=torch.uint8, **options)
        scales = torch.randint(118, 123, (experts, rows, width // 32), dtype=torch.uint8, **options)
        own = None if bias is None else torch.randn(experts, rows, **options).to(bias)
        made.append(Projection(blocks, scales, own))
    return Layer(*made, activation)


def shape_layer(device: Device, given: ExpertsShape, seed: int) -> Layer:
    """A layer of a known model's shape."""
    bias = torch.bfloat16 if given.bias else None
    sizes = (given.num_experts, given.hidden_size, given.intermediate_size)
    return random_layer(device, *sizes, ACTIVATIONS[given.activation], bias, seed)


def random_batch(
    device: Device, tokens: int, hidden: int, experts: int, top_k: int, dtype: torch.dtype, seed: int
) -> Batch:
    """Normal tokens, each with k different experts, and weights that add up to 1."""
    generator = torch.Generator(device.device).manual_seed(seed)
    options: dict[str, Any] = {"generator": generator, "device": device.device}
    x = torch.randn(tokens, hidden, **options).to(dtype)
    ids = torch.rand(tokens, experts, **options).topk(top_k, dim=-1).indices
    return Batch(x, ids, torch.rand(tokens, top_k, **options).softmax(dim=-1))


def shape_batch(device: Device, given: ExpertsShape, tokens: int, seed: int = 0) -> Batch:
    """A bfloat16 batch for a known model's shape."""
    sizes = (given.hidden_size, given.num_experts, given.experts_per_token)
    return random_batch(device, tokens, *sizes, torch.bfloat16, seed)


def needed_bytes(layer: Layer, batch: Batch) -> int:
    """Packed bytes of the experts that a batch selects, each once."""
    packed = sum(part.nbytes for projection in layer[:2] for part in projection[:2])
    return packed // layer.first.blocks.shape[0] * int(batch.ids.unique().numel())
