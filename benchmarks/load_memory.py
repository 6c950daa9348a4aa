"""Memory and time of quantizing a bfloat16 model as it loads.

    OMP_NUM_THREADS=1 python benchmarks/load_memory.py

Writes a random bfloat16 Qwen3-MoE checkpoint of about 2 GB to a temporary folder (10 layers of 64 experts, 201 MB of
expert weights a layer, one file a layer) and loads it with `MXFP4Config()` in a process of its own, where a thread
samples RssAnon, the memory that is not a view of a file. Before the figures count, the experts of one layer are
compared with `quantize` of what was written, and all experts are asserted to be packed.

Prints anonymous memory over that of the interpreter after imports, at its peak and in the end; the peak's excess over
the end as a share of one layer's experts in bfloat16 (goal: at most 0.5) and of one expert (at most 1.1); seconds, and
expert weights a second. With `--disk` all layers are mapped to the disk (goal: a peak below 100 MB); with `--stacked`
the file holds one tensor for all experts of a layer. Needs Linux, 2 GB of disk, 1 GB of memory and half a minute.

`measure` is the benchmark with a model of any size, for tests.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM
from transformers.utils import logging

from hf_mxfp4 import MXFP4Config, MXFP4Tensor, assert_packed, packed_report, quantize

SAMPLE_SECONDS = 0.002


class Sizes(NamedTuple):
    """Of the model. The defaults make one layer's experts 201 MB in bfloat16."""

    layers: int = 10
    experts: int = 64
    hidden: int = 1024
    intermediate: int = 512

    @property
    def layer_bytes(self) -> int:
        """One layer's experts in bfloat16."""
        return self.experts * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """One expert in bfloat16."""
        return 2 * 3 * self.hidden * self.intermediate


class Figures(NamedTuple):
    """What one load took. Bytes are anonymous memory over that of the interpreter after imports."""

    final_bytes: int
    peak_bytes: int
    packed_bytes: int
    expert_weights: int
    wall_seconds: float
    cpu_seconds: float
    excess_of_layer: float


def write_checkpoint(folder: Path, sizes: Sizes, *, stacked: bool = False) -> int:
    """Writes the checkpoint, one layer in memory at a time, a tensor per expert or for all; returns its bytes."""
    config = Qwen3MoeConfig(
        num_hidden_layers=sizes.layers, num_experts=sizes.experts, num_experts_per_tok=min(8, sizes.experts),
        hidden_size=sizes.hidden, moe_intermediate_size=sizes.intermediate, intermediate_size=sizes.intermediate,
        num_attention_heads=8, num_key_value_heads=2, head_dim=64, vocab_size=1024, tie_word_embeddings=False,
        dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".experts." not in name}
    for layer in range(sizes.layers):
        prefix, experts = f"model.layers.{layer}.mlp.experts", sizes.experts
        if stacked:
            shapes[f"{prefix}.gate_up_proj"] = (experts, 2 * sizes.intermediate, sizes.hidden)
            shapes[f"{prefix}.down_proj"] = (experts, sizes.hidden, sizes.intermediate)
            continue
        for e in range(experts):
            for proj in ("gate_proj", "up_proj"):
                shapes[f"{prefix}.{e}.{proj}.weight"] = (sizes.intermediate, sizes.hidden)
            shapes[f"{prefix}.{e}.down_proj.weight"] = (sizes.hidden, sizes.intermediate)
    generator = torch.Generator().manual_seed(0)
    files = {name: f"layer-{name.split('.')[2]}" if ".layers." in name else "rest" for name in shapes}
    for file in dict.fromkeys(files.values()):
        tensors = {
            name: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
            for name, shape in shapes.items()
            if files[name] == file
        }
        save_file(tensors, folder / f"{file}.safetensors", metadata={"format": "pt"})
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": {n: f"{file}.safetensors" for n, file in files.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(config.to_json_string(use_diff=False))
    return size


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@contextmanager
def sampled() -> Iterator[list[int]]:
    """A list of one number: the highest anonymous memory seen in the block, and at its end."""
    peak, stop = [anonymous_bytes()], threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()
        peak[0] = max(peak[0], anonymous_bytes())


