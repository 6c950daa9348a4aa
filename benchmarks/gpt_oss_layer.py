"""One synthetic gpt-oss-20b layer at full size: packed on load, checked, timed, saved, and checked again.

    OMP_NUM_THREADS=1 python benchmarks/gpt_oss_layer.py

Writes a one-layer gpt-oss checkpoint in the Hub's layout to a temporary folder (32 experts of 2880 x 2880, 423 MB
packed, random bytes and biases), loads it with `MXFP4Config()`, and asserts that the model holds the bytes that were
written. Runs 1, 8 and 64 tokens through its experts, checked on some tokens against a float64 decode that shares no
code with the package. Saves it and compares the bytes in the file.

Prints sizes; MB/s of load and save, each beside safetensors alone with the same file; and milliseconds a call, beside
the time to read the packed bytes that the call decodes once. Times are of one process on a warm page cache: wall time
for files, process CPU time for calls; medians. The ratios within one run are what counts. Needs 2.5 GB and a minute.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import decode_float64, random_packed, random_routing, relative_error, where
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssForCausalLM
from transformers.utils import logging

from hf_mxfp4 import MXFP4Config, MXFP4Experts, assert_packed, packed_report

EXPERTS, ACTIVE, LIMIT, ALPHA = 32, 4, 7.0, 1.702
LAYER = "model.layers.0.mlp.experts."
PROJECTIONS = ("gate_up_proj", "down_proj")
HUB_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
CHECKED_TOKENS = {1: [0], 8: [3], 64: [0, 41]}
# Tokens in float32 leave sums in float32 as the only difference; bfloat16 rounds the output, 1.7e-3 in this norm.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.6e-3}
REPEATS = 5


def write_checkpoint(folder: Path, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Writes the checkpoint and returns the tensors of its experts by name."""
    config = GptOssConfig(
        num_hidden_layers=1, num_local_experts=EXPERTS, num_experts_per_tok=ACTIVE, hidden_size=width,
        intermediate_size=width, vocab_size=256, pad_token_id=0, dtype="bfloat16", architectures=["GptOssForCausalLM"],
    )  # fmt: skip
    experts: dict[str, Tensor] = {}
    for proj, rows in zip(PROJECTIONS, (2 * width, width), strict=True):
        blocks, scales = random_packed(generator, EXPERTS, rows, width)
        bias = torch.randn(EXPERTS, rows, generator=generator).mul_(0.1).bfloat16()
        experts |= {f"{LAYER}{proj}_blocks": blocks, f"{LAYER}{proj}_scales": scales, f"{LAYER}{proj}_bias": bias}
    with torch.device("meta"):
        shapes = GptOssForCausalLM(config).state_dict()
    rest = {
        name: torch.randn(tensor.shape, generator=generator).mul_(0.02).bfloat16()
        for name, tensor in shapes.items()
        if not name.startswith(LAYER)
    }
    save_file({**rest, **experts}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "quantization_config": HUB_CONFIG}))
    return experts


def check_bytes(held: dict[str, Tensor], written: dict[str, Tensor]) -> int:
    """Asserts that packed tensors are those that were written; returns how many bytes were compared."""
    for name, tensor in written.items():
        assert torch.equal(held[name].view(tensor.shape), tensor), f"{name} is not what was written"
    return sum(tensor.numel() * tensor.element_size() for tensor in written.values())


