"""The blocks read-back and accuracy: bits and errors of every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from common import decode_float64, relative_error
from torch import Tensor

from hf_mxfp4 import ops
from hf_mxfp4.activations import Activation
from hf_mxfp4.backends import triton
from hf_mxfp4.backends.reference import Projection
from hf_mxfp4.backends.triton import Config, Tile

from .device import Block, Device, Run, Sizes
from .layers import ACTIVATIONS, Batch, Layer, decode, random_batch, random_layer

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Norm of the error over norm of the result."""
PLAIN = Tile(64, 16, 128, 4, 2)
TILES = (Tile(64, 16, 256, 4, 3), Tile(32, 32, 128, 4, 3), Tile(64, 64, 128, 4, 2), Tile(128, 64, 64, 8, 2))
ROWS = Tile(32, 1, 512, 4, 1)
_HELD = {"planes": (0, 252), "scaled": (0, 252), "rows": (47, 187), "scaled, interpreted": (117, 139)}
"""Scale bytes whose weights a route takes as activations: finite ones; what its sums hold, where it has no matrix
instructions; and float16, by which Triton's interpreter converts bfloat16."""


# Cases: what is compiled ahead, run, and compared


class Case(NamedTuple):
    """One result and what it has to be: within a relative error, or bit for bit if the limit is None."""

    name: str
    run: Callable[[], Tensor]
    expected: Callable[[], Tensor]
    limit: float | None = None
    required: bool = True


def compare(block: Block, case: Case) -> None:
    """Runs a case and checks it; where errors are allowed, twice, and the same bits have to come both times."""
    try:
        got, expected = case.run(), case.expected()
        again = got if case.limit is None else case.run()
    except Exception as error:  # noqa: BLE001  # compilers raise anything; the other cases are still to run
        block.check(case.name, False, f"{type(error).__name__}: {error}"[:500], case.required)
        return
    if not same_bits(got, again)[0]:
        block.check(case.name, False, "other bits when it was repeated", case.required)
    elif case.limit is None:
        block.check(case.name, *same_bits(got, expected), case.required)
    else:
        error = relative_error(got, expected)
        block.check(case.name, error <= case.limit, f"off by {error:.1e}, {case.limit:.0e} allowed", case.required)


def compare_all(run: Run, block: Block, cases: Iterator[Case]) -> None:
    """Compares while there is time."""
    for case in cases:
        if run.left() < 0:
            block.note(f"left out for want of time: {case.name} and what follows")
            return
        compare(block, case)


def same_bits(got: Tensor, expected: Tensor) -> tuple[bool, str]:
    """Whether two tensors have the same bits, any NaN for NaN and either zero for zero, and where they first differ."""
    got, expected = (t.detach().cpu().float() + 0.0 for t in (got, expected))
    if got.shape != expected.shape:
        return False, f"shape {list(got.shape)}, expected {list(expected.shape)}"
    differ = (got.view(torch.int32) != expected.view(torch.int32)) & ~(got.isnan() & expected.isnan())
    if not differ.any():
        return True, f"{got.numel()} values, bit for bit"
    at = tuple(differ.nonzero()[0].tolist())
    return False, f"{int(differ.sum())} of {got.numel()} differ, first {at}: {got[at]:.9g}, expected {expected[at]:.9g}"


# Read-back


class Stack(NamedTuple):
    """Packed [E, W, W] and its weights float32 [E, W, W] on the CPU, by NumPy."""

    blocks: Tensor
    scales: Tensor
    weights: Tensor


