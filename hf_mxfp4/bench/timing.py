"""Interleaved runs of all sides of a layer, and of what the machine itself can do at most.

With one thread, times are process CPU time, which other work on the machine disturbs least; with more, wall time. In
each round every side is timed once, on the same routing, and routings rotate. In a model, a layer's code was run a
moment ago, for the layer before, and its weights were not; so a run of less than 0.1 s comes right after one that is
not timed and, as far as the experts suffice, selects others. Slow sides sit out most rounds. A ratio is the median of
the ratios of runs in the same round.
"""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from .. import backends, pages
from . import ggml
from .sides import Batch, Check, Layer, Shape, Side, packed_side, random_batch, random_layer, stock_sides

OURS = "hf_mxfp4"
ONE_THREAD = "1 thread"
READ, MULTIPLY, LINEAR = "read", "multiply", "linear"
SIDES = (OURS, "reference", "grouped_mm", "batched_mm", "llama.cpp-repack", "llama.cpp")
"""What can be measured. `batched_mm` copies every selected expert's weights, so it stops at 16 tokens."""

_ROUTINGS = 16
_READ_BYTES = 512 << 20
_MULTIPLY_ROUNDS = 1_000_000
_LINEAR_TOKENS = 512
_BATCHED_TOKENS = 16
_FEWEST_ROUNDS = 3
_WARM_UP_BELOW = 0.1


@dataclass(frozen=True)
class LayerOptions:
    """What to measure of a shape.

    Attributes:
        tokens: T of each case.
        threads: of each case.
        sides: of `SIDES`; the first of them is always measured.
        rounds: at most, in a case.
        seconds: that a case should take about.
        backend: of the packed layer.
    """

    tokens: tuple[int, ...] = (1, 4, 8, 16, 64, 128, 256, 512)
    threads: tuple[int, ...] = (1,)
    sides: tuple[str, ...] = SIDES
    rounds: int = 200
    seconds: float = 12.0
    backend: str = "auto"


@dataclass
class Series:
    """The runs of one side in one case.

    Attributes:
        name: of the side.
        seconds: by round.
        work: by round, what a run worked off: bytes for `READ` and for layers, operations for the others.
        error: relative, against float64; None for what computes no layer.
    """

    name: str
    error: float | None = None
    seconds: dict[int, float] = field(default_factory=dict)
    work: dict[int, int] = field(default_factory=dict)

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds.values())

    @property
    def best(self) -> float:
        """Seconds."""
        return min(self.seconds.values())

    @property
    def rates(self) -> list[float]:
        """Work per nanosecond of each round: GB/s or GFLOP/s."""
        return [1e-9 * self.work[number] / taken for number, taken in self.seconds.items()]

    def over(self, other: Series) -> float | None:
        """How many times as long this one takes as another; None if they never ran in the same round."""
        ratios = [taken / other.seconds[number] for number, taken in self.seconds.items() if number in other.seconds]
        return statistics.median(ratios) if ratios else None


