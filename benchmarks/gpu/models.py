"""The block models: a tiny model from a folder, and all experts of a whole one."""

from __future__ import annotations

import tempfile

import torch
from common import relative_error
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from hf_mxfp4 import MXFP4Config

from .correctness import same_bits
from .device import GIB, Block, Device, Run
from .layers import needed_bytes, shape_batch, shape_layer


def models(run: Run, block: Block) -> None:
    """The models block."""
    for dtype in (torch.float32, torch.bfloat16):
        tiny_model(run.device, block, dtype)
    run.device.clear()
    all_layers(run, block)


def tiny_model(device: Device, block: Block, dtype: torch.dtype) -> None:
    """A tiny gpt-oss model from a folder, on the kernels and on the reference backend."""
    config = GptOssConfig(
        num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2, hidden_size=64, intermediate_size=96,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=128, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    prompt = torch.randint(1, 128, (2, 7), device=device.device)
    logits, tokens = {}, {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        dense = GptOssForCausalLM(config).to(dtype)
        for parameter in dense.parameters():
            parameter.normal_(std=0.3)
        dense.save_pretrained(folder)
        for backend in ("triton", "reference"):
            model = GptOssForCausalLM.from_pretrained(
                folder, quantization_config=MXFP4Config(backend=backend), dtype=dtype, device_map={"": device.device},
                attn_implementation="eager",
            )  # fmt: skip
            logits[backend] = model(prompt).logits
            tokens[backend] = model.generate(prompt, max_new_tokens=3, do_sample=False)
    name, limit = f"a tiny gpt-oss, {str(dtype).removeprefix('torch.')}", 1e-4 if dtype is torch.float32 else 3e-2
    off = relative_error(*logits.values())
    block.check(f"{name}: logits", off <= limit, f"{off:.1e} from the reference backend, {limit:.0e} allowed")
    same = torch.equal(*tokens.values())
    required = dtype is torch.float32  # in bfloat16 logits tie
    block.check(f"{name}: greedy tokens", same, f"{'equal' if same else 'other'} {tokens['triton'].shape[1]}", required)


def all_layers(run: Run, block: Block) -> None:
    """All layers' experts of a model for one token, one after the other, in one CUDA graph."""
    name, given = next(iter(run.sizes.shapes.items()))
    if not run.device.dry:
        torch.cuda.reset_peak_memory_stats()
        free, needed = torch.cuda.mem_get_info()[0], given.layers * given.weights_per_layer * 17 // 32 + GIB
        if free < needed:
            block.note(f"all layers of {name} are left out: {free / 1e9:.1f} GB are free, {needed / 1e9:.1f} needed")
            return
    layers = [shape_layer(run.device, given, seed) for seed in range(given.layers)]
    batches = [shape_batch(run.device, given, 1, seed) for seed in range(given.layers)]
    outputs: dict[str, Tensor] = {}

    def call() -> None:
        x = batches[0].x
        for layer, batch in zip(layers, batches, strict=True):
            x = layer.run(run.device, batch._replace(x=x))
        outputs["last"] = x

    call()
    eager = outputs["last"].clone()
    replay = run.device.capture(call)
    outputs["last"].zero_()
    replay()
    run.device.synchronize()
    label = f"{name}, experts of {given.layers} layers in one graph"
    block.check(f"{label}: as without one", *same_bits(outputs["last"], eager))
    finite = bool(eager.isfinite().all())
    block.check(f"{label}: finite", finite, "all" if finite else "not all")
    seconds = run.device.time(replay)
    touched = sum(needed_bytes(layer, batch) for layer, batch in zip(layers, batches, strict=True))
    values = {"us": seconds * 1e6, "needed_TBps": touched / seconds / 1e12, "of_copy": touched / seconds / run.copy}
    peak = 0 if run.device.dry else torch.cuda.max_memory_allocated()
    packed = sum(part.nbytes for layer in layers for projection in layer[:2] for part in projection[:2])
    block.figure(label, **values, packed_GB=packed / 1e9, peak_GB=peak / 1e9)
