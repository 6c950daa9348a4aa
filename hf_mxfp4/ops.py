"""The ops of hf_mxfp4, declared once through torch.library, and the functional form of a routed expert linear.

    hf_mxfp4::grouped_linear(x, blocks, scales, offsets, transpose, backend) -> out

E experts, N output features, K input features, T tokens, k experts a token, S = T * k rows sorted by expert.
The real and the fake implementation share one check. The derivative of the op is the op itself with `transpose`
turned over, so gradients of any order reach `x`, backward and forward; packed bytes have none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import routing
from .backends import choose, reference
from .mxfp4 import blocks_shape, canonical

_BACKENDS = {"reference": reference.grouped_linear}
_COMPUTE_DTYPES = (torch.float32, torch.float64)

_library = torch.library.Library("hf_mxfp4", "DEF")
_library.define(
    "grouped_linear(Tensor x, Tensor blocks, Tensor scales, Tensor offsets, bool transpose, str backend) -> Tensor"
)


def grouped_linear(
    x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, *, transpose: bool = False, backend: str = "reference"
) -> Tensor:
    """Multiplies the rows of each expert by that expert's packed weights: out[i] = W[expert of i] @ x[i].

    Args:
        x: float32 or float64 [S, K], rows sorted by expert; [S, N] with `transpose`.
        blocks: uint8 [E, N, K / 2].
        scales: uint8 [E, N, K / 32].
        offsets: int64 [E + 1], expert e owns rows offsets[e] to offsets[e + 1]; rows from offsets[E] on are nobody's.
        transpose: multiply by the transposed weights, as the gradient does.
        backend: a usable backend's name, see `backends.choose`.

    Returns:
        [S, N], or [S, K] with `transpose`, in the dtype of `x`; zeros in rows that are nobody's.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes that do not fit, or an unknown backend.
    """

    def run(rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.hf_mxfp4.grouped_linear(rows, blocks, scales, offsets, transpose, backend)
        return out

    if torch.compiler.is_compiling():
        return run(x)
    # torch.library registers no forward-mode derivative; the op is linear in x, so its tangent goes through it as well.
    primal, tangent = forward_ad.unpack_dual(x)
    return run(primal) if tangent is None else forward_ad.make_dual(run(primal), run(tangent))


def mxfp4_expert_linear(
    latent_tokens: Tensor,
    packed_weights: Tensor,
    scale_bytes: Tensor,
    selected_experts: Tensor,
    mixture_weights: Tensor,
    shared_output: Tensor,
) -> Tensor:
    """Adds a routed mixture of packed linear experts: y[t] = shared[t] + sum over j of p[t, j] * W[e[t, j]] @ x[t].

    Only experts that are selected are decoded, one at a time, each once. Products are accumulated in float32 (float64
    for float64 tokens) and cast once at the end. Differentiable in the tokens, the mixture weights and the shared
    output. Packed bytes may lie on another device than the tokens: then only selected experts are moved.

    Args:
        latent_tokens: floating point [T, K].
        packed_weights: uint8 [E, N, K / 2] or [E, N, K / 32, 16].
        scale_bytes: uint8 or float8_e8m0fnu [E, N, K / 32].
        selected_experts: integer [T, k]. Ids outside 0 to E - 1 contribute nothing; an id may repeat in a row.
        mixture_weights: floating point [T, k], used as they are, never renormalised.
        shared_output: floating point [T, N], what the sum starts from.

    Returns:
        [T, N] in the dtype and on the device of `latent_tokens`, in memory of its own.

    Raises:
        TypeError: an argument of a dtype that does not fit.
        ValueError: an argument of a shape that does not fit the others.
    """
    blocks, scales = canonical(packed_weights, scale_bytes)
    _check_routed(latent_tokens, blocks, selected_experts, mixture_weights, shared_output)
    device = latent_tokens.device
    compute = torch.promote_types(latent_tokens.dtype, torch.float32)
    slots = routing.plan(selected_experts.to(device), blocks.shape[0])
    backend = choose("auto", device.type).name
    outputs = grouped_linear(
        routing.gather(latent_tokens, slots).to(compute), blocks, scales, slots.offsets, backend=backend
    )
    mixed = routing.combine(outputs, slots, mixture_weights.to(device, compute))
    return (shared_output.to(device, compute) + mixed).to(latent_tokens.dtype)


def _check_routed(tokens: Tensor, blocks: Tensor, ids: Tensor, weights: Tensor, shared: Tensor) -> None:
    routing.check(tokens, ids, weights, names=("latent_tokens", "selected_experts", "mixture_weights"))
    if not shared.is_floating_point():
        raise TypeError(f"shared_output has dtype {shared.dtype}; expected a floating point dtype")
    if blocks.ndim != 3:
        raise ValueError(f"packed_weights {list(blocks.shape)}: expected [E, N, K/2] or [E, N, K/32, 16]")
    _, features, half = blocks.shape
    if tokens.shape[1] != 2 * half:
        raise ValueError(f"latent_tokens {list(tokens.shape)} do not fit packed weights of width {2 * half}: [T, K]")
    if shared.shape != (tokens.shape[0], features):
        raise ValueError(f"shared_output {list(shared.shape)} is not [T, N] = {[tokens.shape[0], features]}")


def _check(x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool, backend: str) -> None:
    if x.dtype not in _COMPUTE_DTYPES:
        raise TypeError(f"x has dtype {x.dtype}; grouped_linear computes in float32 or float64")
    if offsets.dtype is not torch.int64:
        raise TypeError(f"offsets have dtype {offsets.dtype}; expected torch.int64")
    for name, tensor in (("blocks", blocks), ("scales", scales)):
        if tensor.dtype is not torch.uint8:
            raise TypeError(f"{name} have dtype {tensor.dtype}; expected torch.uint8")
    if blocks.ndim != 3 or scales.ndim != 3 or tuple(blocks.shape) != blocks_shape(scales.shape):
        raise ValueError(
            f"scales {list(scales.shape)} do not fit blocks {list(blocks.shape)}: [E, N, K/32] and [E, N, K/2]"
        )
    width = blocks.shape[1] if transpose else 2 * blocks.shape[2]
    if x.ndim != 2 or x.shape[1] != width:
        raise ValueError(f"x {list(x.shape)} does not fit blocks {list(blocks.shape)}: expected [S, {width}]")
    if offsets.shape != (blocks.shape[0] + 1,):
        raise ValueError(f"offsets {list(offsets.shape)} do not fit {blocks.shape[0]} experts: [E + 1]")
    if backend not in _BACKENDS:
        raise ValueError(f"backend is {backend!r}; usable here: {', '.join(_BACKENDS)}")


def _grouped_linear(
    x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool, backend: str
) -> Tensor:
    _check(x, blocks, scales, offsets, transpose, backend)
    return _BACKENDS[backend](x, blocks, scales, offsets, transpose)


def _grouped_linear_fake(
    x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool, backend: str
) -> Tensor:
    _check(x, blocks, scales, offsets, transpose, backend)
    if any(part.is_meta for part in (blocks, scales, offsets)) and not x.is_meta:
        raise ValueError(f"tokens are on {x.device}, packed weights or routes on meta, where they have no values")
    return x.new_empty(x.shape[0], 2 * blocks.shape[2] if transpose else blocks.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, blocks, scales, offsets, ctx.transpose, ctx.backend = inputs
    ctx.save_for_backward(blocks, scales, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    blocks, scales, offsets = ctx.saved_tensors
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_linear(grad, blocks, scales, offsets, transpose=not ctx.transpose, backend=ctx.backend)
    return grad_x, None, None, None, None, None


_library.impl("grouped_linear", _grouped_linear, "CompositeExplicitAutograd")
torch.library.register_fake("hf_mxfp4::grouped_linear", _grouped_linear_fake, lib=_library)
torch.library.register_autograd("hf_mxfp4::grouped_linear", _backward, setup_context=_setup_context, lib=_library)