@dataclass
class Case:
    """One shape, one number of threads, one T."""

    shape: str
    threads: int
    tokens: int
    operations: int
    series: dict[str, Series]

    def share(self, probe: str, rates: list[float], pick: Callable[[list[float]], float]) -> float | None:
        """The best (`max`) or median rate of the packed layer over the same of a probe; None if it was not probed."""
        return pick(rates) / pick(self.series[probe].rates) if probe in self.series else None

    @property
    def flop_rates(self) -> list[float]:
        """GFLOP/s of the packed layer in each round."""
        return [1e-9 * self.operations / taken for taken in self.series[OURS].seconds.values()]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: medians, bests and ratios, and every run."""
        ours = self.series[OURS]
        gflops = self.flop_rates
        return {
            "shape": self.shape,
            "threads": self.threads,
            "tokens": self.tokens,
            "operations": self.operations,
            "gflops_median": statistics.median(gflops),
            "gflops_best": max(gflops),
            "share_of_read_median": self.share(READ, ours.rates, statistics.median),
            "share_of_read_best": self.share(READ, ours.rates, max),
            "share_of_multiply_median": self.share(MULTIPLY, gflops, statistics.median),
            "share_of_linear_median": self.share(LINEAR, gflops, statistics.median),
            "sides": {
                name: {
                    "us_median": 1e6 * series.median,
                    "us_best": 1e6 * series.best,
                    "rate_median": statistics.median(series.rates),
                    "rate_best": max(series.rates),
                    "error": series.error,
                    "times_ours": series.over(ours),
                    "us": {number: 1e6 * taken for number, taken in series.seconds.items()},
                }
                for name, series in self.series.items()
            },
        }


class Machine:
    """What the machine can do at most: read memory, multiply in registers, and multiply dense bfloat16 matrices."""

    def __init__(self, shape: Shape) -> None:
        """Makes room for what is read and multiplied."""
        self.missing = backends.unavailable("cpu")
        generator = torch.Generator().manual_seed(1)
        rows, width = (2 if shape.gated else 1) * shape.intermediate_size, shape.hidden_size
        self._weight = pages.empty((rows, width), torch.device("cpu"), torch.bfloat16).normal_(generator=generator)
        self._tokens = torch.randn(_LINEAR_TOKENS, width, generator=generator).bfloat16()
        self.linear_name = f"F.linear, bfloat16, {_LINEAR_TOKENS} x {rows} x {width}"
        if self.missing is None:
            self._native: Any = importlib.import_module("hf_mxfp4.backends.cpu")
            self._memory = pages.empty((_READ_BYTES,), torch.device("cpu")).fill_(1)

    def probes(self) -> dict[str, Callable[[], int]]:
        """What can be run, each returning the bytes or operations that it did."""
        found: dict[str, Callable[[], int]] = {LINEAR: self._multiply_matrices}
        if self.missing is None:
            found |= {READ: self._read, MULTIPLY: lambda: int(self._native.probe_multiply(_MULTIPLY_ROUNDS))}
        return found

    def _read(self) -> int:
        self._native.probe_read(self._memory)
        return _READ_BYTES

    def _multiply_matrices(self) -> int:
        F.linear(self._tokens, self._weight)
        return 2 * self._tokens.shape[0] * self._weight.numel()


def measure_layer(
    name: str, shape: Shape, options: LayerOptions, extra: Callable[[Layer], list[Side]] | None = None
) -> Iterator[Case]:
    """Measures one shape, case by case. Every side of every case is verified before it is timed.

    Args:
        name: what cases call the shape.
        shape: its sizes.
        options: what to measure.
        extra: makes further sides of the layer.

    Yields:
        Each case, once it is measured.

    Raises:
        RuntimeError: a side whose results are wrong.
        ValueError: a backend forced for the whole process, or a shape that has no peers.
    """
    if os.environ.get(backends.BACKEND_VARIABLE):
        raise ValueError(
            f"{backends.BACKEND_VARIABLE} is set, which would replace the reference backend; use --backend"
        )
    generator = torch.Generator().manual_seed(0)
    layer = random_layer(shape, generator)
    reference = packed_side(layer, "reference", "reference")
    sides = _sides(layer, options, reference) + (extra(layer) if extra else [])
    machine = Machine(shape)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            check = Check(layer, reference, generator)
            for threads in sorted(options.threads):
                for tokens in options.tokens:
                    series = _Runs(layer, check, machine, threads, tokens, generator).measure(sides, options)
                    yield Case(name, threads, tokens, layer.operations(tokens), series)
    finally:
        torch.set_num_threads(before)
        for side in sides:
            side.close()


def _sides(layer: Layer, options: LayerOptions, reference: Side) -> list[Side]:
    """The packed layer first."""
    sides: list[Side] = [packed_side(layer, OURS, options.backend)]
    if "reference" in options.sides and backends.choose(options.backend, "cpu").name != "reference":
        sides.append(reference)
    limits = {"grouped_mm": None, "batched_mm": _BATCHED_TOKENS}
    sides += stock_sides(layer, {name: limits[name] for name in limits if name in options.sides})
    if ggml.unavailable() is None:
        repacks = {"llama.cpp-repack": True, "llama.cpp": False}
        sides += [ggml.GgmlSide(layer, name, repack=repacks[name]) for name in repacks if name in options.sides]
    return sides


_Run = Callable[[int, bool], tuple[float, int]]
"""Given the round and whether to warm up: the seconds that a run took and what it worked off."""


class _Runs:
    """The runs of one case."""

    def __init__(
        self, layer: Layer, check: Check, machine: Machine, threads: int, tokens: int, generator: torch.Generator
    ) -> None:
        self._check, self._machine, self._threads, self._tokens = check, machine, threads, tokens
        self._batches = [random_batch(layer.shape, tokens, generator) for _ in range(_ROUTINGS)]
        self._before = [_batch_before(layer.shape, batch, generator) for batch in self._batches]
        self._clock = time.process_time if threads == 1 else time.perf_counter
        self._touched = [layer.bytes_touched(batch) for batch in self._batches]

    def measure(self, sides: list[Side], options: LayerOptions) -> dict[str, Series]:
        """Verifies, then times."""
        tokens = self._tokens
        torch.set_num_threads(self._threads)
        fitting = [side for side in sides if side.most_tokens is None or tokens <= side.most_tokens]
        series = {side.name: Series(side.name, self._check.error(side, tokens)) for side in fitting}
        runs: dict[str, _Run] = {side.name: self._layer_run(side) for side in fitting}
        if self._threads > 1:
            series[ONE_THREAD] = Series(ONE_THREAD, series[OURS].error)
            runs[ONE_THREAD] = self._layer_run(fitting[0], threads=1)
        for name, probe in self._machine.probes().items():
            series[name], runs[name] = Series(name), self._probe_run(probe)
        rounds, warm = {}, {}
        for name, run in runs.items():
            taken = run(0, False)[0]
            warm[name] = taken < _WARM_UP_BELOW
            share = options.seconds / len(runs) / max(taken * (1 + warm[name]), 1e-9)
            rounds[name] = int(min(max(share, _FEWEST_ROUNDS), options.rounds))
        total = max(rounds.values())
        names = list(runs)
        for number in range(total):
            for name in names[number % len(names) :] + names[: number % len(names)]:  # each comes first in turn
                if (number + 1) * rounds[name] // total > number * rounds[name] // total:
                    taken, work = runs[name](number, warm[name])
                    series[name].seconds[number], series[name].work[number] = taken, work
        return series

    def _layer_run(self, side: Side, threads: int | None = None) -> _Run:
        def run(number: int, is_warm: bool) -> tuple[float, int]:
            routing = number % len(self._batches)
            with _threads(threads or self._threads):
                if is_warm:
                    side.load(self._before[routing])
                    side.run()
                side.load(self._batches[routing])
                start = self._clock()
                side.run()
                return self._clock() - start, self._touched[routing]

        return run

    def _probe_run(self, probe: Callable[[], int]) -> _Run:
        def run(number: int, is_warm: bool) -> tuple[float, int]:
            del number
            if is_warm:
                probe()
            start = self._clock()
            work = probe()
            return self._clock() - start, work

        return run


def _batch_before(shape: Shape, batch: Batch, generator: torch.Generator) -> Batch:
    """A batch that selects none of the experts that another one does, where that leaves enough of them."""
    before = random_batch(shape, batch.tokens.shape[0], generator)
    others = torch.ones(shape.num_experts).index_fill(0, batch.ids.flatten(), 0).nonzero().flatten()
    if others.numel() < shape.experts_per_token:
        return before
    order = torch.rand(before.ids.shape[0], others.numel(), generator=generator).argsort(dim=-1)
    return before._replace(ids=others[order[:, : shape.experts_per_token]])


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def where(backend: str) -> dict[str, str]:
    """Where and with what figures are taken: date, versions, processor, backend."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    choice = backends.choose(backend, "cpu")
    return {
        "date": f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC",
        "hf_mxfp4": metadata.version("hf_mxfp4"),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "llama-cpp-python": ggml.version() or "not installed",
        "processor": f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores",
        "backend": f"{choice.name}: {choice.reason}",
    }
