"""Memory and speed of converting a dense checkpoint on disk to packed experts.

    OMP_NUM_THREADS=1 python benchmarks/convert.py

Writes a random bfloat16 Qwen3-MoE checkpoint of about 2 GB to a temporary folder, as `load_memory.py` does, and
converts it to each dialect named, each time in a process of its own, where a thread samples RssAnon, the memory that is
not a view of a file. Before a figure counts, matrices of one layer are compared with `quantize` of what was written,
and all experts with those of the first dialect, by `verify`.

Prints for each dialect the peak of anonymous memory over that of the interpreter after imports (goal: below 600 MB),
seconds, and bytes of the dense checkpoint a second of CPU time (goal: 100 MB/s on one core). With `--stacked` the dense
file holds one tensor for all experts of a layer. Needs Linux, 4 GB of disk and a minute.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from common import where
from load_memory import Sizes, anonymous_bytes, sampled, write_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file

from hf_mxfp4 import quantize
from hf_mxfp4.convert import convert, verify

PREFIX = "model.layers.1.mlp.experts"
DIALECTS = ("compressed-tensors", "hf_mxfp4", "gguf")


class Figures(NamedTuple):
    """What one conversion took. Bytes are anonymous memory over that of the interpreter after imports."""

    peak_bytes: int
    wall_seconds: float
    cpu_seconds: float


def measure(source: Path, target: Path, dialect: str) -> Figures:
    """Converts in this process, which has done nothing but imports before."""
    before, wall, cpu = anonymous_bytes(), time.perf_counter(), time.process_time()
    with sampled() as peak:
        convert(source, target, dialect, from_dense=True, progress=False)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Figures(peak[0] - before, wall, cpu)


def check(source: Path, target: Path, experts: int) -> None:
    """Asserts that a matrix of each expert of one layer is that in the source, quantized."""
    written, held = load_file(source / "layer-1.safetensors"), {}
    for file in target.glob("*.safetensors"):  # none in a GGUF file, which is compared with the first dialect
        with safe_open(file, framework="pt") as opened:
            held |= {name: opened.get_tensor(name) for name in opened.keys() if PREFIX in name}  # noqa: SIM118
    for e in range(experts if held else 0):
        stack = written.get(f"{PREFIX}.down_proj")
        right = quantize(written[f"{PREFIX}.{e}.down_proj.weight"] if stack is None else stack[e])
        if f"{PREFIX}.down_proj_blocks" in held:
            got = [held[f"{PREFIX}.down_proj_{part}"][e] for part in ("blocks", "scales")]
        else:
            got = [held[f"{PREFIX}.{e}.down_proj.weight_{part}"] for part in ("packed", "scale")]
        assert all(map(torch.equal, got, right)), f"{target}: expert {e} is not what quantize makes of the file"


def main() -> None:
    """Measures and prints; with --convert, the part that runs in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field, default in Sizes._field_defaults.items():
        parser.add_argument(f"--{field}", type=int, default=default)
    parser.add_argument("--to", nargs="+", default=list(DIALECTS), choices=DIALECTS, help="what to convert to")
    parser.add_argument("--stacked", action="store_true", help="a file with one tensor for all experts of a layer")
    parser.add_argument("--convert", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.convert:
        source, target, dialect = args.convert
        print(json.dumps(measure(Path(source), Path(target), dialect)._asdict()))
        return
    sizes = Sizes(*(getattr(args, field) for field in Sizes._fields))
    print(where())
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        (root / "dense").mkdir()
        size = write_checkpoint(root / "dense", sizes, stacked=args.stacked)
        config = json.loads((root / "dense" / "config.json").read_text())
        config["norm_topk_prob"] = True  # GGUF files know no other models of this family
        (root / "dense" / "config.json").write_text(json.dumps(config))
        print(f"dense checkpoint {size / 1e6:.0f} MB, {'stacked' if args.stacked else 'a tensor per expert'}")
        print(f"{'to':20} {'peak MB':>8} {'seconds':>8} {'CPU s':>8} {'MB/s of CPU':>12}")
        first: Path | None = None
        for dialect in args.to:
            target = root / (f"{dialect}.gguf" if dialect == "gguf" else dialect)
            command = [sys.executable, __file__, "--convert", str(root / "dense"), str(target), dialect]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            figures = Figures(**json.loads(output.splitlines()[-1]))
            check(root / "dense", target, sizes.experts)
            first = first or target
            assert verify(first, target, progress=False).difference is None
            speed = size / figures.cpu_seconds / 1e6
            peak, wall, cpu = figures.peak_bytes / 1e6, figures.wall_seconds, figures.cpu_seconds
            print(f"{dialect:20} {peak:8.1f} {wall:8.1f} {cpu:8.1f} {speed:12.0f}")


if __name__ == "__main__":
    main()
