"""The ops on a GPU by Triton kernels: whether they can be had, how they are launched, and launching them.

Triton is imported when a kernel is first needed, and never asked for by a package's name, since builds for other GPUs
have other names. Launch configurations are looked up in `configs/launch.json`; nothing is tuned while a model runs.
Nothing waits for the device, but on GPUs whose matrix units Triton does not drive (before sm_80), where batches of
many tokens decode one expert at a time in plain torch.

E experts, N output features, K input features, T tokens, k experts a token, S = T * k slots, M tiles of slots.
"""

from __future__ import annotations

import json
import math
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module, util
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import routing
from ..activations import CONSTANTS, Activation
from . import reference
from .reference import Projection

ROUTES = ("planes", "scaled", "rows", "dense")
"""How a batch is computed: by matrix instructions, weights decoded in four planes or by `tl.dot_scaled`; each slot by
itself in float32; or by decoding one expert at a time for torch's own product."""

_TILED = ("planes", "scaled")  # routes that multiply sorted rows
_OLDEST = (3, 4)
_DEVICES = ("cuda", "xpu")
_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_COLUMNS = 1024  # of activations or outputs that a program of `permute` or `mix` takes
_MOST_SLOTS = 512  # that a program of `route` reads at a time


class Tile(NamedTuple):
    """What one program computes, and with how many warps and stages of loads."""

    block_rows: int
    block_tokens: int
    block_k: int
    num_warps: int
    num_stages: int


class Config(NamedTuple):
    """How a batch is launched: the route, and the tiles of both projections and of the gradient."""

    route: str
    first: Tile
    second: Tile
    transposed: Tile


class Launch(NamedTuple):
    """One launch of a kernel: its run-time arguments and its constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        """Launches it on the current device."""
        # Triton 3.10 stops fusing multiplication and addition unless it is told to.
        self.kernel[self.grid](
            **self.arguments,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=True,
        )


def unavailable(device_type: str | None = None) -> str | None:
    """Why the kernels cannot be used here, on a device of a type if one is given, or None if they can."""
    if util.find_spec("triton") is None:
        return "Triton is not installed"
    kernels = _kernels()
    if isinstance(kernels, str):
        return kernels
    known = ("cpu", *_DEVICES) if kernels.INTERPRETED else _DEVICES
    if device_type is not None and device_type not in known:
        return f"it is for tensors on {' and '.join(known)}, and these are on {device_type}"
    if kernels.INTERPRETED:
        return None
    for kind in _DEVICES if device_type is None else (device_type,):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            return None
    return f"torch finds no device of type {device_type or ' or '.join(_DEVICES)}"


@cache
def _kernels() -> Any:
    """The module of kernels, or why there is none."""
    try:
        triton = import_module("triton")
        version = tuple(int(part) for part in triton.__version__.split(".")[:2])
        if version < _OLDEST:
            return f"Triton {triton.__version__} is too old; {'.'.join(map(str, _OLDEST))} or newer is needed"
        return import_module("hf_mxfp4.backends.triton_kernels")
    except (ImportError, AttributeError, ValueError, OSError, RuntimeError) as error:
        return f"Triton cannot be loaded: {error}"


def _ready() -> Any:
    kernels = _kernels()
    if isinstance(kernels, str):
        raise RuntimeError(kernels)
    return kernels


# Configurations


@cache
def family(device: torch.device) -> str:
    """What the launch table calls a device, such as "sm_90" or "gfx942"; "interpreter" for Triton's interpreter."""
    if _ready().INTERPRETED:
        return "interpreter"
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def nearest_family(name: str, known: list[str]) -> str:
    """The family in the launch table whose entries a device uses: its own, or the nearest older one of its kind."""
    if name in known:
        return name
    for prefix, base in (("sm_", 10), ("gfx", 16)):
        if name.startswith(prefix):
            same = {other: int(other.removeprefix(prefix), base) for other in known if other.startswith(prefix)}
            older = [other for other, rank in same.items() if rank <= int(name.removeprefix(prefix), base)]
            return max(older, key=same.__getitem__) if older else min(same, key=same.__getitem__)
    return "default"


@cache
def launch_table() -> dict[str, list[dict[str, Any]]]:
    """`configs/launch.json`: entries by family of devices, as `find_config` reads them."""
    table: dict[str, list[dict[str, Any]]] = json.loads(files("hf_mxfp4.configs").joinpath("launch.json").read_text())
    return table


