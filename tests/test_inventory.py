"""`hf-mxfp4 inspect`: inventories, figures of groups and budgets, against numbers worked out here by hand or in numpy.

Sources are the package's demo model laid out in every dialect (3 layers, 8 experts, H = I = 64), tensors made by hand,
and a checkpoint of 496,357 tensors with the names and shapes of Kimi K3, whose data are holes in its files.
"""

import json
import math
import re
import sys
import time

import gguf
import layouts
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hf_mxfp4
from hf_mxfp4 import inventory
from hf_mxfp4.backends import cpu
from hf_mxfp4.cli import main
from hf_mxfp4.formats import CheckpointError
from hf_mxfp4.inventory import kinds, memory
from hf_mxfp4.inventory.tables import size

DEMO_EXPERT_WEIGHTS = 3 * 8 * 3 * 64 * 64
DTYPES = {"BF16": torch.bfloat16, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32}
DTYPES |= {"U32": torch.uint32, "I64": torch.int64}


def take(path):
    return inventory.inventory(inventory.open_source(path))


def shares(found):
    return {(share.kind, share.format): share for share in found.recipe}


def save(folder, tensors, config=None):
    """Writes zeros of {name: (dtype, *shape)}."""
    folder.mkdir(parents=True, exist_ok=True)
    zeros = {name: torch.zeros(shape, dtype=DTYPES[dtype]) for name, (dtype, *shape) in tensors.items()}
    save_file(zeros, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


# --- inventories


@pytest.mark.parametrize("dialect", layouts.DIALECTS)
def test_every_dialect_is_named_and_has_its_experts_in_four_and_a_quarter_bits(dialect, tmp_path):
    path = layouts.lay_out(dialect, hf_mxfp4.demo_model_path(), tmp_path)
    found = take(path)
    stored = load_file(tmp_path / "model.safetensors")
    assert found.dialect == dialect
    assert (found.layers, found.experts_per_layer) == (3, (8,))
    assert found.tensors == len(stored)
    assert found.bytes == sum(tensor.nbytes for tensor in stored.values())
    experts = shares(found)["experts", "MXFP4"]
    assert (experts.weights, experts.bytes) == (DEMO_EXPERT_WEIGHTS, DEMO_EXPERT_WEIGHTS * 17 // 32)
    assert experts.bits_per_weight == 4.25
    assert {(row.part, row.dialect) for row in found.rows if row.kind == "experts"} == {
        ("codes", dialect),
        ("scales", dialect),
    }
    beside = {kind for kind, form in shares(found) if form == "BF16"}
    assert beside == {"router", "attention", "embeddings and head", "norms"}
    assert len(shares(found)) == 5


def test_dense_checkpoint(tmp_path):
    found = take(hf_mxfp4.demo_model_path())
    assert found.dialect is None
    assert (found.layers, found.experts_per_layer) == (3, (8,))
    assert {form for _, form in shares(found)} == {"BF16"}
    assert shares(found)["experts", "BF16"].weights == DEMO_EXPERT_WEIGHTS
    assert shares(found)["experts", "BF16"].bits_per_weight == 16
    assert "not packed" in str(found)


def test_original_gpt_oss_names_have_biases_apart(tmp_path):
    tensors = {
        "block.0.mlp.mlp1_weight.blocks": ("U8", 4, 64, 2, 16),
        "block.0.mlp.mlp1_weight.scales": ("U8", 4, 64, 2),
        "block.0.mlp.mlp1_bias": ("BF16", 4, 64),
        "block.0.mlp.mlp2_weight.blocks": ("U8", 4, 64, 1, 16),
        "block.0.mlp.mlp2_weight.scales": ("U8", 4, 64, 1),
        "block.0.mlp.mlp2_bias": ("BF16", 4, 64),
        "block.0.mlp.gate.weight": ("BF16", 4, 64),
        "block.0.attn.qkv.weight": ("BF16", 192, 64),
        "block.0.attn.norm.scale": ("BF16", 64),
        "unembedding.weight": ("BF16", 32, 64),
    }
    found = take(save(tmp_path, tensors))
    assert (found.dialect, found.layers, found.experts_per_layer) == ("gpt-oss-original", 1, (4,))
    assert shares(found)["experts", "MXFP4"].bits_per_weight == 4.25
    assert shares(found)["experts' biases", "BF16"].weights == 2 * 4 * 64
    assert {kind for kind, _ in shares(found)} == {
        "experts", "experts' biases", "router", "attention", "norms", "embeddings and head",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "codes", "scale"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ".weight", ".weight_scale_2"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            ".weight_packed",
            ".weight_global_scale",
        ),
    ],
)
def test_nvfp4_takes_four_and_a_half_bits_and_the_scales_of_tensors(config, codes, scale, tmp_path):
    tensors = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        base = f"model.layers.0.mlp.experts.0.{name}"
        tensors |= {base + codes: ("U8", 64, 32), f"{base}.weight_scale": ("F8_E4M3", 64, 4), base + scale: ("F32", 1)}
        tensors[f"{base}.input_scale"] = ("F32", 1)
    found = take(save(tmp_path, tensors, {"quantization_config": config}))
    assert found.dialect.startswith("nvfp4")
    experts = shares(found)["experts", "NVFP4"]
    assert experts.weights == 3 * 64 * 64
    assert experts.bits_per_weight == 4.5 + 32 / (64 * 64)
    assert shares(found)["activation scales", "F32"].weights == 0
    assert not inventory.groups(inventory.open_source(tmp_path)).rows