def every_weight(device: Device, bytes: tuple[int, ...], width: int) -> Stack:
    """Every code with every scale byte, each the only one in its row and in its column; then rows full of codes.

    What is not finite meets zeros of one-hot rows then, but no other weight. Scale bytes of 255 have an expert of their
    own, as all of their weights are NaN.
    """
    pairs = [(byte, code) for byte in bytes if byte != 255 for code in range(16)]
    pairs += [(127, 0)] * (-len(pairs) % width)
    if 255 in bytes:
        pairs += [(255, code) for code in range(16)] + [(127, 0)] * (width - 16)
    experts = len(pairs) // width
    codes = torch.zeros(experts * width, width, dtype=torch.uint8)
    row = torch.arange(experts * width)
    codes[row, (row % width * 37 + 5) % width] = torch.tensor([code for _, code in pairs], dtype=torch.uint8)
    scales = torch.tensor([byte for byte, _ in pairs], dtype=torch.uint8)[:, None].repeat(1, width // 32)
    generator = torch.Generator().manual_seed(0)
    finite = torch.tensor([byte for byte in bytes if byte <= 252], dtype=torch.uint8)
    picked = torch.randint(len(finite), (width, width // 32), generator=generator)
    mixed = torch.randint(16, (width, width), dtype=torch.uint8, generator=generator)
    codes, scales = torch.cat([codes, mixed]), torch.cat([scales, finite[picked]])
    blocks = codes[:, ::2] | codes[:, 1::2] << 4
    weights = torch.from_numpy(decode_float64(blocks, scales))
    weights[(scales == 255).repeat_interleave(32, dim=1)] = math.nan
    return Stack(
        blocks.view(-1, width, width // 2).to(device.device),
        scales.view(-1, width, width // 32).to(device.device),
        weights.float().view(-1, width, width),
    )


def one_hot_products(weights: Tensor, transpose: bool) -> Tensor:
    """What one-hot rows give: a weight each, or NaN where another weight that is not finite is multiplied by 0."""
    odd = (~weights.isfinite()).int()
    others = odd.sum(dim=-2 if transpose else -1, keepdim=True) - odd
    out = weights.masked_fill(others > 0, math.nan)
    return (out if transpose else out.mT).reshape(-1, weights.shape[-1])


def routes(device: Device) -> dict[str, bool]:
    """The routes to look at, and whether they have to be right here; `tl.dot_scaled` may be missing."""
    import triton as package

    known = {"planes": True, "rows": True}  # "scaled" is in the table for some GPUs; elsewhere it may fail
    if not device.dry or tuple(map(int, package.__version__.split(".")[:2])) >= (3, 8):
        name = triton.nearest_family(device.family, list(triton.launch_table()))
        known["scaled"] = any(entry["route"] == "scaled" for entry in triton.launch_table()[name])
    return known


def read_back_cases(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Every kernel that decodes, on one-hot rows."""
    for narrow in (True, False):
        bytes = tuple(byte for byte in sizes.bytes if 1 <= byte <= 128 or not narrow)
        stack = every_weight(device, bytes, sizes.width)
        label = "bytes 1 to 128" if narrow else "all bytes"
        for operand in ("bfloat16", "float32"):
            for transpose in (False, True):
                yield linear_case(device, stack, operand, transpose, narrow, label)
        for route, required in routes(device).items():
            if route == "scaled" and not narrow:
                continue
            if route == "scaled":
                yield linear_case(
                    device, stack, "bfloat16", False, narrow, label, Config(route, *[PLAIN] * 3), required
                )
            tile = ROWS if route == "rows" else PLAIN
            for dtype in (torch.bfloat16,) if device.dry else (torch.bfloat16, torch.float32):
                if route != "rows" or not narrow:
                    yield from layer_cases(device, sizes, Config(route, *[tile] * 3), dtype, narrow, label, required)


def linear_case(
    device: Device, stack: Stack, operand: str, transpose: bool, narrow: bool, label: str,
    config: Config | None = None, required: bool = True,
) -> Case:  # fmt: skip
    """`grouped_linear` of one-hot rows, each expert's as many as it is wide."""
    experts, width, _ = stack.weights.shape
    x = torch.eye(width, device=device.device).repeat(experts, 1)
    offsets = torch.arange(0, (experts + 1) * width, width, device=device.device)
    packed = (stack.blocks, stack.scales)

    def run() -> Tensor:
        if config is None:
            return triton.grouped_linear(x, *packed, offsets, transpose, operand, narrow)
        parts = 1 if operand == "bfloat16" else 3
        launches, out = triton.linear_launches(
            x, *packed, offsets, transpose, config, parts=parts, narrow=narrow, multiply=device.multiply
        )
        for launch in launches:
            launch.run()
        return out

    name = f"{'transposed' if transpose else 'forward'}, {config.route if config else 'own route'}, {operand}, {label}"
    return Case(name, run, lambda: one_hot_products(stack.weights, transpose), None, required)


def layer_cases(
    device: Device, sizes: Sizes, config: Config, dtype: torch.dtype, narrow: bool, label: str, required: bool
) -> Iterator[Case]:
    """`experts_mlp` with the weights in its second projection behind a one, and in its first before a one."""
    width, relu = sizes.width, Activation("relu", gated=False)
    name = f"{config.route}, {str(dtype).removeprefix('torch.')}, {label}"
    for is_first in (False, True):
        bytes = tuple(byte for byte in sizes.bytes if 1 <= byte <= 128 or not narrow)
        if is_first:
            low, high = _HELD["scaled, interpreted" if config.route == "scaled" and device.dry else config.route]
            bytes = tuple(byte for byte in bytes if low <= byte <= high) or (127,)
        stack = every_weight(device, bytes, width)
        experts = stack.weights.shape[0]
        codes = torch.eye(width, dtype=torch.uint8) * 2
        one = (codes[:, ::2] | codes[:, 1::2] << 4).expand(experts, -1, -1).contiguous().to(device.device)
        ones = Projection(one, torch.full_like(stack.scales, 127), None)
        own = Projection(stack.blocks, stack.scales, None)
        layer = Layer(own, ones, relu) if is_first else Layer(ones, own, relu)
        ids = torch.arange(experts, device=device.device).repeat_interleave(width)[:, None]
        x = torch.eye(width, device=device.device, dtype=dtype).repeat(experts, 1)
        for sign in (1, -1) if is_first else (1,):
            if not is_first:
                clean = config.route == "rows"  # which multiplies by scales last, so that no infinity meets a zero
                expected = stack.weights.mT.reshape(-1, width) if clean else one_hot_products(stack.weights, False)
            else:
                expected = (sign * stack.weights.mT).relu().reshape(-1, width)
            batch = Batch(sign * x, ids, torch.ones(ids.shape, device=device.device))
            where = f"{'first' if is_first else 'second'} projection{', negated' if sign < 0 else ''}"
            call = lambda layer=layer, batch=batch: layer.run(device, batch, config, narrow)  # noqa: E731
            yield Case(f"{where}, {name}", call, lambda expected=expected: expected, None, required)


def read_back(run: Run, block: Block) -> None:
    """The read-back block."""
    stack = every_weight(run.device, run.sizes.bytes, run.sizes.width)
    own = decode(stack.blocks, stack.scales).cpu().float()
    block.check("decode to float64 here and in NumPy", *same_bits(own, stack.weights))
    compare_all(run, block, read_back_cases(run.device, run.sizes))
    if "scaled" not in routes(run.device):
        block.note("this Triton cannot interpret tl.dot_scaled; its route is left out")


# Accuracy


def accuracy_cases(device: Device, sizes: Sizes) -> Iterator[Case]:
    """Expert MLPs with ids that are no expert's, against float64."""
    gpt_oss, hidden = ACTIVATIONS["clamped-swiglu"], sizes.hidden
    many, few = (random_layer(device, n, hidden, hidden, gpt_oss, torch.bfloat16, n) for n in sizes.experts)
    own = {"own route": (None, True), "own route, any scale": (None, False)}
    for dtype in LIMITS:
        batch = strays(random_batch(device, sizes.tokens[0], hidden, sizes.experts[0], 2, dtype, 1), sizes.experts[0])
        forced = {
            f"{route} route": (Config(route, *[ROWS if route == "rows" else PLAIN] * 3), route != "rows")
            for route in routes(device)
        }
        for name, (config, narrow) in {**own, **forced}.items():
            required = config is None or routes(device)[config.route]
            yield mlp_case(device, f"K = {hidden}, {name}", many, batch, config, narrow, required)
    batch = strays(random_batch(device, sizes.tokens[1], hidden, sizes.experts[1], 2, torch.bfloat16, 2), len(few))
    yield mlp_case(device, f"{sizes.tokens[1]} tokens, own route", few, batch, None)
    for tile in TILES:
        yield mlp_case(device, f"{sizes.tokens[1]} tokens, {tile[:3]}", few, batch, Config("planes", *[tile] * 3))
    for name, activation in ACTIVATIONS.items():
        for route in ("planes", "rows"):
            dtype = torch.float32 if route == "rows" else torch.bfloat16
            layer = random_layer(device, 4, 64, 32, activation, None if "cut" in name else torch.float32, 3)
            batch = strays(random_batch(device, 3, 64, 4, 2, dtype, 4), 4)
            config = Config(route, *[ROWS if route == "rows" else PLAIN] * 3)
            yield mlp_case(device, f"{name}, {route} route", layer, batch, config)
    for operand, limit in (("float32", LIMITS[torch.float32]), ("bfloat16", LIMITS[torch.bfloat16])):
        yield gradient_case(device, few.second, sizes.tokens[1], operand, limit)


def strays(batch: Batch, experts: int) -> Batch:
    """The batch with ids that are no expert's among the others."""
    ids = batch.ids.clone()
    ids[0, 0], ids[-1, -1] = -1, experts
    return batch._replace(ids=ids)


def mlp_case(
    device: Device, name: str, layer: Layer, batch: Batch, config: Config | None, narrow: bool = True,
    required: bool = True,
) -> Case:  # fmt: skip
    """Expert MLPs against float64."""
    label = f"{name}, {str(batch.x.dtype).removeprefix('torch.')}"
    limit = LIMITS[batch.x.dtype]
    return Case(
        label, lambda: layer.run(device, batch, config, narrow), lambda: layer.exact(batch), limit, required
    )  # fmt: skip


def gradient_case(device: Device, projection: Projection, rows: int, operand: str, limit: float) -> Case:
    """The gradient of a product of sorted rows, some of which are nobody's, through the op."""
    blocks, scales, _ = projection
    experts, features, half = blocks.shape
    generator = torch.Generator(device.device).manual_seed(5)
    options: dict[str, Any] = {"generator": generator, "device": device.device}
    cuts = torch.randint(rows - 1, (experts,), **options).sort().values
    offsets = torch.cat([cuts.new_zeros(1), cuts])
    x, grad = torch.randn(rows, 2 * half, **options), torch.randn(rows, features, **options)

    def run() -> Tensor:
        leaf = x.clone().requires_grad_()
        out = ops.grouped_linear(leaf, blocks, scales, offsets, operand=operand, narrow=True, backend="triton")
        out.backward(grad)
        assert leaf.grad is not None
        return torch.cat([out.detach(), leaf.grad], dim=1)

    def exact() -> Tensor:
        out = torch.zeros(rows, features + 2 * half, dtype=torch.float64, device=device.device)
        for e, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            weight = decode(blocks[e], scales[e])
            out[start:stop] = torch.cat([x[start:stop].double() @ weight.mT, grad[start:stop].double() @ weight], dim=1)
        return out

    return Case(f"a product and its gradient, operand {operand}", run, exact, limit)


def accuracy(run: Run, block: Block) -> None:
    """The accuracy block."""
    compare_all(run, block, accuracy_cases(run.device, run.sizes))
