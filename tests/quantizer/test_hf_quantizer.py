"""A model loads with experts packed, computes what the packed bytes say, saves, reloads, and becomes stock again."""

import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, pipeline

import hf_mxfp4

# Layout, blocks and scales of expert 0 (or of all) in the first projection, by the names in the file.
ON_DISK = {
    "mixtral": ("compressed-tensors", "model.layers.0.block_sparse_moe.experts.0.w1", [96, 32], [96, 2]),
    "qwen3_moe": ("compressed-tensors", "model.layers.0.mlp.experts.0.gate_proj", [96, 32], [96, 2]),
    "deepseek_v3": ("compressed-tensors", "model.layers.1.mlp.experts.0.gate_proj", [32, 32], [32, 2]),
    "gpt_oss": ("gpt-oss", "model.layers.0.mlp.experts.gate_up_proj", [4, 192, 2, 16], [4, 192, 2]),
    "nemotron_h": ("compressed-tensors", "backbone.layers.1.mixer.experts.0.up_proj", [96, 32], [96, 2]),
}


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


def keys_and_dtypes(folder):
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
    return found


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_logits_are_those_of_stock_experts_decoded_by_ml_dtypes(
    source, load, stock_with_decoded, tokens, implementation
):
    packed = load(source, experts_implementation=implementation)
    stock = stock_with_decoded(source, packed)
    with torch.no_grad():
        assert relative(packed(tokens).logits, stock(tokens).logits) <= 2e-5


def test_greedy_tokens_are_those_of_stock_experts_decoded_by_ml_dtypes(source, load, stock_with_decoded, tokens):
    packed = load(source)
    stock = stock_with_decoded(source, packed)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    expected = stock.generate(tokens, **options)
    assert expected.shape[1] > tokens.shape[1]
    assert torch.equal(packed.generate(tokens, **options), expected)


def test_every_experts_module_is_packed_and_close_to_the_source(source, load, packed_of, decoded):
    model = load(source, dtype=torch.bfloat16)
    stock = dict(AutoModelForCausalLM.from_pretrained(source).named_modules())
    hf_mxfp4.assert_packed(model)
    assert packed_of(model)
    for name, module in packed_of(model).items():
        for proj in module.projection_names:
            packed = module.packed(proj)
            assert packed.blocks.dtype == packed.scales.dtype == torch.uint8
            dense = getattr(stock[name], proj).float()
            dense = dense.mT if module.is_transposed else dense
            assert relative(decoded(*packed), dense) <= 0.125
            expected = hf_mxfp4.quantize(dense)  # bfloat16 is exact in float32, so the bytes are too
            assert torch.equal(packed.blocks, expected.blocks)
            assert torch.equal(packed.scales, expected.scales)


def test_file_has_the_layout_that_others_read(family, source, packed_folder):
    folder = packed_folder(source)
    layout, name, blocks, scales = ON_DISK[family]
    with safe_open(folder / "model.safetensors", "pt") as opened:
        names = [f"{name}_blocks", f"{name}_scales"]
        if layout == "compressed-tensors":
            names = [f"{name}.weight_packed", f"{name}.weight_scale"]
        assert [opened.get_slice(n).get_shape() for n in names] == [blocks, scales]
        assert {opened.get_slice(n).get_dtype() for n in names} == {"U8"}
        dense = [n for n in opened.keys() if "experts." in n and n.endswith("proj.weight") and "shared" not in n]  # noqa: SIM118
    assert not dense
    stored = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert stored["hf_mxfp4"]["format"] == layout
    assert stored["quant_method"] == {"gpt-oss": "mxfp4"}.get(layout, layout)


@pytest.mark.parametrize("passes_config", [False, True], ids=["plain", "with MXFP4Config"])
def test_save_and_reload_give_back_every_byte(source, load, tmp_path, tokens, state, passes_config):
    model = load(source, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(tokens).logits  # a forward pass before the save must change nothing
    saved = state(model)
    model.save_pretrained(tmp_path)
    config = {"quantization_config": hf_mxfp4.MXFP4Config()} if passes_config else {}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **config)
    hf_mxfp4.assert_packed(again)
    assert_same_state(saved, again.state_dict())
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, before)
    again.save_pretrained(tmp_path / "twice")
    first, second = (load_file(f / "model.safetensors") for f in (tmp_path, tmp_path / "twice"))
    assert_same_state(first, second)


def test_save_over_the_folder_it_was_loaded_from(source, packed_folder):
    folder = packed_folder(source)
    before = load_file(folder / "model.safetensors")
    before = {name: tensor.clone() for name, tensor in before.items()}
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)
    assert_same_state(before, load_file(folder / "model.safetensors"))