@cache
def find_config(
    name: str, narrow: bool, tokens_per_expert: float, hidden: int, middle: int, routes: tuple[str, ...] = ROUTES
) -> Config | None:
    """The entry of the launch table that fits best.

    Args:
        name: see `family`.
        narrow: every scale byte is 1 to 128. Otherwise entries that say `narrow` are left out: `tl.dot_scaled` takes
            byte 0 for 0, and large tiles run out of registers.
        tokens_per_expert: S / E.
        hidden: H, input features of the first projection.
        middle: I, input features of the second.
        routes: that will do.

    Returns:
        The configuration of the entry at the least distance, a doubling of a size counting as 1, or None.
    """
    table = launch_table()
    known = table[nearest_family(name, list(table))]
    entries = [entry for entry in known if entry["route"] in routes and (narrow or not entry.get("narrow"))]
    if not entries:
        return None

    def distance(entry: dict[str, Any]) -> float:
        far = abs(math.log2(max(tokens_per_expert, 1 / 1024) / entry["tokens_per_expert"]))
        if "hidden_size" not in entry:
            return far + 1
        return far + abs(math.log2(hidden / entry["hidden_size"])) + abs(math.log2(middle / entry["intermediate_size"]))

    best = min(entries, key=distance)
    return Config(best["route"], *(Tile(**best[part]) for part in Config._fields[1:]))


def multiplication(name: str) -> str:
    """How kernels multiply two bfloat16 on a family of devices, see `triton_decode`."""
    if name == "interpreter":
        return "interpreted"
    return "ptx" if name.startswith("sm_") else "float32"


# Launches


def _bits(values: Tensor) -> Tensor:
    """bfloat16 as its bits, since Triton's interpreter cannot hold it; others as they are."""
    values = values.contiguous()
    return values.view(torch.int16) if values.dtype is torch.bfloat16 else values


def _codes(blocks: Tensor, planes: bool) -> Tensor:
    """Codes as kernels read them: int32 words for planes, bytes otherwise."""
    blocks = blocks.contiguous()
    if not planes:
        return blocks
    if blocks.storage_offset() % 4 or blocks.data_ptr() % 4:
        blocks = blocks.clone()
    return blocks.view(torch.int32)


def _operands(bits: Tensor, multiply: str) -> Tensor:
    """Parts as matrix instructions take them. A cast in the kernel would bring them through registers."""
    return bits if multiply == "interpreted" else bits.view(torch.bfloat16)


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _tile_constants(tile: Tile) -> dict[str, int]:
    return {"BLOCK_ROWS": tile.block_rows, "BLOCK_TOKENS": tile.block_tokens, "BLOCK_K": tile.block_k}


