"""What the benchmarks share: the line that says where a figure was taken, paired timing, and an independent decode.

Figures are process CPU time, which other work on the machine disturbs least, on one thread unless OMP_NUM_THREADS says
otherwise. Calls that are compared take turns, so that what disturbs one disturbs the other.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers
from torch import Tensor

import hf_mxfp4

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def where() -> str:
    """Date, versions, processor, cores and threads, in one line."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    packages = {"torch": torch, "transformers": transformers, "safetensors": safetensors, "hf_mxfp4": hf_mxfp4}
    versions = ", ".join(f"{name} {package.__version__}" for name, package in packages.items())
    return (
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}; {versions}; "
        f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores; {torch.get_num_threads()} thread(s)"
    )


def paired(calls: Mapping[str, Callable[[], Tensor]], check: Callable[..., None], repeats: int) -> dict[str, float]:
    """Median process CPU seconds of each call, the calls taking turns, after one turn that does not count.

    Each call has a forked process of its own, as it would have in use, so that none gets memory that another one's
    big temporaries left behind: whether pages are fresh can decide what a call costs.

    Args:
        calls: by name.
        check: given what each call returns, raises unless it is right. Called once, before anything is timed.
        repeats: turns that count.

    Returns:
        Seconds by name.

    Raises:
        RuntimeError: the check did not pass.
    """
    fork = multiprocessing.get_context("fork")
    checking = fork.Process(target=lambda: check(*(call() for call in calls.values())))
    checking.start()
    checking.join()
    if checking.exitcode:
        raise RuntimeError("nothing was timed, because the check did not pass")
    pipes = {}
    for name, call in calls.items():
        pipes[name], theirs = fork.Pipe()
        fork.Process(target=_run_when_told, args=(call, theirs), daemon=True).start()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, pipe in pipes.items():
            pipe.send("run")
            taken = pipe.recv()
            if turn:
                seconds[name].append(taken)
    for pipe in pipes.values():
        pipe.send("stop")
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def _run_when_told(call: Callable[[], object], pipe: Connection) -> None:
    while pipe.recv() == "run":
        start = time.process_time()
        call()
        pipe.send(time.process_time() - start)


def decode_float64(blocks: Tensor, scales: Tensor) -> np.ndarray:
    """Decodes uint8 [N, K/2] and [N, K/32] to float64 [N, K] in NumPy, sharing no code with the package.

    Bit 3 of a code is the sign, bits 0 to 2 the magnitude; the low half of a byte is the even column; a scale byte s
    stands for 2 ** (s - 127).
    """
    packed, exponents = blocks.numpy(), scales.numpy().astype(np.int32) - 127
    out = np.empty((packed.shape[0], 2 * packed.shape[1]))
    for start in range(0, packed.shape[0], 256):  # a few rows at a time, for little memory
        rows = slice(start, start + 256)
        codes = np.stack([packed[rows] & 15, packed[rows] >> 4], axis=-1).reshape(-1, out.shape[1])
        values = np.where(codes & 8, -1.0, 1.0) * MAGNITUDES[codes & 7]
        out[rows] = np.ldexp(values, np.repeat(exponents[rows], 32, axis=-1))
    return out


def random_packed(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Random codes uint8 [..., N, K/32, 16] for a weight of `shape` [..., N, K], and scale bytes of 118 to 122."""
    *rows, width = shape
    blocks = torch.randint(0, 256, (*rows, width // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 123, (*rows, width // 32), dtype=torch.uint8, generator=generator)
    return blocks, scales


def random_routing(generator: torch.Generator, tokens: int, experts: int, active: int) -> tuple[Tensor, Tensor]:
    """Ids int64 [T, k], all different in a row, and weights float32 [T, k] that add up to 1."""
    ids = torch.rand(tokens, experts, generator=generator).topk(active, dim=-1).indices
    return ids, torch.rand(tokens, active, generator=generator).softmax(dim=-1)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over norm of what was expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())
