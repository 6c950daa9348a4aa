"""The device that is checked, how big everything is, and what the blocks found."""

from __future__ import annotations

import gc
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from hf_mxfp4.configs import ExpertsShape, shape

import hf_mxfp4
from hf_mxfp4.backends import triton

GIB = 1 << 30
_RESERVE = 3.0


class Sizes(NamedTuple):
    """How big everything is: `FULL` on a GPU, `TINY` in a dry run."""

    copied: int
    matmul: int
    bytes: tuple[int, ...]
    width: int
    hidden: int
    experts: tuple[int, int]
    tokens: tuple[int, int]
    shapes: dict[str, ExpertsShape]
    sets: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    seconds: dict[str, float]
    """By block, about what it takes: with less left it is skipped."""


FULL = Sizes(
    copied=4 * GIB, matmul=8192, bytes=tuple(range(256)), width=160, hidden=2880, experts=(32, 8), tokens=(9, 300),
    shapes={name: shape(name) for name in ("gpt-oss-20b", "qwen3-30b-a3b")}, sets=4, decode=(1, 2, 4, 8, 16, 32, 64),
    prefill=(256, 512, 1024, 2048, 4096, 8192),
    seconds={"ceilings": 5, "ahead": 30, "read-back": 15, "accuracy": 20, "decode": 20, "prefill": 15, "models": 20},
)  # fmt: skip
_SMALL = {"layers": 2, "num_experts": 4, "experts_per_token": 2, "hidden_size": 64, "intermediate_size": 32}
TINY = FULL._replace(
    copied=1 << 16, matmul=64, bytes=(1, 254, 255), width=32, hidden=64, experts=(3, 2), tokens=(2, 17),
    shapes={name: given._replace(**_SMALL) for name, given in FULL.shapes.items()}, sets=2, decode=(1, 2),
    prefill=(16,), seconds=dict.fromkeys(FULL.seconds, 0.0),
)  # fmt: skip


class Device:
    """Where all of it runs: a GPU, or the CPU in a dry run, where nothing is captured and clocks are the host's."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.family = triton.family(torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device()))
        self.multiply = triton.multiplication(self.family)

    def synchronize(self) -> None:
        """Waits for all that was started."""
        if not self.dry:
            torch.cuda.synchronize()

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """The call as a CUDA graph, after two calls to warm up."""
        if self.dry:
            return call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
            call()
        torch.cuda.current_stream().wait_stream(stream)
        self.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def time(self, call: Callable[[], object], repeats: int = 15) -> float:
        """Median seconds of a call, after two that do not count."""
        if self.dry:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        call()
        call()
        for start_event, stop_event in events:
            start_event.record()
            call()
            stop_event.record()
        self.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in events) / 1e3

    def clear(self) -> None:
        """Gives back memory that nothing holds."""
        gc.collect()
        if not self.dry:
            torch.cuda.empty_cache()

    def describe(self) -> dict[str, Any]:
        """Names and versions of all that a figure depends on."""
        import triton as package

        def output(*command: str) -> str:
            try:
                done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
            except (OSError, subprocess.SubprocessError):
                return "unknown"
            return done.stdout.strip().partition("\n")[0] if done.returncode == 0 and done.stdout else "unknown"

        about = {"gpu": "none, a dry run", "driver": "none", "cuda": "none"}
        if not self.dry:
            driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
            runtime = torch.version.hip or torch.version.cuda
            about = {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": str(runtime)}
        versions = {p.__name__: p.__version__ for p in (torch, package, transformers, hf_mxfp4)}
        commit, changed = output("git", "rev-parse", "HEAD"), output("git", "status", "--porcelain")
        return {**about, **versions, "family": self.family, "commit": commit, "changed": changed != "unknown"}


class Block:
    """What one block found; everything is printed as it comes."""

    def __init__(self, name: str) -> None:
        self.name, self.seconds, self.status = name, 0.0, "running"
        self.checks: list[dict[str, Any]] = []
        self.figures: list[dict[str, Any]] = []
        self.notes: list[str] = []
        print(f"\n{name}", flush=True)

    def check(self, name: str, ok: bool, detail: str, required: bool = True) -> None:
        """A check; one that is not required is recorded, and fails nothing."""
        self.checks.append({"name": name, "ok": ok, "required": required, "detail": detail})
        print(f"  {'ok  ' if ok else 'FAIL' if required else 'no  '} {name}: {detail}", flush=True)

    def figure(self, name: str, **values: Any) -> None:
        """Figures with one name."""
        rounded = {
            key: value if not isinstance(value, float) else float(f"{value:.4g}") if math.isfinite(value) else None
            for key, value in values.items()
        }
        self.figures.append({"name": name, **rounded})
        print(f"  {name}: " + ", ".join(f"{key} {value}" for key, value in rounded.items()), flush=True)

    def note(self, text: str) -> None:
        """Something that a reader of the figures should know."""
        self.notes.append(text)
        print(f"  {text}", flush=True)

    def close(self) -> None:
        """Settles the status."""
        if self.status == "running":
            self.status = "passed" if all(c["ok"] for c in self.checks if c["required"]) else "failed"


class Run:
    """The device, the sizes, the time that is left, and what all blocks found."""

    def __init__(self, device: Device, sizes: Sizes, seconds: float, path: Path | None) -> None:
        self.device, self.sizes, self.path = device, sizes, path
        self.where = device.describe()
        self.stop = time.monotonic() + seconds
        self.copy, self.peak = math.nan, math.nan  # bytes and operations a second that the GPU was seen to do
        self.blocks: list[Block] = []

    def left(self) -> float:
        """Seconds, less some to end in."""
        return self.stop - time.monotonic() - _RESERVE

    def block(self, name: str, body: Callable[[Run, Block], None]) -> Block:
        """Runs a block, or skips it, and writes the file."""
        block, start = Block(name), time.monotonic()
        self.blocks.append(block)
        if self.left() < self.sizes.seconds[name]:
            block.status = "skipped"
            block.note(f"skipped: {max(self.left(), 0):.0f} s are left, it takes {self.sizes.seconds[name]:.0f}")
        else:
            try:
                body(self, block)
            except Exception as error:  # noqa: BLE001  # what the other blocks find is not to be lost
                block.status = "error"
                block.note(f"{type(error).__name__}: {error}"[:2000])
        block.close()
        block.seconds = round(time.monotonic() - start, 1)
        print(f"  {block.status}, {block.seconds} s", flush=True)
        self.write()
        self.device.clear()
        return block

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not any(block.status in ("failed", "error") for block in self.blocks)

    def write(self) -> None:
        """Writes the JSON file, whole or not at all."""
        if self.path is not None:
            blocks = {block.name: {k: v for k, v in vars(block).items() if k != "name"} for block in self.blocks}
            found = {"passed": self.passed, "dry_run": self.device.dry, "where": self.where}
            partial = self.path.with_name(self.path.name + ".part")
            partial.write_text(json.dumps({**found, "blocks": blocks}, indent=1))
            partial.replace(self.path)
