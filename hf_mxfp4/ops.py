"""The ops of hf_mxfp4, declared once through torch.library, and the functional form of a routed expert linear.

    hf_mxfp4::grouped_linear(x, blocks, scales, offsets, transpose, operand, narrow, backend) -> out
    hf_mxfp4::experts_mlp(x, ids, weights, blocks, scales and bias of both projections, activation, operand, narrow,
                          backend) -> out

E experts, N output features, K input features, T tokens, k experts a token, S = T * k rows sorted by expert.
The real and the fake implementation share one check. `experts_mlp` is for where no gradient is needed, and for backends
that have it in one piece. The derivative of `grouped_linear` is the op itself with `transpose`
turned over, so gradients of any order reach `x`, backward and forward; packed bytes have none.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import mxfp4, routing
from .activations import KINDS, Activation
from .backends import choose, cpu, reference, triton
from .backends.reference import Projection as Projection
from .mxfp4 import BLOCK_SIZE, MXFP4Tensor, Rounder, ScaleRule, Ties, blocks_shape, canonical

_BACKENDS = ("reference", "cpu", "triton")
OPERANDS = ("float32", "bfloat16", "int8")
"""What a backend may round activations to before it multiplies them: no further than what comes in float32 has, than
bfloat16, or to 8 bits and a step for each 32, see `reference.round_int8`. Sums are float32 in any case."""
_COMPUTE_DTYPES = (torch.float32, torch.float64)
_NATIVE_WORKING_BYTES = 5  # a float32 weight that is made contiguous, and what it becomes
MLP_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16),
    "triton": (torch.float32, torch.bfloat16, torch.float16),
}
"""The backends that have `experts_mlp`, and what tokens and biases can be there."""

_library = torch.library.Library("hf_mxfp4", "DEF")
_library.define(
    "grouped_linear(Tensor x, Tensor blocks, Tensor scales, Tensor offsets, bool transpose, str operand, bool narrow, "
    "str backend)"
    " -> Tensor"
)
_library.define(
    "experts_mlp(Tensor x, Tensor ids, Tensor weights, "
    "Tensor first_blocks, Tensor first_scales, Tensor? first_bias, "
    "Tensor second_blocks, Tensor second_scales, Tensor? second_bias, "
    "str kind, bool gated, bool interleaved, float[] constants, str operand, bool narrow, str backend) -> Tensor"
)


def grouped_linear(
    x: Tensor,
    blocks: Tensor,
    scales: Tensor,
    offsets: Tensor,
    *,
    transpose: bool = False,
    operand: str = "float32",
    narrow: bool = False,
    backend: str = "reference",
) -> Tensor:
    """Multiplies the rows of each expert by that expert's packed weights: out[i] = W[expert of i] @ x[i].

    Args:
        x: float32 or float64 [S, K], rows sorted by expert; [S, N] with `transpose`.
        blocks: uint8 [E, N, K / 2].
        scales: uint8 [E, N, K / 32].
        offsets: int64 [E + 1], expert e owns rows offsets[e] to offsets[e + 1]; rows from offsets[E] on are nobody's.
        transpose: multiply by the transposed weights, as the gradient does.
        operand: one of `OPERANDS`.
        narrow: every scale byte is known to be 1 to 128, which the Triton kernels take less work for.
        backend: a usable backend's name, see `backends.choose`.

    Returns:
        [S, N], or [S, K] with `transpose`, in the dtype of `x`; zeros in rows that are nobody's.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes that do not fit, or an unknown operand or backend.
    """

    def run(rows: Tensor) -> Tensor:
        out: Tensor = torch.ops.hf_mxfp4.grouped_linear(
            rows, blocks, scales, offsets, transpose, operand, narrow, backend
        )
        return out

    if torch.compiler.is_compiling():
        return run(x)
    # torch.library registers no forward-mode derivative; the op is linear in x, so its tangent goes through it as well.
    primal, tangent = forward_ad.unpack_dual(x)
    return run(primal) if tangent is None else forward_ad.make_dual(run(primal), run(tangent))


def quantize(
    weight: Tensor, scale_rule: ScaleRule = "mse", ties: Ties = "even", *, name: str = "weight"
) -> MXFP4Tensor:
    """Rounds a weight to MXFP4 as `mxfp4.quantize`, whose arguments, results and errors it has, byte for byte.

    On a CPU the native kernel does it, where it is there.
    """
    is_native = weight.device.type == "cpu" and choose("auto", "cpu").name == "cpu"
    rounder = Rounder(cpu.quantize_chunk, _NATIVE_WORKING_BYTES) if is_native else None
    return mxfp4.quantize(weight, scale_rule, ties, name=name, rounder=rounder)


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
    if blocks.device != device:
        backend = "reference"  # which moves experts that are selected
    rows = routing.gather(latent_tokens, slots).to(compute)
    outputs = grouped_linear(
        rows, blocks, scales, slots.offsets, operand=operand_of(latent_tokens.dtype), backend=backend
    )
    mixed = routing.combine(outputs, slots, mixture_weights.to(device, compute))
    return (shared_output.to(device, compute) + mixed).to(latent_tokens.dtype)


def operand_of(dtype: torch.dtype) -> str:
    """What tokens of a dtype may be rounded to: what they have is not lost, and what follows is kept as they were."""
    return "bfloat16" if dtype is torch.bfloat16 else "float32"


def experts_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Projection,
    second: Projection,
    activation: Activation,
    *,
    operand: str,
    narrow: bool = False,
    backend: str = "cpu",
) -> Tensor:
    """Runs each token through its experts and mixes what comes out, in one call of a backend. Has no gradient.

    Args:
        x: [T, H] of one of the `MLP_DTYPES`, on a device of the backend's.
        ids: int64 [T, k]; ids outside 0 to E - 1 contribute nothing.
        weights: float32 [T, k], used as they are.
        first: [E, 2 I, H], or [E, I, H] without a gate; its bias of one of the `MLP_DTYPES`, as the other's.
        second: [E, H, I].
        activation: between the two.
        operand: one of `OPERANDS`; the Triton kernels round no further than to the dtype of `x`.
        narrow: as for `grouped_linear`.
        backend: one that has the op, see `MLP_DTYPES`.

    Returns:
        [T, H] in the dtype of `x`.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes that do not fit.
    """
    if nobody_listens():
        _check_mlp(x, ids, weights, first, second, activation.gated, activation.kind, operand, backend)
        return _run_mlp(x, ids, weights, first, second, activation, operand, narrow, backend)
    mixed: Tensor = torch.ops.hf_mxfp4.experts_mlp(
        x,
        ids,
        weights,
        *first,
        *second,
        activation.kind,
        activation.gated,
        activation.interleaved,
        activation.constants,
        operand,
        narrow,
        backend,
    )
    return mixed


def nobody_listens() -> bool:
    """Whether the dispatcher would do nothing but call the kernel, at a cost of some 5 % of a call for one token.

    It does more while torch.compile traces, under a dispatch mode (fake tensors, tracing, counting), a transform of
    torch.func, or the profiler.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._autograd._profiler_enabled()
    )


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