def test_sharded_save_reloads(source, load, tmp_path, state):
    model = load(source, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_state(state(model), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict())


def test_any_family_saves_stacked_when_asked_and_goes_on_so(source, packed_folder, load, state):
    folder = packed_folder(source, save_format="hf_mxfp4")
    with safe_open(folder / "model.safetensors", "pt") as opened:
        dims = {len(opened.get_slice(n).get_shape()) for n in opened.keys() if n.endswith("_blocks")}  # noqa: SIM118
    assert dims == {3}
    again = AutoModelForCausalLM.from_pretrained(folder)
    again.save_pretrained(folder / "again")
    assert keys_and_dtypes(folder / "again") == keys_and_dtypes(folder)
    hf_mxfp4.assert_packed(again)
    assert_same_state(state(load(source, dtype=torch.bfloat16)), again.state_dict())


def test_dequantized_in_memory_is_stock_and_saves_under_the_sources_names(source, load, tmp_path, tokens):
    model = load(source)
    packed_logits = model(tokens).logits
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.dequantize()
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in stock.named_modules()}
    assert not getattr(model.config, "quantization_config", None)
    assert relative(model(tokens).logits, packed_logits) < 2e-5
    model.save_pretrained(tmp_path / "ours")
    stock.save_pretrained(tmp_path / "stock")
    assert set(keys_and_dtypes(tmp_path / "ours")) == set(keys_and_dtypes(source))
    assert keys_and_dtypes(tmp_path / "ours") == keys_and_dtypes(tmp_path / "stock")
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())


def test_dequantized_at_load_is_stock_with_the_decoded_weights(
    source, packed_folder, load, tmp_path, packed_of, decoded
):
    folder = packed_folder(source)
    packed = packed_of(AutoModelForCausalLM.from_pretrained(folder))
    model = load(folder, config=hf_mxfp4.MXFP4Config(dequantize=True))
    assert not packed_of(model)
    modules = dict(model.named_modules())
    for name, module in packed.items():
        for proj in module.projection_names:
            weight = decoded(*module.packed(proj))
            assert torch.equal(getattr(modules[name], proj), weight.mT if module.is_transposed else weight)
    model.save_pretrained(tmp_path / "dense")
    assert set(keys_and_dtypes(tmp_path / "dense")) == set(keys_and_dtypes(source))
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_dequantize_of_a_dense_checkpoint_is_the_stock_model(source, load, packed_of):
    model = load(source, dtype=torch.bfloat16, config=hf_mxfp4.MXFP4Config(dequantize=True))
    assert not packed_of(model)
    assert_same_state(AutoModelForCausalLM.from_pretrained(source).state_dict(), model.state_dict())


STOCK = """
import sys, torch, transformers
from transformers import AutoModelForCausalLM, Mxfp4Config
folder, out, dequantize = sys.argv[1:]
options = {"quantization_config": Mxfp4Config(dequantize=True)} if dequantize == "yes" else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
assert not any(name.startswith("hf_mxfp4") for name in sys.modules)
torch.save({k: v for k, v in model.state_dict().items() if ".experts." in k and "shared" not in k}, out)
"""


def run_stock(folder, out, dequantize):
    command = [sys.executable, "-c", STOCK, str(folder), str(out), dequantize]
    return subprocess.run(command, capture_output=True, text=True, cwd=out.parent)


def test_stock_transformers_reads_what_is_saved(family, source, packed_folder, tmp_path, decoded, packed_of):
    folder = packed_folder(source)
    result = run_stock(folder, tmp_path / "stock.pt", "yes" if family == "gpt_oss" else "no")
    assert result.returncode == 0, result.stderr
    stock = torch.load(tmp_path / "stock.pt")
    compared = 0
    for name, module in packed_of(AutoModelForCausalLM.from_pretrained(folder)).items():
        for proj in module.projection_names:
            weight = decoded(*module.packed(proj))
            assert torch.equal(stock[f"{name}.{proj}"].float(), weight.mT if module.is_transposed else weight)
            compared += 1
    assert compared


def test_stock_transformers_refuses_what_it_cannot_read(sources, packed_folder, tmp_path):
    result = run_stock(packed_folder(sources["qwen3_moe"], save_format="hf_mxfp4"), tmp_path / "stock.pt", "no")
    assert result.returncode != 0
    assert "issues during automatic conversion" in result.stderr, result.stderr


