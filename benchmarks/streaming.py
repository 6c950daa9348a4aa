"""Decode with a layer's experts on disk: those that the router picks, against the whole layer as accelerate moves it.

    python benchmarks/streaming.py [--experts 128] [--top 8] [--hidden 2048] [--inner 768] [--tokens 64]

One layer of experts is offloaded by `accelerate.disk_offload`. Tokens come one at a time; experts are picked at
random, and with a skew in which few of them take most tokens, as trained routers have it. The slots hold half the
experts. Files are in the page cache on both sides, so that the disk's speed has no part in the ratio.
"""

import argparse
import tempfile
import time

import torch
from accelerate import disk_offload
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_mxfp4 import MXFP4Experts, stream_experts


class Layer(nn.Module):
    """An experts module inside another, as accelerate finds it in a model."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *arguments):
        """As the experts."""
        return self.experts(*arguments)


def make(options):
    """A packed experts module of random bytes."""
    config = Qwen3MoeConfig(
        hidden_size=options.hidden, moe_intermediate_size=options.inner, num_experts=options.experts
    )
    with torch.device("meta"):
        dense = Qwen3MoeExperts(config).to(torch.bfloat16)
    packed = MXFP4Experts(dense, name="experts").to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for proj in packed.projection_names:
        blocks, scales = packed.packed(proj)
        blocks.copy_(torch.randint(256, blocks.shape, dtype=torch.uint8, generator=generator))
        scales.fill_(118)
    return packed


def routes(options, skew):
    """The experts of each token, [1, k]."""
    generator = torch.Generator().manual_seed(1)
    share = torch.arange(1, options.experts + 1, dtype=torch.float64) ** -skew
    return [torch.multinomial(share, options.top, generator=generator)[None] for _ in range(options.tokens)]


def per_token(layer, calls, options):
    """What comes out, and the median and mean time of a token in ms."""
    hidden = torch.randn(1, options.hidden, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    weights = torch.full((1, options.top), 1 / options.top)
    outputs, times = [], []
    with torch.inference_mode():
        for ids in calls:
            start = time.perf_counter()
            outputs.append(layer(hidden, ids, weights))
            times.append(time.perf_counter() - start)
    rest = sorted(times[len(times) // 4 :])  # the first ones fill the slots
    return outputs, 1e3 * rest[len(rest) // 2], 1e3 * sum(rest) / len(rest)


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in {"experts": 128, "top": 8, "hidden": 2048, "inner": 768, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    experts = make(options)
    size = sum(p.numel() for p in experts.parameters())
    print(f"{options.experts} experts, top {options.top}, {size / 1e6:.0f} MB, {torch.get_num_threads()} threads")
    print("routes    side         ms a token: median   mean    ratio of means   read from disk, experts a token")
    for skew in (0.0, 1.0):
        calls = routes(options, skew)
        with tempfile.TemporaryDirectory() as folder:
            layer = Layer(make(options))
            disk_offload(layer, offload_dir=folder, execution_device="cpu")
            whole, *whole_ms = per_token(layer, calls, options)
            stream_experts(layer, cache_bytes=size // 2)
            some, *some_ms = per_token(layer, calls, options)
            hook = layer.experts._hf_hook
        assert all(torch.equal(a, b) for a, b in zip(whole, some, strict=True))
        name = "skewed" if skew else "uniform"
        print(f"{name:9} whole layer        {whole_ms[0]:13.1f} {whole_ms[1]:6.1f}{'':21}{options.experts}")
        ratio = whole_ms[1] / some_ms[1]
        reads = hook.reads / options.tokens
        print(f"{name:9} picked experts     {some_ms[0]:13.1f} {some_ms[1]:6.1f} {ratio:13.1f}{'':7}{reads:.1f}")


if __name__ == "__main__":
    main()
