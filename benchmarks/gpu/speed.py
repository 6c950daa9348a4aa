"""The blocks ceilings, decode and prefill: what the GPU does at most, and what the kernels do."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from common import relative_error
from hf_mxfp4.configs import ExpertsShape
from torch import nn

from hf_mxfp4 import mxfp4
from hf_mxfp4.backends.triton import Config, Tile
from hf_mxfp4.bench import sides

from .device import GIB, Block, Device, Run
from .layers import Batch, Layer, needed_bytes, shape_batch, shape_layer

DECODE_CONFIGS = {
    "planes": (
        Tile(64, 16, 128, 4, 3), Tile(64, 16, 256, 4, 3), Tile(64, 16, 256, 4, 4), Tile(32, 16, 256, 4, 4),
        Tile(32, 16, 512, 4, 2), Tile(128, 16, 128, 8, 3),
    ),
    "rows": (Tile(16, 1, 512, 4, 1), Tile(32, 1, 512, 4, 1), Tile(32, 1, 1024, 8, 1)),
}  # fmt: skip
PREFILL_CONFIGS = {
    "planes": (
        Tile(128, 64, 128, 8, 2), Tile(128, 128, 64, 8, 3), Tile(128, 128, 128, 8, 2), Tile(64, 128, 128, 4, 2),
        Tile(256, 64, 64, 8, 3),
    ),
}  # fmt: skip
_MOST_CALLS = 64


def ceilings(run: Run, block: Block) -> None:
    """The ceilings block."""
    device = run.device
    source = torch.empty(run.sizes.copied, dtype=torch.uint8, device=device.device).fill_(1)
    target = torch.empty_like(source)
    seconds = device.time(lambda: target.copy_(source))
    run.copy = 2 * source.nbytes / seconds
    block.figure("copy", read_and_written_TBps=run.copy / 1e12, read_alone_TBps=run.copy / 2e12)
    size = run.sizes.matmul
    a, b = (torch.randn(size, size, device=device.device).bfloat16() for _ in range(2))
    run.peak = 2 * size**3 / device.time(lambda: a @ b)
    block.figure(f"bfloat16 product of {size} x {size}", TFLOPs=run.peak / 1e12)


def stock_module(device: Device, given: ExpertsShape, layer: Layer) -> nn.Module:
    """Transformers' own experts on its grouped_mm path, with the layer's weights decoded to bfloat16."""
    with torch.device("meta"):
        module: nn.Module = sides._stock_class(given)(sides._stock_config(given, "grouped_mm"))
    for proj, (blocks, scales, bias) in (("gate_up_proj", layer.first), ("down_proj", layer.second)):
        experts, rows, half = blocks.shape
        turned = given.activation == sides.CLAMPED_SWIGLU
        size = (experts, 2 * half, rows) if turned else (experts, rows, 2 * half)
        weight = torch.empty(size, dtype=torch.bfloat16, device=device.device)
        for e in range(experts):
            own = mxfp4.dequantize(blocks[e], scales[e], torch.bfloat16)
            weight[e] = own.mT if turned else own
        module.register_parameter(proj, nn.Parameter(weight, requires_grad=False))
        if bias is not None:
            module.register_parameter(f"{proj}_bias", nn.Parameter(bias, requires_grad=False))
    return module


def rotation(run: Run, layer: Layer, given: ExpertsShape, tokens: int) -> list[Batch]:
    """As many batches as it takes for the weights that they need to be far more than a cache holds."""
    touched = needed_bytes(layer, shape_batch(run.device, given, tokens))
    cache = 0 if run.device.dry else torch.cuda.get_device_properties(0).L2_cache_size
    calls = run.sizes.sets if run.device.dry else -(-max(GIB, 4 * cache) // touched)
    calls = min(max(calls, run.sizes.sets), _MOST_CALLS)
    return [shape_batch(run.device, given, tokens, seed) for seed in range(calls)]


def captured(device: Device, calls: list[Callable[[], object]]) -> float:
    """Seconds a call, in one CUDA graph of them all."""
    return device.time(device.capture(lambda: [call() for call in calls])) / len(calls)


def compare_stock(run: Run, block: Block, name: str, modules: list[nn.Module], layers: list[Layer], tokens: int) -> Any:
    """Times Transformers' experts on the same batches, after their results were found to agree; seconds or None."""
    batches = rotation(run, layers[0], run.sizes.shapes[name], tokens)
    mixed = [batch._replace(weights=batch.weights.bfloat16()) for batch in batches]
    try:
        got, expected = modules[0](*mixed[0]), layers[0].run(run.device, batches[0])
        off = relative_error(got, expected)
        block.check(f"{name}, T = {tokens}: grouped_mm agrees", off <= 2e-2, f"{off:.1e} apart, 2e-02 allowed")
        calls = [partial(module, *batch) for module, batch in zip(cycle(modules), mixed, strict=False)]
        try:
            return captured(run.device, calls)
        except RuntimeError as error:
            block.note(f"{name}, T = {tokens}: grouped_mm is not captured, timed call by call: {error}"[:300])
            run.device.synchronize()
            return run.device.time(lambda: [call() for call in calls]) / len(calls)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        block.note(f"{name}, T = {tokens}: grouped_mm does not run: {type(error).__name__}: {error}"[:500])
        return None