@pytest.mark.parametrize("dtype", ["auto", None, torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_the_dtype_asked_for_changes_no_packed_byte_and_hides_no_float_copy(sources, load, packed_of, dtype):
    model = load(sources["qwen3_moe"], dtype=dtype)
    reference = load(sources["qwen3_moe"])
    expected = {"auto": torch.bfloat16, None: torch.float32}.get(dtype, dtype)
    assert {p.dtype for p in model.parameters()} <= {expected, torch.uint8} | (
        {torch.bfloat16} if dtype is None else set()
    )
    for name, module in packed_of(model).items():
        assert {p.dtype for p in module.parameters()} == {torch.uint8}
        for proj in module.projection_names:
            assert torch.equal(module.packed(proj).blocks, packed_of(reference)[name].packed(proj).blocks)
            assert torch.equal(module.packed(proj).scales, packed_of(reference)[name].packed(proj).scales)


def test_a_float32_source_is_quantized_from_float32_whatever_dtype_is_asked_for(write, tmp_path, load, packed_of):
    path = write("qwen3_moe", tmp_path / "fp32", dtype=torch.float32)
    tensors = load_file(Path(path) / "model.safetensors")
    module = packed_of(load(path, dtype=torch.bfloat16))["model.layers.0.mlp.experts"]
    expected = hf_mxfp4.quantize(tensors["model.layers.0.mlp.experts.2.down_proj.weight"])
    assert torch.equal(module.packed("down_proj").blocks[2], expected.blocks)


@pytest.mark.parametrize(("rule", "ties"), [("floor", "zero"), ("even", "even"), ("rceil", "away")])
def test_the_configs_rules_reach_the_bytes_and_the_saved_folder(sources, load, packed_of, tmp_path, rule, ties):
    model = load(sources["gpt_oss"], config=hf_mxfp4.MXFP4Config(scale_rule=rule, ties=ties))
    stacked = load_file(Path(sources["gpt_oss"]) / "model.safetensors")["model.layers.1.mlp.experts.down_proj"]
    expected = hf_mxfp4.quantize(stacked.mT, rule, ties)
    packed = packed_of(model)["model.layers.1.mlp.experts"].packed("down_proj")
    assert torch.equal(packed.blocks, expected.blocks)
    assert torch.equal(packed.scales, expected.scales)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).hf_quantizer.quantization_config
    assert (again.scale_rule, again.ties) == (rule, ties)


def test_modules_left_out_stay_dense_through_save_and_reload(source, load, tmp_path, packed_of, state, tokens):
    names = list(packed_of(load(source)))
    if len(names) == 1:
        with pytest.raises(ValueError, match="modules_to_not_convert"):
            load(source, config=hf_mxfp4.MXFP4Config(modules_to_not_convert=names))
        return
    model = load(source, dtype=torch.bfloat16, config=hf_mxfp4.MXFP4Config(modules_to_not_convert=["model.layers.0"]))
    assert list(packed_of(model)) == names[1:]
    dense = dict(AutoModelForCausalLM.from_pretrained(source).named_modules())[names[0]]
    assert_same_state(dense.state_dict(), model.get_submodule(names[0]).state_dict())
    with pytest.raises(hf_mxfp4.NotPackedError, match=names[0]):
        hf_mxfp4.assert_packed(model)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_state(state(model), again.state_dict())
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_modules_left_out_of_a_packed_checkpoint_are_decoded(sources, packed_folder, load, packed_of, decoded):
    for family in ("qwen3_moe", "gpt_oss"):
        folder = packed_folder(sources[family], family)
        whole = packed_of(AutoModelForCausalLM.from_pretrained(folder))["model.layers.0.mlp.experts"]
        config = hf_mxfp4.MXFP4Config(modules_to_not_convert=["model.layers.0"])
        module = load(folder, config=config).get_submodule("model.layers.0.mlp.experts")
        weight = decoded(*whole.packed("down_proj"))
        assert torch.equal(module.down_proj, weight.mT if whole.is_transposed else weight)


@pytest.mark.parametrize("kind", ["deepcopy", "pickle"])
def test_copies_of_a_packed_model_compute_the_same(source, load, tokens, kind):
    model = load(source)
    copied = copy.deepcopy(model) if kind == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert_same_state(model.state_dict(), copied.state_dict())
    assert torch.equal(model(tokens).logits, copied(tokens).logits)
    fresh = load(source, config=hf_mxfp4.MXFP4Config(scale_rule="floor"))
    fresh.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(model(tokens).logits, fresh(tokens).logits)


def test_casting_the_model_leaves_packed_bytes_alone(source, load, packed_of, tokens):
    model = load(source)
    before = {n: m.packed("down_proj").blocks.clone() for n, m in packed_of(model).items()}
    model.to(torch.bfloat16)
    assert model.dtype is torch.bfloat16  # found by looking at parameters, of which some are bytes
    for name, module in packed_of(model).items():
        assert torch.equal(module.packed("down_proj").blocks, before[name])
    assert torch.isfinite(model(tokens).logits).all()


def test_footprint_counts_packed_bytes(source, load):
    model = load(source, dtype=torch.bfloat16)
    assert model.get_memory_footprint() == sum(
        t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())
    )
    report = hf_mxfp4.packed_report(model)
    assert report.bytes == report.weights * 17 // 32
    assert model.get_memory_footprint() < AutoModelForCausalLM.from_pretrained(source).get_memory_footprint()