def _check(
    x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool, operand: str, backend: str
) -> None:
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
    _check_known(operand=(operand, OPERANDS), backend=(backend, _BACKENDS))


def _grouped_linear(
    x: Tensor,
    blocks: Tensor,
    scales: Tensor,
    offsets: Tensor,
    transpose: bool,
    operand: str,
    narrow: bool,
    backend: str,
) -> Tensor:
    _check(x, blocks, scales, offsets, transpose, operand, backend)
    if backend == "triton":
        return triton.grouped_linear(x, blocks, scales, offsets, transpose, operand, narrow)
    run = cpu.grouped_linear if backend == "cpu" else reference.grouped_linear
    return run(x, blocks, scales, offsets, transpose, operand)


def _grouped_linear_fake(
    x: Tensor,
    blocks: Tensor,
    scales: Tensor,
    offsets: Tensor,
    transpose: bool,
    operand: str,
    narrow: bool,
    backend: str,
) -> Tensor:
    _check(x, blocks, scales, offsets, transpose, operand, backend)
    if any(part.is_meta for part in (blocks, scales, offsets)) and not x.is_meta:
        raise ValueError(f"tokens are on {x.device}, packed weights or routes on meta, where they have no values")
    return x.new_empty(x.shape[0], 2 * blocks.shape[2] if transpose else blocks.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, blocks, scales, offsets, ctx.transpose, ctx.operand, ctx.narrow, ctx.backend = inputs
    ctx.save_for_backward(blocks, scales, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    blocks, scales, offsets = ctx.saved_tensors
    grad_x = None
    if ctx.needs_input_grad[0]:
        turned = not ctx.transpose
        grad_x = grouped_linear(
            grad,
            blocks,
            scales,
            offsets,
            transpose=turned,
            operand=ctx.operand,
            narrow=ctx.narrow,
            backend=ctx.backend,
        )
    return grad_x, None, None, None, None, None, None, None


def _check_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Projection,
    second: Projection,
    gated: bool,
    kind: str,
    operand: str,
    backend: str,
) -> None:
    _check_known(operand=(operand, OPERANDS), activation=(kind, KINDS), backend=(backend, tuple(MLP_DTYPES)))
    _check_mlp_dtypes(x, ids, weights, first, second, MLP_DTYPES[backend])
    if first.blocks.ndim != 3 or x.ndim != 2 or ids.ndim != 2:
        given = f"x {list(x.shape)}, ids {list(ids.shape)} and first blocks {list(first.blocks.shape)}"
        raise ValueError(f"{given}: expected [T, H], [T, k] and [E, N, H / 2]")
    experts, inner, half = first.blocks.shape
    hidden, middle = 2 * half, inner // 2 if gated else inner
    if hidden % BLOCK_SIZE or inner % (2 * BLOCK_SIZE if gated else BLOCK_SIZE):
        raise ValueError(f"first blocks {list(first.blocks.shape)}: H and I have to be multiples of {BLOCK_SIZE}")
    routes = (x.shape[0], ids.shape[-1])
    for name, tensor, shape in (
        ("x", x, (x.shape[0], hidden)),
        ("ids", ids, routes),
        ("weights", weights, routes),
        ("first scales", first.scales, (experts, inner, hidden // BLOCK_SIZE)),
        ("second blocks", second.blocks, (experts, hidden, middle // 2)),
        ("second scales", second.scales, (experts, hidden, middle // BLOCK_SIZE)),
        ("first bias", first.bias, (experts, inner)),
        ("second bias", second.bias, (experts, hidden)),
    ):
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} {list(tensor.shape)}: expected {list(shape)}")


def _check_mlp_dtypes(
    x: Tensor, ids: Tensor, weights: Tensor, first: Projection, second: Projection, known: tuple[torch.dtype, ...]
) -> None:
    if x.dtype not in known:
        raise TypeError(f"x has dtype {x.dtype}; experts_mlp takes {' and '.join(map(str, known))}")
    if ids.dtype is not torch.int64 or weights.dtype is not torch.float32:
        raise TypeError(f"ids and weights are {ids.dtype} and {weights.dtype}; expected torch.int64 and torch.float32")
    packed = (first.blocks, first.scales, second.blocks, second.scales)
    if any(part.dtype is not torch.uint8 for part in packed):
        raise TypeError("blocks and scales are torch.uint8")
    biases = {bias.dtype for bias in (first.bias, second.bias) if bias is not None}
    if len(biases) > 1 or not biases <= set(known):
        raise TypeError(f"biases are {biases}; expected one of {' and '.join(map(str, known))} for both")


def _check_known(**options: tuple[str, tuple[str, ...]]) -> None:
    for name, (given, known) in options.items():
        if given not in known:
            raise ValueError(f"{name} is {given!r}; expected one of {', '.join(known)}")


def _experts_mlp_fake(*arguments: Any) -> Tensor:
    x, ids, weights, *packed, kind, gated, _, _, operand, _, backend = arguments
    _check_mlp(x, ids, weights, Projection(*packed[:3]), Projection(*packed[3:]), gated, kind, operand, backend)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _experts_mlp(*arguments: Any) -> Tensor:
    x, ids, weights, *packed, kind, gated, interleaved, constants, operand, narrow, backend = arguments
    first, second = Projection(*packed[:3]), Projection(*packed[3:])
    _check_mlp(x, ids, weights, first, second, gated, kind, operand, backend)
    activation = _activation(kind, gated, interleaved, tuple(constants))
    return _run_mlp(x, ids, weights, first, second, activation, operand, narrow, backend)


def _run_mlp(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Projection,
    second: Projection,
    activation: Activation,
    operand: str,
    narrow: bool,
    backend: str,
) -> Tensor:
    if backend == "triton":
        devices = {str(part.device) for part in (x, ids, weights, *first, *second) if part is not None}
        if len(devices) > 1:
            raise ValueError(f"tensors are on {' and '.join(sorted(devices))}; expected one device")
        return triton.experts_mlp(x, ids, weights, first, second, activation, narrow)
    if not x.is_cpu:
        raise ValueError(f"x is on {x.device}; the native kernel takes tensors on cpu")
    return cpu.experts_mlp(x, ids, weights, first, second, activation, operand)


@cache
def _activation(kind: str, gated: bool, interleaved: bool, constants: tuple[float, ...]) -> Activation:
    return Activation(kind, gated, interleaved, *constants)


_library.impl("grouped_linear", _grouped_linear, "CompositeExplicitAutograd")
_library.impl("experts_mlp", _experts_mlp, "CompositeExplicitAutograd")
torch.library.register_fake("hf_mxfp4::experts_mlp", _experts_mlp_fake, lib=_library)
torch.library.register_fake("hf_mxfp4::grouped_linear", _grouped_linear_fake, lib=_library)
torch.library.register_autograd("hf_mxfp4::grouped_linear", _backward, setup_context=_setup_context, lib=_library)
