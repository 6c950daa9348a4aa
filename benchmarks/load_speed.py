"""How fast a packed checkpoint loads, beside safetensors reading the same bytes.

    OMP_NUM_THREADS=1 python benchmarks/load_speed.py

Quantizes the random Qwen3-MoE of `load_memory.py` (10 layers of 64 experts, 2 GB in bfloat16) once, saves it packed
with a tensor an expert (compressed-tensors, 3,840 tensors) and stacked (hf_mxfp4, 40 tensors), and times three things
in turn, on a warm page cache: `load_file` and a pass over every byte; `load_file` and a copy of every tensor, which is
what reading into memory of one's own costs; and `from_pretrained`, with the same pass over every byte of the model.
The loaded experts are compared with the saved ones before anything is timed. Medians of wall time; the ratios count
(goal: 0.8 of reading). Needs 3 GB of disk.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from common import where
from load_memory import Sizes, write_checkpoint
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hf_mxfp4 import MXFP4Config, assert_packed

REPEATS = 5


def touch(tensors: Iterable[torch.Tensor]) -> None:
    """Reads every byte."""
    for tensor in tensors:
        tensor.detach().contiguous().view(-1).view(torch.uint8).view(torch.int64).max()


def tensors_of(files: list[Path]) -> Iterable[torch.Tensor]:
    """Every tensor of the files, a view of the file."""
    for file in files:
        yield from load_file(file).values()


def seconds(tasks: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median wall time of each task; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(REPEATS):
        for name, task in tasks.items():
            start = time.perf_counter()
            kept = task()
            times[name].append(time.perf_counter() - start)
            del kept
    return {name: statistics.median(values) for name, values in times.items()}


def compare(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Times one layout, once what it loads is what was saved."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert_packed(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    del model
    files = sorted(folder.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files) / 1e6

    def load() -> object:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        touch(loaded.state_dict().values())
        return loaded

    found = seconds(
        {
            "safetensors, read": lambda: touch(tensors_of(files)),
            "safetensors, copied": lambda: [tensor.clone() for tensor in tensors_of(files)],
            "from_pretrained, packed": load,
        }
    )
    print(f"{folder.name}, {size:.1f} MB".ljust(30) + "       s     MB/s  of reading  of copying")
    for name, value in found.items():
        ratios = f"{found['safetensors, read'] / value:11.2f} {found['safetensors, copied'] / value:11.2f}"
        print(f"{name:30}{value:8.3f} {size / value:8.0f} {ratios}")


def main() -> None:
    """Measures and prints."""
    logging.disable_progress_bar()
    print(where())
    with tempfile.TemporaryDirectory() as temporary:
        dense = Path(temporary) / "dense"
        dense.mkdir()
        write_checkpoint(dense, Sizes())
        for layout in ("compressed-tensors", "hf_mxfp4"):
            model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=MXFP4Config(save_format=layout))
            model.save_pretrained(Path(temporary) / layout)
            expected = model.state_dict()
            compare(Path(temporary) / layout, expected)


if __name__ == "__main__":
    main()
