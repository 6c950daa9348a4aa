"""Checkpoints of the same weights in every dialect, laid out byte by byte with numpy from docs/formats.md."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import hf_mxfp4

# One matrix of one expert: (prefix of the experts module, number, name of the matrix), or stacked as gpt-oss has it.
_MATRIX = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight")
_GATE, _UP, _DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
QUANT = {
    "gpt-oss": {"quant_method": "mxfp4"},
    "hf_mxfp4": {"quant_method": "mxfp4", "format": "hf_mxfp4"},
    "vllm": {"quant_method": "mxfp4"},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}},
    },
    "auto-round": {
        "quant_method": "auto-round",
        "packing_format": "auto_round:llm_compressor",
        "bits": 4,
        "group_size": 32,
        "data_type": "mx_fp",
    },
    "quark": {
        "quant_method": "quark",
        "global_quant_config": {
            "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
        },
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "mxfp4"},
    "mimo": {"quant_method": "fp8", "store_dtype": "mxfp4", "mxfp4_block_size": 32, "weight_block_size": [128, 128]},
    "deepseek-v4": {"quant_method": "fp8", "expert_dtype": "fp4", "weight_block_size": [128, 128]},
    "ling": {"quant_method": "fp8", "routed_experts_quant_method": "mxfp4", "weight_block_size": [128, 128]},
    "mlx": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
# Endings and dtypes of codes and scales in dialects of one tensor an expert.
PER_EXPERT = {
    "compressed-tensors": (".weight_packed", torch.uint8, ".weight_scale", torch.uint8),
    "auto-round": (".weight_packed", torch.uint8, ".weight_scale", torch.uint8),
    "quark": (".weight", torch.uint8, ".weight_scale", torch.uint8),
    "modelopt": (".weight", torch.uint8, ".weight_scale", torch.uint8),
    "mimo": (".weight", torch.uint8, ".weight_scale", torch.uint8),
    "deepseek-v4": (".weight", torch.int8, ".scale", torch.float8_e8m0fnu),
    "ling": (".weight", torch.int8, ".weight_scale_inv", torch.uint8),
}
DIALECTS = tuple(QUANT)


def packed_matrices(source):
    """The weights of a dense folder in MXFP4, {experts module: {matrix: (codes [E, N, K/2], scales [E, N, K/32])}},
    the names of matrices by their part (gate, up, down), biases {module: {part: [E, N]}}, and all other tensors."""
    tensors = load_file(Path(source) / "model.safetensors")
    interleaved = json.loads((Path(source) / "config.json").read_text())["model_type"] == "gpt_oss"
    found, names, biases, rest = {}, {}, {}, {}
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name)
        stack = re.fullmatch(r"(.*experts)\.(gate_up_proj|down_proj)(_bias)?", name)
        if match:
            part = next(p for p, n in zip(("gate", "up", "down"), (_GATE, _UP, _DOWN), strict=True) if match[3] in n)
            names[part] = match[3]
            found.setdefault(match[1], {}).setdefault(part, {})[int(match[2])] = tensor
        elif stack and stack[3]:
            parts = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if stack[2] == "gate_up_proj" else {"down": tensor}
            biases.setdefault(stack[1], {}).update({part: bias.contiguous() for part, bias in parts.items()})
        elif stack:
            assert interleaved
            dense = tensor.mT
            parts = {"gate": dense[:, ::2], "up": dense[:, 1::2]} if stack[2] == "gate_up_proj" else {"down": dense}
            names |= {part: f"{part}_proj" for part in parts}
            found.setdefault(stack[1], {}).update({p: dict(enumerate(m)) for p, m in parts.items()})
        else:
            rest[name] = tensor
    packed = {}
    for module, parts in found.items():
        packed[module] = {}
        for part, experts in parts.items():
            codes, scales = zip(*(hf_mxfp4.quantize(experts[e].contiguous()) for e in range(len(experts))), strict=True)
            packed[module][part] = torch.stack(codes), torch.stack(scales)
    return packed, names, biases, rest, interleaved


def join(gate, up, interleaved):
    """Gates and ups [E, I, ...] as one [E, 2 I, ...]."""
    if interleaved:
        return torch.from_numpy(np.stack([gate.float().numpy(), up.float().numpy()], 2)).flatten(1, 2).to(gate.dtype)
    return torch.cat([gate, up], 1)


def lay_out(dialect, source, folder, changes=None):
    """Writes the dense folder `source` in a dialect; `changes` takes the tensors and may change them."""
    packed, names, biases, tensors, interleaved = packed_matrices(source)
    for module, parts in packed.items():
        bias = biases.get(module, {})
        if dialect in PER_EXPERT:
            tensors |= _per_expert(dialect, module, parts, names, bias)
        elif dialect == "mlx":
            tensors |= _mlx(module, parts, bias)
        else:
            tensors |= _stacks(dialect, module, parts, bias, interleaved)
    if changes is not None:
        changes(tensors)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(source) / "config.json").read_text())
    if dialect == "mlx":
        config["quantization"] = QUANT[dialect]
    else:
        config["quantization_config"] = QUANT[dialect]
    (folder / "config.json").write_text(json.dumps(config))
    if (Path(source) / "generation_config.json").exists():
        shutil.copy(Path(source) / "generation_config.json", folder)
    return str(folder)


def _per_expert(dialect, module, parts, names, bias):
    codes_ending, codes_dtype, scales_ending, scales_dtype = PER_EXPERT[dialect]
    tensors = {}
    for part, (codes, scales) in parts.items():
        for e in range(len(codes)):
            base = f"{module}.{e}.{names[part]}"
            tensors[base + codes_ending] = codes[e].clone().view(codes_dtype)
            tensors[base + scales_ending] = scales[e].clone().view(scales_dtype)
            if part in bias:
                tensors[f"{base}.bias"] = bias[part][e].clone()
    return tensors


def _mlx(module, parts, bias):
    owner = module.removesuffix("experts") + "switch_mlp"
    tensors = {f"{owner}.{part}_proj.bias": values for part, values in bias.items()}
    for part, (codes, scales) in parts.items():
        words = np.ascontiguousarray(codes.numpy()).view("<u4")
        tensors[f"{owner}.{part}_proj.weight"] = torch.from_numpy(words)
        tensors[f"{owner}.{part}_proj.scales"] = scales
    return tensors


def _stacks(dialect, module, parts, bias, interleaved):
    stacks = {"down": parts["down"]}
    if "gate" in parts:
        halves = zip(parts["gate"], parts["up"], strict=True)
        stacks["gate_up"] = tuple(join(*pair, interleaved) for pair in halves)
    else:
        stacks["up"] = parts["up"]
    joined = {"down": bias["down"], "gate_up": join(bias["gate"], bias["up"], interleaved)} if bias else {}
    vllm = {"gate_up": "w13", "down": "w2"}
    tensors = {}
    for proj, (codes, scales) in stacks.items():
        base = f"{module}.{vllm[proj]}_weight" if dialect == "vllm" else f"{module}.{proj}_proj"
        codes_ending, scales_ending = ("", "_scale") if dialect == "vllm" else ("_blocks", "_scales")
        tensors[base + codes_ending] = codes.reshape(*scales.shape, 16) if dialect == "gpt-oss" else codes
        tensors[base + scales_ending] = scales
        if proj in joined:
            tensors[base.removesuffix("_weight") + "_bias"] = joined[proj]
    return tensors