def load(folder: Path, *, to_disk: bool) -> Figures:
    """Loads the checkpoint in this process, which has done nothing but imports before; layers onto the disk or not."""
    logging.disable_progress_bar()
    options = {}
    if to_disk:
        parts = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        options = {"device_map": parts | {"model.layers": "disk"}, "offload_folder": folder / "offload"}
    before = anonymous_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    with sampled() as peak:
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=MXFP4Config(), **options)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        final = anonymous_bytes()
    assert_packed(model)
    if not to_disk:
        check_layer(model, folder, layer=len(model.model.layers) - 1)
    report = packed_report(model)
    return Figures(final - before, peak[0] - before, report.bytes, report.weights, wall, cpu, 0.0)


def check_layer(model: Qwen3MoeForCausalLM, folder: Path, layer: int) -> None:
    """Asserts that a layer's packed experts are those in the file, quantized one by one."""
    written = load_file(folder / f"layer-{layer}.safetensors")
    prefix, held = f"model.layers.{layer}.mlp.experts.", model.model.layers[layer].mlp.experts
    for proj, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        for e in range(held.num_experts):
            stack = written.get(f"{prefix}{proj}")
            matrices = [written[f"{prefix}{e}.{name}.weight"] for name in names] if stack is None else [stack[e]]
            parts = [quantize(matrix) for matrix in matrices]
            expected = MXFP4Tensor(*(torch.cat(halves) for halves in zip(*parts, strict=True)))
            for got, right in zip(held.packed(proj), expected, strict=True):
                assert torch.equal(got[e], right), f"{prefix}{e}: {proj} is not what quantize makes of the file"


def measure(sizes: Sizes, folder: Path, *, to_disk: bool = False, stacked: bool = False) -> Figures:
    """Writes a model of `sizes` to `folder`, a tensor per expert or for all, and loads it in a process of its own."""
    write_checkpoint(folder, sizes, stacked=stacked)
    command = [sys.executable, __file__, "--load", str(folder), *(["--disk"] if to_disk else [])]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures = Figures(**json.loads(output.splitlines()[-1]))
    return figures._replace(excess_of_layer=(figures.peak_bytes - figures.final_bytes) / sizes.layer_bytes)


def main() -> None:
    """Measures and prints; with --load, the part that runs in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, default in Sizes._field_defaults.items():
        parser.add_argument(f"--{field}", type=int, default=default)
    parser.add_argument("--disk", action="store_true", help="map all layers to the disk")
    parser.add_argument("--stacked", action="store_true", help="a file with one tensor for all experts of a layer")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(load(args.load, to_disk=args.disk)._asdict()))
        return
    from common import where  # here, so that tests can import this file from its path

    sizes = Sizes(*(getattr(args, field) for field in Sizes._fields))
    print(where())
    with tempfile.TemporaryDirectory() as temporary:
        figures = measure(sizes, Path(temporary), to_disk=args.disk, stacked=args.stacked)
    excess = figures.peak_bytes - figures.final_bytes
    layer, speed = sizes.layer_bytes, figures.expert_weights / figures.cpu_seconds
    print(f"one layer's experts, bfloat16 {layer / 1e6:8.1f} MB")
    print(f"all experts, packed           {figures.packed_bytes / 1e6:8.1f} MB")
    print(f"anonymous memory, end         {figures.final_bytes / 1e6:8.1f} MB")
    print(f"anonymous memory, peak        {figures.peak_bytes / 1e6:8.1f} MB")
    print(f"peak over end                 {figures.excess_of_layer:8.3f} of one layer's experts in bfloat16")
    print(f"                              {excess / sizes.expert_bytes:8.3f} of one expert (goal: at most 1.1)")
    print(f"peak over packed              {(figures.peak_bytes - figures.packed_bytes) / layer:8.3f} of the same")
    print(f"time                          {figures.wall_seconds:8.1f} s, {figures.cpu_seconds:.1f} s of CPU")
    print(f"expert weights a second       {speed / 1e6:8.1f} million, by CPU time")


if __name__ == "__main__":
    main()
