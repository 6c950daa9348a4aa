"""Finds launch configurations of the Triton kernels for a layer by timing candidates on the GPU that is there.

T tokens, k experts a token, E experts, S = T * k slots. Candidates of one route and one BLOCK_TOKENS share how slots
are cut into tiles, so their two projections are timed and chosen apart. What is chosen is compared with the reference
backend before it is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..activations import Activation
from ..backends import triton
from ..backends.reference import Projection
from ..backends.triton import Config, Launch, Tile
from .sides import ALPHA, CLAMPED_SWIGLU, LIMIT, Shape

_LARGEST_ERROR = 1e-2


class Layer(NamedTuple):
    """A layer and a batch for it, on a device: random codes, and scale bytes of 118 to 122."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    first: Projection
    second: Projection
    activation: Activation


def random_layer(shape: Shape, tokens: int, device: torch.device) -> Layer:
    """Makes a layer of a shape and `tokens` bfloat16 tokens for it."""
    generator = torch.Generator(device).manual_seed(0)

    def packed(features: int, width: int) -> Projection:
        size = (shape.num_experts, features, width // 2)
        blocks = torch.randint(256, size, dtype=torch.uint8, device=device, generator=generator)
        size = (*size[:2], width // 32)
        scales = torch.randint(118, 123, size, dtype=torch.uint8, device=device, generator=generator)
        bias = torch.zeros(size[:2], dtype=torch.bfloat16, device=device) if shape.bias else None
        return Projection(blocks, scales, bias)

    inner = shape.intermediate_size
    x = torch.randn(tokens, shape.hidden_size, device=device, generator=generator).bfloat16()
    scores = torch.rand(tokens, shape.num_experts, device=device, generator=generator)
    weights, ids = scores.topk(shape.experts_per_token, dim=-1)
    activation = Activation()
    if shape.activation == CLAMPED_SWIGLU:
        activation = Activation("sigmoid", True, True, ALPHA, LIMIT, up_max=LIMIT, up_add=1.0)
    first = packed(2 * inner if shape.gated else inner, shape.hidden_size)
    return Layer(x, ids, weights, first, packed(shape.hidden_size, inner), activation)


def candidates(tokens_per_expert: float) -> Iterator[tuple[str, Tile]]:
    """Routes and tiles that are worth a try for an average of tokens an expert."""
    if tokens_per_expert <= 1:
        yield from (("rows", Tile(rows, 1, 512, warps, 1)) for rows, warps in product((16, 32), (2, 4)))
    sizes = [size for size in (16, 32, 64, 128) if size <= max(16, 2 * tokens_per_expert)]
    for route, rows, tokens, k in product(("planes", "scaled"), (32, 64, 128), sizes, (64, 128, 256)):
        for warps, stages in product((4, 8), (2, 3, 4)):
            if rows * tokens >= 32 * 16 * warps // 4 and tokens * k <= 128 * 128:
                yield route, Tile(rows, tokens, k, warps, stages)


def tune(
    shape: Shape, tokens: int, device: torch.device, tiles: Iterable[tuple[str, Tile]], show: Callable[[str], None]
) -> dict[str, Any]:
    """Times candidates and chooses.

    Args:
        shape: of the layer.
        tokens: T.
        device: where it runs.
        tiles: routes and tiles to try.
        show: is told of each candidate.

    Returns:
        The entry for the launch table.

    Raises:
        RuntimeError: no candidate ran and was right.
    """
    layer = random_layer(shape, tokens, device)
    multiply = triton.multiplication(triton.family(device))
    slots_per_expert = tokens * shape.experts_per_token / shape.num_experts
    before = triton.find_config(
        triton.family(device), True, slots_per_expert, shape.hidden_size, shape.intermediate_size
    )
    assert before is not None
    times: dict[tuple[str, int], dict[Tile, tuple[float, float, float]]] = {}
    for route, tile in tiles:
        config = Config(route, tile, tile, before.transposed)
        try:
            launches = _launches(layer, config, multiply)
            taken = [_seconds(launch, device) for launch in launches]
        except Exception as error:  # noqa: BLE001  # a GPU without room, a Triton without code: these share no base class
            show(f"{route} {tuple(tile)}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            continue
        times.setdefault((route, tile.block_tokens), {})[tile] = (taken[1], taken[2], taken[0] + taken[3])
        show(f"{route} {tuple(tile)}: {1e6 * taken[1]:.1f} + {1e6 * taken[2]:.1f} us")
    expected = _expected(layer)
    for config in _ranked(times, before.transposed):
        got = _run(layer, config, multiply).double()
        if float((got - expected).norm() / expected.norm()) < _LARGEST_ERROR:
            return _entry(config, slots_per_expert, shape)
        show(f"{config.route} {tuple(config.first)}: wrong result")
    raise RuntimeError(f"no configuration for {tokens} tokens ran and was right on {device}")


def _launches(layer: Layer, config: Config, multiply: str) -> list[Launch]:
    launches, _ = triton.experts_launches(*layer, config, narrow=True, multiply=multiply)
    return launches


def _run(layer: Layer, config: Config, multiply: str) -> Tensor:
    launches, out = triton.experts_launches(*layer, config, narrow=True, multiply=multiply)
    for launch in launches:
        launch.run()
    return out


def _seconds(launch: Launch, device: torch.device, repeats: int = 20) -> float:
    """Median seconds of a launch, by the device's own clock."""
    launch.run()
    taken = []
    for _ in range(repeats if device.type == "cuda" else 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launch.run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            launch.run()
            taken.append(time.perf_counter() - start)
    return float(statistics.median(taken))


def _ranked(times: dict[tuple[str, int], dict[Tile, tuple[float, float, float]]], transposed: Tile) -> list[Config]:
    """The best of each route and BLOCK_TOKENS, the quickest first."""
    ranked = []
    for (route, _), tiles in times.items():
        first, second = (min(tiles, key=lambda tile: tiles[tile][part]) for part in (0, 1))
        total = tiles[first][0] + tiles[second][1] + min(taken[2] for taken in tiles.values())
        ranked.append((total, Config(route, first, second, transposed)))
    return [config for _, config in sorted(ranked, key=lambda pair: pair[0])]


def _expected(layer: Layer) -> Tensor:
    """By the reference backend in float32, as float64 [T, H]."""
    return triton.dense_experts(layer.x.float(), *layer[1:]).double()


def _entry(config: Config, slots_per_expert: float, shape: Shape) -> dict[str, Any]:
    sizes = {"hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size}
    parts = {name: getattr(config, name)._asdict() for name in Config._fields[1:]}
    narrow = {"narrow": True} if config.route == "scaled" else {}
    return {"tokens_per_expert": slots_per_expert, **sizes, "route": config.route, **narrow, **parts}