def time_layer(run: Run, layers: list[Layer], batches: list[Batch], config: Config | None = None) -> float:
    """Seconds a call of our kernels."""
    pairs = zip(cycle(layers), batches, strict=False)
    calls = [partial(layer.run, run.device, batch, config) for layer, batch in pairs]
    return captured(run.device, calls)


def decode_speed(run: Run, block: Block) -> None:
    """The decode block."""
    block.note(f"peer kernels: {peers()}")
    for name, given in run.sizes.shapes.items():
        layers = [shape_layer(run.device, given, seed) for seed in range(run.sizes.sets)]
        modules = [stock_module(run.device, given, layer) for layer in layers[:2]]
        for tokens in run.sizes.decode:
            if run.left() < run.sizes.seconds["models"]:
                block.note(f"{name}: {tokens} tokens and more are left out: no time")
                break
            batches = rotation(run, layers[0], given, tokens)
            layer_seconds = time_layer(run, layers, batches)
            touched = statistics.mean(needed_bytes(layers[0], batch) for batch in batches)
            rate = touched / layer_seconds
            values = {"us": layer_seconds * 1e6, "needed_TBps": rate / 1e12, "of_copy": rate / run.copy}
            seconds = compare_stock(run, block, name, modules, layers, tokens)
            if seconds is not None:
                values |= {"grouped_mm_us": seconds * 1e6, "times_as_fast": seconds / layer_seconds}
            block.figure(f"{name}, T = {tokens}", calls=len(batches), **values)
        best_config(run, block, name, layers, run.sizes.decode[0], DECODE_CONFIGS)
        del layers, modules
        run.device.clear()


def best_config(
    run: Run, block: Block, name: str, layers: list[Layer], tokens: int, table: dict[str, tuple[Tile, ...]]
) -> None:
    """Times other configurations, each found to be right before, and says which is the best."""
    batches = rotation(run, layers[0], run.sizes.shapes[name], tokens)
    expected = layers[0].run(run.device, batches[0])
    found: dict[str, float] = {}
    few = 1 if run.device.dry else None
    for route, tile in ((route, tile) for route, tiles in table.items() for tile in tiles[:few]):
        if run.left() < run.sizes.seconds["models"]:
            block.note(f"{name}: other configurations are left out: no time")
            break
        config, label = Config(route, tile, tile, tile), f"{route} {tuple(tile)}"
        try:
            off = relative_error(layers[0].run(run.device, batches[0], config), expected)
            if not off <= 1e-2:
                block.check(f"{name}, T = {tokens}, {label}", False, f"{off:.1e} from the table's configuration")
                continue
            found[label] = time_layer(run, layers, batches, config)
        except Exception as error:  # noqa: BLE001  # a tile that needs more than this GPU has, say
            block.note(f"{name}, T = {tokens}, {label}: {type(error).__name__}: {error}"[:300])
            continue
        block.figure(f"{name}, T = {tokens}, {label}", us=found[label] * 1e6)
    if found:
        best = min(found, key=found.__getitem__)
        block.figure(f"{name}, T = {tokens}, best", config=best, us=found[best] * 1e6)


def peers() -> str:
    """Kernels of others that could be compared with, and why they are not."""
    reasons = {
        "triton_kernels": "takes weights in a swizzled layout that each of its versions makes in another way",
        "kernels": "fetches its kernels from a network",
    }
    there = [f"{name} importable but not run: {why}" for name, why in reasons.items() if importlib.util.find_spec(name)]
    return "; ".join(there) or "none"


def prefill_speed(run: Run, block: Block) -> None:
    """The prefill block."""
    for name, given in run.sizes.shapes.items():
        layers = [shape_layer(run.device, given, 0)]
        modules = [stock_module(run.device, given, layers[0])]
        work = 2 * given.experts_per_token * given.weights_per_layer // given.num_experts
        for tokens in run.sizes.prefill:
            if run.left() < run.sizes.seconds["models"]:
                block.note(f"{name}: {tokens} tokens and more are left out: no time")
                break
            layer_seconds = time_layer(run, layers, rotation(run, layers[0], given, tokens)[:2])
            rate = work * tokens / layer_seconds
            values = {"us": layer_seconds * 1e6, "TFLOPs": rate / 1e12, "of_peak": rate / run.peak}
            seconds = compare_stock(run, block, name, modules, layers, tokens)
            if seconds is not None:
                values |= {"grouped_mm_us": seconds * 1e6, "times_as_fast": seconds / layer_seconds}
            block.figure(f"{name}, T = {tokens}", **values)
        best_config(run, block, name, layers, run.sizes.prefill[-1] // 2, PREFILL_CONFIGS)
        del layers, modules
        run.device.clear()