def test_layers_beside_the_experts_are_told_by_what_they_are_in(tmp_path):
    tensors = {
        "model.layers.0.mlp.switch_mlp.up_proj.weight": ("U32", 2, 64, 8),
        "model.layers.0.mlp.switch_mlp.up_proj.scales": ("U8", 2, 64, 2),
        "model.layers.0.self_attn.q_proj.weight": ("U32", 64, 8),
        "model.layers.0.self_attn.q_proj.scales": ("U8", 64, 2),
        "model.layers.0.self_attn.k_proj.weight": ("F8_E4M3", 64, 64),
        "model.layers.0.self_attn.k_proj.weight_scale_inv": ("F32", 1, 1),
        "model.layers.0.mlp.tid2eid": ("I64", 64, 2),
    }
    found = take(save(tmp_path, tensors, {"quantization": layouts.QUANT["mlx"]}))
    assert shares(found)["experts", "MXFP4"].dialect == "mlx"
    assert shares(found)["attention", "MXFP4"].bits_per_weight == 4.25
    assert shares(found)["attention", "FP8"].bytes == 64 * 64 + 4
    known = inventory.budget(found, 1, 1)
    # What is in few bits is decoded to 16, what is neither is held as it is.
    assert known.rest == 2 * 64 * 64 * 2 + 64 * 2 * 8


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("language_model.model.layers.1.block_sparse_moe.experts.7.w1.weight_packed", "experts"),
        ("language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias", "router"),
        ("language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight", "latent projections"),
        ("language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight", "norms"),
        ("language_model.model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", "shared experts"),
        ("language_model.model.layers.1.self_attention_res_proj.weight", "other"),
        ("vision_tower.encoder.blocks.0.attn.wqkv.weight", "other"),
        ("model.layers.3.self_attn.q_norm.weight", "norms"),
        ("model.layers.3.self_attn.sinks", "attention"),
        ("model.layers.3.linear_attn.A_log", "attention"),
        ("model.layers.3.mlp.shared_expert_gate.weight", "shared experts"),
        ("model.layers.3.mlp.router.weight", "router"),
        ("model.layers.3.mlp.gate_proj.weight", "dense MLP"),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", "experts' biases"),
        ("model.layers.3.mlp.experts.down_proj", "experts"),
        ("model.layers.3.self_attn.k_proj.input_scale", "activation scales"),
        ("backbone.layers.3.mixer.experts.4.up_proj.weight", "experts"),
        ("backbone.layers.3.mixer.fc1_latent_proj.weight", "latent projections"),
        ("backbone.layers.3.mixer.in_proj.weight", "attention"),
        ("layers.3.ffn.gate.weight", "router"),
        ("layers.3.ffn.experts.1.w2.scale", "experts"),
        ("transformer.blocks.3.ffn.experts.mlp.v1", "experts"),
        ("embed.weight", "embeddings and head"),
        ("head.weight", "embeddings and head"),
        ("model.norm.weight", "norms"),
        ("blk.3.ffn_gate_exps.weight", "experts"),
        ("blk.3.ffn_gate_exps.bias", "experts' biases"),
        ("blk.3.ffn_gate_inp.weight", "router"),
        ("blk.3.ffn_up_shexp.weight", "shared experts"),
        ("blk.3.attn_norm.weight", "norms"),
        ("blk.3.attn_q.weight", "attention"),
        ("token_embd.weight", "embeddings and head"),
        ("output.weight", "embeddings and head"),
        ("rope_freqs.weight", "other"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kinds.kind_of(name) == kind


# --- GGUF


def write_gguf(path, file_type=None):
    """One layer of four experts [64, 64]: gates in MXFP4, of which zero blocks, and the rest in Q4_K and F32."""
    writer = gguf.GGUFWriter(path, "qwen3moe")
    if file_type is not None:
        writer.add_file_type(file_type)
    for key, value in (("block_count", 1), ("embedding_length", 256), ("expert_used_count", 2)):
        writer.add_uint32(f"qwen3moe.{key}", value)
    for key, value in (("head_count", 4), ("head_count_kv", 2), ("key_length", 64), ("value_length", 64)):
        writer.add_uint32(f"qwen3moe.attention.{key}", value)
    writer.add_uint32("qwen3moe.expert_feed_forward_length", 64)
    blocks = np.random.default_rng(0).integers(0, 256, (4, 64, 8, 17), dtype=np.uint8)
    blocks[0, :3, 0, 1:] = 0x80
    blocks[1, 5, :2, 0] = 255
    kinds_of = gguf.GGMLQuantizationType
    writer.add_tensor("blk.0.ffn_gate_exps.weight", blocks.reshape(4, 64, 136), raw_dtype=kinds_of.MXFP4)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 64, 144), np.uint8), raw_dtype=kinds_of.Q4_K)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((256, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return blocks


def test_gguf_has_its_types_by_kind_and_a_recipe_only_where_the_file_names_one(tmp_path):
    write_gguf(tmp_path / "plain.gguf")
    write_gguf(tmp_path / "named.gguf", file_type=15)
    plain, named = (take(tmp_path / f"{name}.gguf") for name in ("plain", "named"))
    assert named.file_type == "Q4_K_M"
    assert plain.file_type is None
    assert "Q4_K_M" not in str(plain) + json.dumps(plain.to_dict())
    assert "recipe by its name (general.file_type): Q4_K_M" in str(named)
    for found in (plain, named):
        assert (found.layers, found.experts_per_layer) == (1, (4,))
        assert shares(found)["experts", "MXFP4"].bits_per_weight == 4.25
        assert shares(found)["experts", "Q4_K"].bits_per_weight == 4.5
        assert shares(found)["attention", "F32"].weights == 256 * 256


def test_gguf_groups_and_budget(tmp_path):
    blocks = write_gguf(tmp_path / "model.gguf")
    source = inventory.open_source(tmp_path / "model.gguf")
    assert_figures(inventory.groups(source).total, blocks[..., 1:].reshape(-1, 16), blocks[..., 0].reshape(-1))
    known = inventory.budget(take(tmp_path / "model.gguf"), 10, 1)
    weights = 2 * 4 * 64 * 256
    assert (known.payload, known.scales, known.rest) == (weights // 2, weights // 32, 4 * 256 * 256)
    assert known.kv_cache == 10 * 2 * (64 + 64) * 2
    assert known.workspace["triton"] == 2 * 10 * 256 + 20 * (4 * 256 + 2 * 64)


# --- groups


def assert_figures(found, codes, scales):
    """Compares with the codes uint8 [G, 16], two a byte, and scales uint8 [G] that were planted."""
    magnitudes = np.concatenate([codes & 7, codes >> 4 & 7], axis=1)
    assert found.groups == len(scales)
    assert found.zero == (magnitudes.max(1) == 0).sum()
    assert found.saturated == (magnitudes.max(1) == 7).sum()
    assert found.nan == (scales == 255).sum()
    numbers = scales[scales != 255]
    assert (found.low, found.high) == (numbers.min(), numbers.max())


def plant(tensors):
    """Zero groups of both signs, scales of 0, 254 and 255, and any bytes everywhere else."""
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.dtype.itemsize > 1 and tensor.dtype != torch.uint32:
            continue
        flat = tensor.view(torch.uint8).flatten()
        if re.search(r"_scales?(_inv)?$|\.scales?$", name):
            flat[:3] = torch.tensor([0, 254, 255], dtype=torch.uint8)
        else:
            flat.copy_(torch.randint(256, flat.shape, dtype=torch.uint8, generator=generator))
            flat[:64] = torch.tensor([0x00, 0x08, 0x80, 0x88], dtype=torch.uint8).repeat(16)
            flat[64:80] = 0x66  # the largest magnitude is 4
            flat[80:96] = 0x11
            flat[95] = 0xF1
        tensors[name] = flat.view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dialect", ["compressed-tensors", "deepseek-v4", "gpt-oss", "hf_mxfp4", "mlx", "vllm"])
def test_groups_are_counted_as_numpy_counts_them(dialect, tmp_path):
    path = layouts.lay_out(dialect, hf_mxfp4.demo_model_path(), tmp_path, plant)
    source = inventory.open_source(path)
    found = inventory.groups(source)
    stored = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if n in _bytes_of(source)}
    scales = {n for n in stored if re.search(r"_scales?(_inv)?$|\.scales?$", n)}
    flat = {n: t.view(torch.uint8).flatten().numpy() for n, t in stored.items()}
    codes = [flat[n].reshape(-1, 16) for n in stored if n not in scales]
    assert_figures(found.total, np.concatenate(codes), np.concatenate([flat[n] for n in stored if n in scales]))
    assert found.total.nan == len(scales)
    assert found.total.zero >= 4 * len(codes)
    assert (found.total.low, found.total.high) == (0, 254)
    assert found.total.first_nan in stored
    projections = {"gate_proj", "up_proj", "down_proj"}
    assert {row.projection for row in found.rows} == (
        projections if dialect in ("compressed-tensors", "deepseek-v4", "mlx") else {"gate_up_proj", "down_proj"}
    )
    assert "2^-127 to 2^127" in str(found)


def _bytes_of(source):
    return {name for name, info in source.tensors.items() if info.dtype in ("U8", "I8", "F8_E8M0", "U32")}


def test_largest_magnitude_alone_saturates(tmp_path):
    # One matrix of one expert, a row of one group each: all zeros, a single 6, a single -6, all 4s, NaN of -0.0.
    codes = torch.zeros(5, 16, dtype=torch.uint8)
    codes[1, 15], codes[2, 0], codes[3], codes[4] = 0x70, 0x0F, 0x66, 0x88
    scales = torch.tensor([[127], [1], [130], [127], [255]], dtype=torch.uint8)
    base = "model.layers.0.mlp.experts.0.up_proj"
    tensors = {f"{base}.weight_packed": codes, f"{base}.weight_scale": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    (row,) = inventory.groups(inventory.open_source(tmp_path / "model.safetensors")).rows
    assert (row.groups, row.zero, row.saturated, row.nan, row.low, row.high) == (5, 2, 2, 1, 1, 130)
    assert row.first_nan == f"{base}.weight_packed"


def test_dense_checkpoint_has_no_groups():
    found = inventory.groups(inventory.open_source(hf_mxfp4.demo_model_path()))
    assert str(found) == "no groups of MXFP4 weights"


# --- budgets

GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
}


@pytest.mark.parametrize("dialect", ["gpt-oss", "mlx", "dense"])
def test_budget_of_a_small_model(dialect, tmp_path):
    demo = hf_mxfp4.demo_model_path()
    path = demo if dialect == "dense" else layouts.lay_out(dialect, demo, tmp_path)
    found = inventory.budget(take(path), 100, 2)
    rest = sum(t.nbytes for n, t in load_file(f"{demo}/model.safetensors").items() if ".experts." not in n)
    assert (found.payload, found.scales, found.rest) == (DEMO_EXPERT_WEIGHTS // 2, DEMO_EXPERT_WEIGHTS // 32, rest)
    # 3 layers, 2 x 100 tokens, one head of 32 + 32, two bytes
    assert found.kv_cache == 3 * 200 * 64 * 2
    # T = 200, S = 400, H = I = 64
    workspace = {"cpu": 400 * 12 * 64, "triton": 2 * 200 * 64 + 400 * 6 * 64, "reference": 4 * 400 * 4 * 64}
    assert found.workspace == workspace
    known = found.payload + found.scales + rest + found.kv_cache
    assert found.total == {backend: known + space for backend, space in workspace.items()}


def test_budget_of_gpt_oss_20b_by_its_config():
    known = memory.settings(GPT_OSS_20B)
    cache, formula = memory.kv_cache(known, 8192, 1)
    # Every other layer has a window of 128 tokens; 8 heads of 64 + 64 in two bytes are 2048 bytes a token.
    assert cache == 12 * 8192 * 2048 + 12 * 128 * 2048 == 204_472_320
    assert formula == "12 layers of 8,192 tokens and 12 layers of 128 tokens, 8 heads of 64 + 64, 2 bytes"
    space = memory.workspace(known, 8192)
    assert space["triton"] == 2 * 8192 * 2880 + 4 * 8192 * 6 * 2880
    assert space["reference"] == 4 * 4 * 8192 * 4 * 2880
    # 256 MiB have room for the outputs of 5825 tokens, 4 experts each.
    assert space["cpu"] == 4 * 5825 * 12 * 2880
    assert memory.workspace(known, 1)["cpu"] == 4 * 12 * 2880


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # kv_lora_rank 512 and a rotary part of 64 in each of 61 layers
        ({"model_type": "deepseek_v3"}, 2 * 61 * 1000 * (512 + 64)),
        # every fourth of 48 layers attends to all, 2 heads of 256; the others keep 32 states of 128 x 128 in float32
        ({"model_type": "qwen3_next"}, 2 * 12 * 1000 * 2 * 512 + 36 * 32 * 128 * 128 * 4),
        # no default of its own, as for models with code of their own; layers are counted from 1
        (
            {
                "text_config": {
                    "model_type": "no_such_model",
                    "num_hidden_layers": 4,
                    "num_attention_heads": 8,
                    "kv_lora_rank": 512,
                    "qk_rope_head_dim": 64,
                    "linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": [4]},
                    "linear_num_heads": 8,
                    "linear_head_dim": 128,
                }
            },
            2 * 1000 * 576 + 3 * 8 * 128 * 128 * 4,
        ),
        # without head_dim: hidden_size / heads
        ({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}, 2 * 2 * 1000 * 4 * 32),
        ({}, None),
        ({"model_type": "gpt_oss", "num_hidden_layers": "many"}, None),
    ],
)
def test_kv_cache(config, expected):
    assert memory.kv_cache(memory.settings(config), 1000, 1)[0] == expected