def expected_output(written: dict[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """One token [H] through its experts in float64, straight from the tensors written; gpt-oss's activation."""
    total = np.zeros(x.numel())
    for e, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        value = x.double().numpy()
        for proj in PROJECTIONS:
            blocks, scales, bias = (written[f"{LAYER}{proj}_{part}"][e] for part in ("blocks", "scales", "bias"))
            value = decode_float64(blocks.flatten(1), scales) @ value + bias.double().numpy()
            if proj == "gate_up_proj":
                gate, up = np.minimum(value[0::2], LIMIT), np.clip(value[1::2], -LIMIT, LIMIT)
                value = (up + 1) * gate / (1 + np.exp(-ALPHA * gate))
        total += weight * value
    return torch.from_numpy(total)


def medians(calls: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median of each call, the calls taking turns, after one turn that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = clock()
            call()
            if turn:
                taken[name].append(clock() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def touch(tensors: dict[str, Tensor]) -> None:
    """Reads the bytes, so that a load that only maps a file is not taken for one that read it."""
    for tensor in tensors.values():
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        flat[: flat.numel() // 8 * 8].view(torch.int64).max()


def time_calls(experts: MXFP4Experts, written: dict[str, Tensor], generator: torch.Generator, repeats: int) -> None:
    """Checks and times the experts for each number of tokens, and prints a row for each."""
    width = experts.dense_shape("gate_up_proj")[1]
    names = ("tokens", "experts", "MB decoded", "error fp32", "error bf16", "ms", "read ms", "ratio")
    print("".join(f"{name:>12}" for name in names))
    for count, checked in CHECKED_TOKENS.items():
        x = torch.randn(count, width, generator=generator).bfloat16()
        ids, weights = random_routing(generator, count, EXPERTS, ACTIVE)
        expected = torch.stack([expected_output(written, x[t], ids[t], weights[t]) for t in checked])
        errors = {}
        for dtype, limit in TOLERANCE.items():
            errors[dtype] = relative_error(experts(x.to(dtype), ids, weights)[checked], expected)
            assert errors[dtype] < limit, f"{count} tokens in {dtype}: error {errors[dtype]:.1e}"
        hit = ids.unique().tolist()
        parts = [part for proj in PROJECTIONS for part in experts.packed(proj)]
        size = sum(part[0].numel() for part in parts) * len(hit)
        read = [part[e].view(-1).view(torch.int64) for part in parts for e in hit]
        calls = {
            "call": lambda x=x, ids=ids, weights=weights: experts(x, ids, weights),
            "read": lambda read=read: [part.max() for part in read],
        }
        call, floor = medians(calls, repeats, time.process_time).values()
        print(f"{count:12}{len(hit):12}{size / 1e6:12.1f}", end="")
        print(f"{errors[torch.float32]:12.1e}{errors[torch.bfloat16]:12.1e}", end="")
        print(f"{1e3 * call:12.1f}{1e3 * floor:12.1f}{call / floor:12.1f}")


def main() -> None:
    """Writes, loads, checks, runs, saves and checks; prints as it goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2880, help="hidden and intermediate size, a multiple of 64")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    logging.disable_progress_bar()
    print(where())
    with tempfile.TemporaryDirectory() as temporary, torch.inference_mode():
        source, saved, again = (Path(temporary) / name for name in ("source", "saved", "again"))
        source.mkdir()
        again.mkdir()
        written = write_checkpoint(source, args.width, generator)
        file = source / "model.safetensors"

        def load() -> GptOssForCausalLM:
            return AutoModelForCausalLM.from_pretrained(source, quantization_config=MXFP4Config())

        model = load()
        assert_packed(model)
        compared = check_bytes(model.state_dict(), written)
        print(packed_report(model))
        print(f"loaded: {compared:,} bytes of the experts are those written")

        experts = model.model.layers[0].mlp.experts
        time_calls(experts, written, generator, args.repeats)

        model.save_pretrained(saved)
        stored = load_file(saved / "model.safetensors")
        blocks = [name for name in stored if name.endswith("_blocks")]
        assert all(stored[name].ndim == 4 for name in blocks), "blocks are saved as the Hub has them, 4-D"
        print(f"saved: {check_bytes(stored, written):,} bytes of the experts are those written")

        size = file.stat().st_size
        files = {
            "safetensors load_file": lambda: touch(load_file(file)),
            "from_pretrained, packed": lambda: touch(load().state_dict()),
            "safetensors save_file": lambda: save_file(stored, again / "plain.safetensors"),
            "save_pretrained": lambda: model.save_pretrained(again),
        }
        print(f"{f'file of {size / 1e6:.1f} MB':28}{'s':>8}{'MB/s':>9}")
        for name, seconds in medians(files, args.repeats, time.perf_counter).items():
            print(f"{name:28}{seconds:8.3f}{size / 1e6 / seconds:9.0f}")


if __name__ == "__main__":
    main()