def _count_tiles(slots: int, experts: int, block_tokens: int) -> int:
    """M, the most tiles that S slots can need."""
    return min(slots, slots // block_tokens + experts)


def _activation_constants(activation: Activation) -> dict[str, Any]:
    constants = dict(zip((name.upper() for name in CONSTANTS), activation.constants, strict=True))
    return {"GATED": activation.gated, "INTERLEAVED": activation.interleaved, "KIND": activation.kind, **constants}


def _permute_launch(x: Tensor, parts: int, planes: bool) -> tuple[Launch, Tensor]:
    """Activations [T, K] as parts int16 [parts, T, K]."""
    tokens, width = x.shape
    out = torch.empty((parts, tokens, width), dtype=torch.int16, device=x.device)
    block = min(_COLUMNS, _power_of_2(width))
    constants = {"K": width, "PARTS": parts, "PLANES": planes, "BLOCK": block}
    grid = (tokens * -(-width // block),)
    arguments = {"x": _bits(x), "out": out, "tokens": tokens}
    return Launch(_ready().permute, grid, arguments, constants, 4, 1), out


def _route_launch(
    x: Tensor, ids: Tensor, experts: int, parts: int, planes: bool, block_tokens: int
) -> tuple[Launch, Tensor, Tensor, Tensor]:
    """Sorts slots, cuts tiles and permutes activations: these, the order int32 [S], and the table int32 [3, M]."""
    permute, out = _permute_launch(x, parts, planes)
    slots = ids.numel()
    order = torch.empty(slots, dtype=torch.int32, device=x.device)
    table = torch.empty((3, _count_tiles(slots, experts, block_tokens)), dtype=torch.int32, device=x.device)
    constants = {
        **permute.constants,
        "E": experts,
        "BINS": _power_of_2(experts + 1),
        "CHUNK": max(16, min(_MOST_SLOTS, _power_of_2(slots))),
        "BLOCK_TOKENS": block_tokens,
    }
    arguments = {**permute.arguments, "ids": ids, "order": order, "table": table}
    arguments |= {"tiles": table.shape[1], "slots": slots}
    return Launch(_ready().route, (experts + permute.grid[0],), arguments, constants, 4, 1), out, order, table


def _mix_launch(partial: Tensor, ids: Tensor, experts: int, out: Tensor) -> Launch:
    """Sums each token's slots."""
    tokens, width = out.shape
    constants = {"E": experts, "N": width, "TOP_K": ids.shape[1], "BLOCK": min(_COLUMNS, _power_of_2(width))}
    arguments = {"partial": partial, "ids": ids, "out": _bits(out)}
    return Launch(_ready().mix, (tokens * -(-width // constants["BLOCK"]),), arguments, constants, 4, 1)


def experts_launches(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    first: Projection,
    second: Projection,
    activation: Activation,
    config: Config,
    *,
    narrow: bool,
    multiply: str,
) -> tuple[list[Launch], Tensor]:
    """The launches of whole expert MLPs, in their order, and where the last one writes [T, H].

    Args:
        x: float32, bfloat16 or float16 [T, H].
        ids: int64 or int32 [T, k].
        weights: float32, bfloat16 or float16 [T, k].
        first: of [E, 2 I or I, H].
        second: of [E, H, I].
        activation: between the two.
        config: of a route other than "dense".
        narrow: every scale byte is 1 to 128.
        multiply: see `multiplication`.
    """
    parts, top_k = _PARTS[x.dtype], ids.shape[1]
    tokens, slots, experts, width = x.shape[0], ids.numel(), first.blocks.shape[0], second.blocks.shape[2] * 2
    planes, by_row = config.route != "scaled", config.route == "rows"
    ids, weights = ids.contiguous(), _bits(weights)
    inner = torch.empty((parts, slots, width), dtype=torch.int16, device=x.device)
    partial = torch.empty((slots, x.shape[1]), dtype=torch.float32, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    shared: dict[str, Any] = {"PARTS": parts}
    where: dict[str, Any]
    if by_row:
        prepare, permuted = _permute_launch(x, parts, planes=True)
        shared["E"], where = experts, {"ids": ids}
    else:
        block = config.first.block_tokens
        prepare, permuted, order, table = _route_launch(x, ids, experts, parts, planes, block)
        shared |= {"PLANES": planes, "NARROW": narrow, "MULTIPLY": multiply}
        where = {"order": order, "table": table, "tiles": table.shape[1]}
    launches = [prepare]
    kernels = _ready()
    names = ("first_rows", "second_rows") if by_row else ("first_projection", "second_projection")
    for name, tile, source, projection, target in (
        (names[0], config.first, permuted, first, inner),
        (names[1], config.second, inner, second, partial),
    ):
        _, features, groups = projection.scales.shape
        constants = {**shared, "N": features, "K": 32 * groups, **_tile_constants(tile)}
        operands = source if by_row else _operands(source, multiply)
        arguments = {"x": operands, "words": _codes(projection.blocks, planes), "out": target, "slots": slots, **where}
        arguments["scales"] = projection.scales.contiguous()
        arguments["bias"] = None if projection.bias is None else _bits(projection.bias)
        if projection is first:
            constants |= {"TOP_K": top_k, **_activation_constants(activation)}
            arguments["tokens"] = tokens
        else:
            arguments["weights"] = weights
        units = slots if by_row else where["tiles"]
        if by_row:
            del constants["BLOCK_TOKENS"]
        grid = (units * -(-features // tile.block_rows),)
        launches.append(Launch(getattr(kernels, name), grid, arguments, constants, tile.num_warps, tile.num_stages))
    launches.append(_mix_launch(partial, ids, experts, out))
    return launches, out


def linear_launches(
    x: Tensor,
    blocks: Tensor,
    scales: Tensor,
    offsets: Tensor,
    transpose: bool,
    config: Config,
    *,
    parts: int,
    narrow: bool,
    multiply: str,
) -> tuple[list[Launch], Tensor]:
    """The launches of a product of sorted rows, see `grouped_linear`, and where the last one writes."""
    kernels = _ready()
    slots = x.shape[0]
    experts, features, groups = scales.shape
    planes = transpose or config.route != "scaled"
    tile = config.transposed if transpose else config.second
    permute, permuted = _permute_launch(x, parts, planes and not transpose)
    tiles = _count_tiles(slots, experts, tile.block_tokens)
    table = torch.empty((3, tiles), dtype=torch.int32, device=x.device)
    cut = Launch(
        kernels.cut_tiles,
        (experts,),
        {"offsets": offsets, "table": table, "tiles": tiles},
        {"E": experts, "BINS": _power_of_2(experts), "BLOCK_TOKENS": tile.block_tokens},
        4,
        1,
    )
    out = x.new_zeros(slots, 32 * groups if transpose else features)
    arguments = {
        "x": _operands(permuted, multiply),
        "words": _codes(blocks, planes),
        "scales": scales.contiguous(),
        "table": table,
        "out": out,
        "tiles": tiles,
        "slots": slots,
    }
    constants = {
        "N": features,
        "K": 32 * groups,
        "PARTS": parts,
        "NARROW": narrow,
        "MULTIPLY": multiply,
        **_tile_constants(tile),
    }
    if transpose:
        kernel, row_tiles = kernels.transposed_projection, -(-32 * groups // tile.block_k)
    else:
        kernel, row_tiles = kernels.second_projection, -(-features // tile.block_rows)
        arguments |= {"bias": None, "order": None, "weights": None}
        constants["PLANES"] = planes
    return [permute, cut, Launch(kernel, (tiles * row_tiles,), arguments, constants, *tile[3:])], out


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a device the current one, which is where Triton launches."""
    if device.type == "cpu" or _ready().INTERPRETED:
        return nullcontext()
    context: AbstractContextManager[Any] = getattr(torch, device.type).device(device)
    return context


def grouped_linear(
    x: Tensor, blocks: Tensor, scales: Tensor, offsets: Tensor, transpose: bool, operand: str, narrow: bool
) -> Tensor:
    """As `reference.grouped_linear`, which computes what is in float64; offsets are not checked.

    Args:
        x: as there.
        blocks: as there, on the device of `x`.
        scales: as there, on the device of `x`.
        offsets: as there, on the device of `x`.
        transpose: as there.
        operand: as there; "bfloat16" rounds activations to one part.
        narrow: every scale byte is 1 to 128, which saves a multiplication.
    """
    if x.dtype is torch.float64:
        return reference.grouped_linear(x, blocks, scales, offsets, transpose, operand)
    if not x.numel() or not blocks.numel():
        return x.new_zeros(x.shape[0], 2 * blocks.shape[2] if transpose else blocks.shape[1])
    name = family(x.device)
    sizes = (2 * blocks.shape[2], blocks.shape[1])
    config = find_config(name, narrow, x.shape[0] / blocks.shape[0], *sizes, _TILED)
    if config is None:
        return reference.grouped_linear(x, blocks, scales, offsets, transpose, operand)
    if operand == "int8" and not transpose:
        x = reference.round_int8(x)
    parts = 1 if operand == "bfloat16" else 3
    with _on(x.device):
        launches, out = linear_launches(
            x.contiguous(),
            blocks,
            scales,
            offsets,
            transpose,
            config,
            parts=parts,
            narrow=narrow,
            multiply=multiplication(name),
        )
        for launch in launches:
            launch.run()
    return out


def experts_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, first: Projection, second: Projection, activation: Activation, narrow: bool
) -> Tensor:
    """Whole expert MLPs of a batch.

    Args:
        x: float32, bfloat16 or float16 [T, H]. Products are of what `x` has, between the projections of 24, 8 or 16
            bits; sums are float32.
        ids: int64 [T, k]; ids outside 0 to E - 1 contribute nothing.
        weights: float32 [T, k].
        first: of [E, 2 I or I, H].
        second: of [E, H, I].
        activation: between the two.
        narrow: every scale byte of both is 1 to 128.

    Returns:
        [T, H] in the dtype of `x`.
    """
    if not x.numel() or not ids.numel():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    name = family(x.device)
    sizes = (x.shape[1], 2 * second.blocks.shape[2])
    config = find_config(name, narrow, ids.numel() / first.blocks.shape[0], *sizes)
    if config is None or config.route == "dense":
        return dense_experts(x, ids, weights, first, second, activation)
    with _on(x.device):
        launches, out = experts_launches(
            x, ids, weights, first, second, activation, config, narrow=narrow, multiply=multiplication(name)
        )
        for launch in launches:
            launch.run()
    return out


def dense_experts(
    x: Tensor, ids: Tensor, weights: Tensor, first: Projection, second: Projection, activation: Activation
) -> Tensor:
    """One expert at a time, decoded, by torch's own product."""
    slots = routing.plan(ids, first.blocks.shape[0])
    rows = routing.gather(x, slots).float()
    experts = slots.experts.clamp(max=first.blocks.shape[0] - 1)
    for projection in (first, second):
        rows = reference.grouped_linear(rows, *projection[:2], slots.offsets, False, "float32")
        if projection.bias is not None:
            rows += projection.bias[experts]
        if projection is first:
            rows = activation(rows)
    return routing.combine(rows, slots, weights).to(x.dtype)