def test_gradients_reach_the_embedding_and_change_no_packed_byte(source, load, stock_with_decoded, tokens, packed_of):
    model = load(source)
    stock = stock_with_decoded(source, model)
    before = {n: m.packed("down_proj").blocks.clone() for n, m in packed_of(model).items()}
    for m in (model, stock):
        m.train()
        m(tokens, labels=tokens).loss.backward()
    ours, theirs = (m.get_input_embeddings().weight.grad for m in (model, stock))
    assert relative(ours, theirs) < 1e-4
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    for name, module in packed_of(model).items():
        assert torch.equal(module.packed("down_proj").blocks, before[name])


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_device_map_with_cpu_and_disk(source, packed_folder, load, tokens, tmp_path, kind):
    path = source if kind == "dense" else packed_folder(source)
    expected = load(path, dtype=torch.bfloat16)
    layers = [n for n, _ in expected.named_modules() if n.endswith("layers.1")]
    device_map = {n: "cpu" for n, _ in expected.named_children() if n != "model"}
    device_map |= {f"model.{n}": "cpu" for n, _ in expected.model.named_children() if n != "layers"}
    device_map |= {"model.layers.0": "cpu", layers[0]: "disk"}
    model = load(path, dtype=torch.bfloat16, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_pipeline_by_path_generates(sources, packed_folder):
    path = hf_mxfp4.demo_model_path()
    folder = packed_folder(path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((Path(path) / file).read_bytes())
    text = pipeline("text-generation", model=str(folder))("ROMEO.\n", max_new_tokens=20)[0]["generated_text"]
    assert len(text) > len("ROMEO.\n") + 20


def test_base_model_and_head_model_read_each_others_folders(source, packed_folder, load, tmp_path):
    folder = packed_folder(source)
    base = AutoModel.from_pretrained(folder)
    hf_mxfp4.assert_packed(base)
    base.save_pretrained(tmp_path / "base")
    head = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    hf_mxfp4.assert_packed(head)


def test_pytorch_bin_source_is_quantized(source, load, tmp_path, state):
    tensors = load_file(Path(source) / "model.safetensors")
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((Path(source) / "config.json").read_bytes())
    assert_same_state(state(load(source)), load(tmp_path).state_dict())


@pytest.mark.parametrize(
    ("family", "source", "dense"),
    [("gpt_oss", "gpt-oss", "dense, stacked"), ("qwen3_moe", "compressed-tensors", "dense, per expert")],
)
def test_report_says_where_a_loaded_model_came_from(sources, packed_folder, load, family, source, dense):
    made = load(sources[family])
    for row in hf_mxfp4.packed_report(made).rows:
        assert (row.source, row.source_dtypes, row.conversion) == (dense, ("bfloat16",), "quantized: mse, ties even")
    for row in hf_mxfp4.packed_report(AutoModelForCausalLM.from_pretrained(packed_folder(sources[family]))).rows:
        assert (row.source, row.source_dtypes) == (source, ("uint8", "uint8"))
        assert row.conversion == "kept byte for byte"
        assert (row.layout, row.accumulator) == ("uint8 blocks and scales on cpu", "float32")


def test_model_lives_on_when_its_files_are_deleted(sources, packed_folder, tokens):
    for family in ("gpt_oss", "qwen3_moe"):
        folder = packed_folder(sources[family], family)
        model = AutoModelForCausalLM.from_pretrained(folder)
        expected = model(tokens).logits
        shutil.rmtree(folder)
        assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_config_attributes_that_are_none_are_as_those_that_are_absent(sources, packed_folder, edit_config, family):
    folder = packed_folder(sources[family])
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()

    def change(config):
        stored = config["quantization_config"]
        stored |= dict.fromkeys(("modules_to_not_convert", "ignore", "backend", "hf_mxfp4"))

    edit_config(folder, change)
    with hf_mxfp4.enable():
        model = AutoModelForCausalLM.from_pretrained(folder)
    hf_mxfp4.assert_packed(model)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