def test_room_of_the_native_kernel_is_the_one_that_the_budget_knows():
    assert memory._CPU_ROOM == cpu._ROOM


@pytest.mark.parametrize(("count", "text"), [(999, "999 B"), (1000, "1.000 kB"), (999_999_999, "1.000 GB")])
def test_sizes_in_words(count, text):
    assert size(count) == text


# --- the command


def test_command_prints_tables(tmp_path, capsys):
    path = layouts.lay_out("gpt-oss", hf_mxfp4.demo_model_path(), tmp_path)
    assert main(["inspect", path, "--deep", "--budget", "--context", "100", "--quiet"]) == 0
    out, err = capsys.readouterr()
    for part in ("3 layers with 8 experts each, gpt-oss", "4.25", "gate_up_proj", "KV cache", "total, triton", "0xFF"):
        assert part in out
    assert err == ""


def test_command_gives_json_that_stays(tmp_path, capsys):
    path = layouts.lay_out("mlx", hf_mxfp4.demo_model_path(), tmp_path)
    assert main(["inspect", path, "--json", "--deep", "--budget", "--quiet"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert set(read) == {"inventory", "groups", "budget"}
    assert set(read["inventory"]) == {
        "path", "model_type", "dialect", "file_type", "names_only", "refusal", "layers_with_experts",
        "experts_per_layer", "tensors", "weights", "bytes", "recipe", "rows",
    }  # fmt: skip
    assert read["inventory"]["recipe"][0] == {
        "kind": "experts",
        "format": "MXFP4",
        "dialect": "mlx",
        "tensors": 18,
        "weights": DEMO_EXPERT_WEIGHTS,
        "bytes": DEMO_EXPERT_WEIGHTS * 17 // 32,
        "bits_per_weight": 4.25,
    }
    assert read["groups"]["all"]["groups"] == DEMO_EXPERT_WEIGHTS // 32
    assert set(read["budget"]) == {
        "context", "batch", "payload", "scales", "rest", "kv_cache", "kv_formula", "workspace", "weights", "total",
    }  # fmt: skip


def _truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _lose_a_shard(folder):
    weights = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _lose_scales(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, folder / "model.safetensors")


def _lose_everything(folder):
    (folder / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_truncate, "model.safetensors is no whole safetensors file"),
        (_lose_a_shard, "model-2.safetensors is missing"),
        (_lose_scales, "model.layers.1.mlp.experts.down_proj_scales is missing from the checkpoint"),
        (_lose_everything, "holds no safetensors files"),
    ],
)
def test_what_is_not_whole_is_one_line_and_status_2(harm, message, tmp_path, capsys):
    path = layouts.lay_out("gpt-oss", hf_mxfp4.demo_model_path(), tmp_path)
    harm(tmp_path)
    assert main(["inspect", path]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nothing"], "does not exist"),
        (["{tmp}/text.gguf"], "cannot be read as a GGUF file"),
        (["{demo}", "--budget", "--context", "0"], "context 0 and batch 1"),
        (["{demo}", "--budget", "--batch", "0"], "context 4096 and batch 0"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, tmp_path, capsys):
    (tmp_path / "text.gguf").write_text("not a model")
    places = {"tmp": tmp_path, "demo": hf_mxfp4.demo_model_path()}
    assert main(["inspect", *(argument.format(**places) for argument in arguments)]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


# --- many tensors


def kimi_k3():
    """The names, dtypes and shapes of Kimi K3's language model."""
    matrices = {"w1": (3072, 3584), "w2": (3584, 3072), "w3": (3072, 3584)}
    tensors = {"language_model.model.embed_tokens.weight": ("BF16", 163840, 7168)}
    for layer in range(93):
        prefix = f"language_model.model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = ("BF16", 7168)
        for name in ("self_attention_res_proj", "mlp_res_proj"):
            tensors[f"{prefix}.{name}.weight"] = ("BF16", 1, 7168)
        for name, rows, columns in (("q_a_proj", 1536, 7168), ("kv_b_proj", 24576, 512), ("o_proj", 7168, 12288)):
            tensors[f"{prefix}.self_attn.{name}.weight"] = ("BF16", rows, columns)
        if layer == 0:
            tensors[f"{prefix}.mlp.gate_proj.weight"] = ("BF16", 33792, 7168)
            continue
        prefix += ".block_sparse_moe"
        tensors[f"{prefix}.gate.weight"] = ("BF16", 896, 7168)
        tensors[f"{prefix}.gate.e_score_correction_bias"] = ("F32", 896)
        tensors[f"{prefix}.routed_expert_down_proj.weight"] = ("BF16", 3584, 7168)
        tensors[f"{prefix}.routed_expert_up_proj.weight"] = ("BF16", 7168, 3584)
        tensors[f"{prefix}.routed_expert_norm.weight"] = ("BF16", 3584)
        for name in ("gate_proj", "up_proj", "down_proj"):
            tensors[f"{prefix}.shared_experts.{name}.weight"] = ("BF16", 6144, 7168)
        for expert in range(896):
            for name, (rows, columns) in matrices.items():
                tensors[f"{prefix}.experts.{expert}.{name}.weight_packed"] = ("U8", rows, columns // 2)
                tensors[f"{prefix}.experts.{expert}.{name}.weight_scale"] = ("U8", rows, columns // 32)
    return tensors


KIMI_K3 = {
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "hidden_size": 7168,
        "routed_expert_hidden_size": 3584,
        "moe_intermediate_size": 3072,
        "num_experts_per_token": 16,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "linear_attn_config": {
            "kda_layers": [layer for layer in range(1, 93) if layer % 4],
            "full_attn_layers": [*range(4, 93, 4), 93],
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
        },
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {
                "group_0": {
                    "format": "mxfp4-pack-quantized",
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "float", "group_size": 32},
                }
            },
        },
    },
}


def write_holes(folder, tensors, shards):
    """Safetensors files whose headers are real and whose data are holes, and their index. Returns the bytes of data."""
    names, total, homes = list(tensors), 0, {}
    for shard in range(shards):
        file, header, end = f"model-{shard + 1:05}-of-{shards:05}.safetensors", {}, 0
        for name in names[shard * len(names) // shards : (shard + 1) * len(names) // shards]:
            dtype, *shape = tensors[name]
            start, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        homes.update(dict.fromkeys(header, file))
        total += end
    index = {"metadata": {"total_size": total}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kimi-k3")
    tensors = kimi_k3()
    total = write_holes(folder, tensors, 96)
    (folder / "config.json").write_text(json.dumps(KIMI_K3))
    return folder, len(tensors), total


def test_half_a_million_tensors(large, capsys):
    folder, count, total = large
    start = time.perf_counter()
    assert main(["inspect", str(folder), "--json", "--budget", "--context", "100000"]) == 0
    seconds = time.perf_counter() - start
    read = json.loads(capsys.readouterr().out)
    with capsys.disabled():
        sys.stdout.write(f"\n{count:,} tensors inspected in {seconds:.1f} s\n")
    found, budget = read["inventory"], read["budget"]
    assert (found["tensors"], found["bytes"], found["dialect"]) == (count, total, "compressed-tensors")
    assert (found["layers_with_experts"], found["experts_per_layer"]) == (92, [896])
    experts = next(share for share in found["recipe"] if share["kind"] == "experts")
    # Of the published checkpoint: 247,296 matrices, two tensors each, 17,547,264 bytes for each expert's three.
    assert (experts["tensors"], experts["bytes"]) == (2 * 247_296, 92 * 896 * 17_547_264)
    assert experts["bits_per_weight"] == 4.25
    assert budget["payload"] + budget["scales"] == experts["bytes"]
    assert budget["rest"] == total - experts["bytes"]
    # 24 layers of latent attention; 69 of linear attention, 96 states of 128 x 128
    assert budget["kv_cache"] == 2 * 24 * 100_000 * 576 + 4 * 69 * 96 * 128 * 128
    # T = 100,000, k = 16, H = 3584, I = 3072
    assert budget["workspace"]["triton"] == 2 * 10**5 * 3584 + 16 * 10**5 * (4 * 3584 + 2 * 3072)


def test_index_without_files_is_counted_by_its_names(large, tmp_path):
    folder, count, total = large
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    found = take(tmp_path)
    assert found.names_only
    assert (found.tensors, found.to_dict()["bytes"], found.dialect) == (count, total, "compressed-tensors")
    assert (found.layers, found.experts_per_layer) == (92, (896,))
    assert shares(found)["experts", "MXFP4"].tensors == 2 * 247_296
    assert f"the files are not here: {count:,} tensors by the names in the index" in str(found)


@pytest.mark.parametrize("option", ["--deep", "--budget"])
def test_index_without_files_has_neither_groups_nor_sizes(option, tmp_path, capsys):
    index = {"weight_map": {"model.layers.0.mlp.experts.gate_up_proj_blocks": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["inspect", str(tmp_path), option]) == 2
    assert "an index and not the files that it lists" in capsys.readouterr().err


def test_index_without_files_or_names_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        inventory.open_source(tmp_path)


def test_experts_in_a_format_that_is_not_read_are_listed_with_the_reason(tmp_path):
    tensors = {
        "model.layers.0.mlp.experts.0.up_proj.weight": torch.zeros(64, 128).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": torch.ones(1, 1),
        "model.embed_tokens.weight": torch.zeros(8, 64, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = inventory.inventory(inventory.open_source(tmp_path))
    assert "up_proj.weight is stored as F8_E4M3" in found.refusal
    assert f"not loaded by hf_mxfp4: {found.refusal}" in str(found)
    assert found.tensors == 3
    assert main(["inspect", str(tmp_path)]) == 0
