"""What cannot be kept packed, or is not what it says, raises one error that names it, and no model comes back."""

import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

import hf_mxfp4
from hf_mxfp4.backends import triton

STACKED = "model.layers.1.mlp.experts.down_proj"
PER_EXPERT = "model.layers.1.mlp.experts.3.down_proj"


def rename(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


def drop(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def put(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name]).contiguous()

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(drop(f"{STACKED}_scales"), f"{STACKED}_scales is missing", id="scales missing"),
        pytest.param(drop(f"{STACKED}_blocks"), f"{STACKED}_blocks is missing", id="codes missing"),
        pytest.param(
            lambda t: {k: v for k, v in t.items() if not k.startswith(STACKED + "_") or k.endswith("bias")},
            f"missing from the checkpoint: {STACKED}_blocks, {STACKED}_scales",
            id="both missing",
        ),
        pytest.param(drop(f"{STACKED}_bias"), f"missing from the checkpoint: {STACKED}_bias", id="bias missing"),
        pytest.param(
            lambda t: [rename(f"{STACKED}_{p}", f"{STACKED}x_{p}")(t) for p in ("blocks", "scales")] and None,
            f"missing from the checkpoint: {STACKED}_blocks",
            id="both renamed",
        ),
        pytest.param(put(f"{STACKED}_scales", lambda t: t[:, :, :1]), "does not fit", id="scales of another width"),
        pytest.param(
            lambda t: (
                [put(f"{STACKED}_{p}", lambda x: x.repeat(8, *[1] * (x.ndim - 1)))(t) for p in ("blocks", "scales")]
                and None
            ),
            r"down_proj_blocks: packed bytes are \[32",
            id="more experts than the config says",
        ),
        pytest.param(put(f"{STACKED}_scales", lambda t: t.float()), "F32", id="scales as floats"),
    ],
)
def test_stacked_checkpoint_with_a_fault(sources, packed_folder, edit, change, message):
    folder = packed_folder(sources["gpt_oss"])
    edit(folder, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(drop(f"{PER_EXPERT}.weight_scale"), f"{PER_EXPERT}.weight_scale is missing", id="scale missing"),
        pytest.param(
            lambda t: {k: v for k, v in t.items() if not k.startswith(PER_EXPERT)},
            "model has 5 experts, the checkpoint has 4 of .*down_proj.*missing of experts 3",
            id="expert missing",
        ),
        pytest.param(
            lambda t: (
                t | {k.replace(".experts.4.", ".experts.5."): v.clone() for k, v in t.items() if ".experts.4." in k}
            ),
            "model has 5 experts, the checkpoint has 6",
            id="one expert too many",
        ),
        pytest.param(
            lambda t: (
                [put(f"{PER_EXPERT}.{p}", lambda x: x[:32])(t) for p in ("weight_packed", "weight_scale")] and None
            ),
            r"experts\.3\.down_proj\.weight_packed: packed bytes are \[32, 48\], the model",
            id="one expert of another shape",
        ),
    ],
)
def test_per_expert_checkpoint_with_a_fault(sources, packed_folder, edit, change, message):
    folder = packed_folder(sources["qwen3_moe"])
    edit(folder, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_dense_weight_that_is_not_finite_is_named(sources, tmp_path, edit, load, value):
    for family, tensor, where in (
        (
            "qwen3_moe",
            "model.layers.1.mlp.experts.3.up_proj.weight",
            r"mlp\.experts\.3\.up_proj\.weight holds .* at index \[7, 5\]",
        ),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj", r"down_proj, expert 2 holds .* at index \[7, 5\]"),
    ):
        folder = shutil.copytree(sources[family], tmp_path / family)

        def change(tensors, tensor=tensor):
            weight = tensors[tensor]
            weight[(7, 5) if weight.ndim == 2 else (2, 5, 7)] = value

        edit(folder, change)
        with pytest.raises(ValueError, match=where):
            load(folder)


def test_dense_expert_missing_is_named(sources, tmp_path, edit, load):
    folder = shutil.copytree(sources["mixtral"], tmp_path / "m")
    edit(folder, drop("model.layers.0.block_sparse_moe.experts.2.w3.weight"))
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"w3.*missing of experts 2"):
        load(folder)


def test_file_cut_short_is_named(sources, packed_folder):
    file = packed_folder(sources["qwen3_moe"]) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"model\.safetensors is no whole safetensors file"):
        AutoModelForCausalLM.from_pretrained(file.parent)


@pytest.mark.parametrize("kept", [-100, 1000, 1], ids=str)
def test_pytorch_file_cut_short_is_named(sources, tmp_path, load, kept):
    folder = shutil.copytree(sources["qwen3_moe"], tmp_path / "bin")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    hf_mxfp4.assert_packed(load(folder))
    file = folder / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"pytorch_model\.bin is cut short"):
        load(folder)


@pytest.mark.parametrize("what", ["hidden_size", "moe_intermediate_size"])
def test_width_that_is_no_multiple_of_32_names_tensor_and_width(write, tmp_path, load, what):
    path = write("qwen3_moe", tmp_path / "w", **{what: 40})
    proj = "gate_up_proj" if what == "hidden_size" else "down_proj"
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.experts\.{proj}: width 40 .* multiple of 32"):
        load(path)


def test_model_without_experts_is_refused(tmp_path, load):
    options = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    AutoModelForCausalLM.from_config(LlamaConfig(**options)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts to keep in MXFP4"):
        load(tmp_path)


def test_checkpoint_of_another_method_is_refused_by_name(sources, tmp_path, edit_config, load):
    folder = shutil.copytree(sources["qwen3_moe"], tmp_path / "fp8")
    edit_config(folder, lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(hf_mxfp4.CheckpointError, match="quantized as fp8"):
        load(folder)


def test_config_that_says_mxfp4_over_dense_files_is_refused(sources, tmp_path, edit_config, load):
    folder = shutil.copytree(sources["gpt_oss"], tmp_path / "says")
    edit_config(folder, lambda config: config.update(quantization_config={"quant_method": "mxfp4"}))
    with pytest.raises(hf_mxfp4.CheckpointError, match="no packed experts"):
        load(folder)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale_rul": "mse"}, TypeError, "no option 'scale_rul'; its options are scale_rule, ties"),
        ({"scale_rule": "ceil"}, ValueError, "scale_rule is 'ceil'; expected one of mse, even, floor, rceil"),
        ({"ties": "up"}, ValueError, "ties is 'up'"),
        ({"backend": "cuda"}, ValueError, "backend is 'cuda'; expected auto, reference"),
        ({"save_format": "gguf"}, ValueError, "save_format is 'gguf'; expected auto, gpt-oss"),
    ],
)
def test_config_with_an_option_that_does_not_exist(options, error, message):
    with pytest.raises(error, match=message):
        hf_mxfp4.MXFP4Config(**options)


def test_backend_that_is_not_here_is_refused_before_loading(sources, load, monkeypatch):
    monkeypatch.setattr(triton.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="backend is 'triton', but Triton is not installed"):
        load(sources["qwen3_moe"], config=hf_mxfp4.MXFP4Config(backend="triton"))


@pytest.mark.parametrize("name", ["gpt-oss-original", "gguf", "nvfp4 (modelopt)"])
def test_save_format_that_is_only_read_is_refused(name):
    with pytest.raises(ValueError, match=r"save_format is .*; expected auto, gpt-oss, hf_mxfp4, vllm"):
        hf_mxfp4.MXFP4Config(save_format=name)


def test_stacks_for_experts_without_a_gate_have_no_name_in_vllm(sources, load):
    with pytest.raises(ValueError, match="save_format='vllm' has no name for up_proj"):
        load(sources["nemotron_h"], config=hf_mxfp4.MXFP4Config(save_format="vllm"))


def test_use_kernels_would_replace_the_forward_and_is_refused(sources, monkeypatch):
    monkeypatch.setattr(
        GptOssMLP, "kernel_layer_name", "MegaBlocksMoeMLP", raising=False
    )  # as the package kernels does
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sources["gpt_oss"]))
    quantizer = hf_mxfp4.MXFP4HfQuantizer(hf_mxfp4.MXFP4Config(), pre_quantized=False)
    with pytest.raises(ValueError, match="use_kernels=True replaces the forward of GptOssMLP"):
        quantizer.preprocess_model(model, use_kernels=True)
    quantizer.preprocess_model(model, use_kernels=False)


def as_e8m0(tensors):
    for name in [n for n in tensors if n.endswith(("_scales", ".weight_scale"))]:
        tensors[name] = tensors[name].view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_scales_stored_as_e8m0_load_as_the_same_bytes(sources, packed_folder, edit, family, state, reads_e8m0):
    folder = packed_folder(sources[family])
    expected = state(AutoModelForCausalLM.from_pretrained(folder))
    edit(folder, as_e8m0)
    with reads_e8m0:
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def test_scale_byte_255_loads_and_is_nan(sources, packed_folder, edit, tokens):
    folder = packed_folder(sources["gpt_oss"])

    def change(tensors):
        tensors[f"{STACKED}_scales"][0, 0, 0] = 255

    edit(folder, change)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert int(model.get_parameter(f"{STACKED}_scales")[0, 0, 0]) == 255
    assert torch.isnan(model.dequantize().get_parameter(STACKED)[0, :32, 0]).all()


def test_compressed_tensors_own_output_of_a_whole_model_loads(sources, tmp_path, edit_config, load, packed_of, decoded):
    """A checkpoint as llm-compressor makes it: attention is packed too, which is decoded; experts stay packed."""
    source = load_file(Path(sources["qwen3_moe"]) / "model.safetensors")
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    assert isinstance(scheme, QuantizationScheme)
    assert isinstance(scheme.weights, QuantizationArgs)
    tensors, scales = {}, {}
    for name, weight in source.items():
        base = name.removesuffix(".weight")
        if not (base.endswith("_proj") and weight.ndim == 2):
            tensors[name] = weight
            continue
        scales[base] = hf_mxfp4.quantize(weight, "even").scales
        scale = scales[base].view(torch.float8_e8m0fnu).float()
        packed = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
        tensors |= {f"{base}.{key}": value for key, value in packed.items()}
    folder = shutil.copytree(sources["qwen3_moe"], tmp_path / "ct")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    group = scheme.model_dump() | {"format": "mxfp4-pack-quantized"}
    stored = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": group},
    }
    stored |= {"ignore": ["lm_head", "re:.*mlp.gate$"], "quantization_status": "compressed"}
    edit_config(folder, lambda config: config.update(quantization_config=stored))

    model = load(folder, dtype=torch.bfloat16)
    hf_mxfp4.assert_packed(model)
    for module_name, experts in packed_of(model).items():
        for e in range(experts.num_experts):
            prefix = f"{module_name}.{e}"
            raw = [
                tuple(tensors[f"{prefix}.{proj}.{key}"].view(torch.uint8) for key in ("weight_packed", "weight_scale"))
                for proj in ("gate_proj", "up_proj", "down_proj")
            ]
            gate_up = torch.cat([decoded(*raw[0]), decoded(*raw[1])])
            assert torch.equal(decoded(*(t[e] for t in experts.packed("gate_up_proj"))), gate_up), prefix
            assert torch.equal(decoded(*(t[e] for t in experts.packed("down_proj"))), decoded(*raw[2])), prefix
    name = "model.layers.0.self_attn.q_proj"
    expected = decoded(tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"].view(torch.uint8))
    assert torch.equal(model.get_parameter(f"{name}.weight").float(), expected)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key


def test_failed_load_leaves_the_callers_config_as_it_was(sources, load):
    config = AutoConfig.from_pretrained(sources["qwen3_moe"])
    asked = hf_mxfp4.MXFP4Config(backend="reference")
    before = dict(asked.__dict__)
    with pytest.raises(ValueError, match="modules_to_not_convert"):
        load(sources["qwen3_moe"], config=hf_mxfp4.MXFP4Config(modules_to_not_convert=["model"]))
    load(sources["qwen3_moe"], config=asked)
    assert asked.__dict__ == before
    assert not hasattr(config, "quantization_config")


# Files that look right and are not: each would give wrong numbers if it were read.


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        pytest.param(
            "qwen3_moe",
            lambda t: {k.replace(".experts.3.", ".experts.7."): v for k, v in t.items()},
            "model has 5 experts, the checkpoint has 5 of .*missing of experts 3",
            id="an expert under another number",
        ),
        pytest.param(
            "qwen3_moe",
            lambda t: {k.replace(".experts.3.gate_proj", ".experts.7.gate_proj"): v for k, v in t.items()},
            "missing of experts 3",
            id="half an expert under another number",
        ),
        pytest.param(
            "gpt_oss",
            put(f"{STACKED}_blocks", lambda t: t.bfloat16()),
            f"{STACKED}_blocks has dtype BF16",
            id="codes as floats",
        ),
        pytest.param(
            "qwen3_moe",
            put("model.layers.0.self_attn.q_proj.weight", lambda t: t.to(torch.float8_e4m3fn)),
            "q_proj.weight is stored as F8_E4M3, a format that this version does not read",
            id="FP8 beside the experts",
        ),
        pytest.param(
            "qwen3_moe",
            lambda t: t | {"model.layers.0.self_attn.q_proj.weight_packed": torch.zeros(64, 32, dtype=torch.uint8)},
            "q_proj.weight_scale is missing",
            id="codes beside the experts without scales",
        ),
    ],
)
def test_packed_checkpoint_that_would_be_read_wrong(sources, packed_folder, edit, family, change, message):
    folder = packed_folder(sources[family])
    edit(folder, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_dense_experts_that_are_no_floats_are_refused(sources, tmp_path, edit, load, family, dtype):
    folder = shutil.copytree(sources[family], tmp_path / "m")
    name = {"qwen3_moe": f"{PER_EXPERT}.weight", "gpt_oss": STACKED}[family]
    edit(folder, put(name, lambda t: (t * 100).to(dtype)))
    with pytest.raises(hf_mxfp4.CheckpointError, match=f"{name} is stored as"):
        load(folder)


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.shared_experts.down_proj.weight"])
def test_missing_neighbour_of_the_experts_is_not_made_up(sources, packed_folder, edit, name):
    folder = packed_folder(sources["deepseek_v3"])
    edit(folder, drop(f"model.layers.1.{name}"))
    with pytest.raises(hf_mxfp4.CheckpointError, match=f"missing from the checkpoint: model.layers.1.{name}"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_tensor_in_two_files_is_named(sources, packed_folder):
    folder = packed_folder(sources["qwen3_moe"])
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="60KB")
    first, second, *_ = sorted(folder.glob("*.safetensors"))
    tensors = load_file(first)
    save_file(tensors | load_file(second), second, metadata={"format": "pt"})
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"^\S+\.\S+ is in .*and in another file"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("fault", ["missing shard", "index names a file that is not there", "shard of another model"])
def test_shards_that_do_not_make_a_checkpoint(sources, packed_folder, fault):
    folder = packed_folder(sources["qwen3_moe"])
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="60KB")
    shards = sorted(folder.glob("*.safetensors"))
    if fault == "missing shard":
        shards[2].unlink()
    elif fault == "shard of another model":
        shutil.copy(Path(hf_mxfp4.demo_model_path()) / "model.safetensors", shards[2])
    else:
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(shards[2].name, "model-00009-of-00002.safetensors"))
    named = {
        "missing shard": rf"{shards[2].name} is missing",
        "index names a file that is not there": r"model-00009-of-00002\.safetensors is missing",
        "shard of another model": rf"model\.embed_tokens\.weight is in .*{shards[2].name} and in another file",
    }
    with pytest.raises(hf_mxfp4.CheckpointError, match=named[fault]):
        AutoModelForCausalLM.from_pretrained(folder)


def test_unknown_format_is_named(sources, packed_folder, edit_config):
    folder = packed_folder(sources["qwen3_moe"])

    def rename(config):
        stored = config["quantization_config"]
        stored["format"] = stored["config_groups"]["group_0"]["format"] = "mxfp5-foo"

    edit_config(folder, rename)
    with pytest.raises(hf_mxfp4.CheckpointError, match="mxfp5-foo"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_group_size_that_is_not_mxfp4s_is_named(sources, packed_folder, edit_config):
    folder = packed_folder(sources["qwen3_moe"])
    edit_config(folder, lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(group_size=16))
    with pytest.raises(hf_mxfp4.CheckpointError, match="'group_size': 16"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_layout_of_a_later_version_is_named_and_a_rule_of_one_is_not_needed(sources, packed_folder, edit_config):
    folder = packed_folder(sources["gpt_oss"])
    edit_config(folder, lambda c: c["quantization_config"]["hf_mxfp4"].update(scale_rule="search"))
    hf_mxfp4.assert_packed(AutoModelForCausalLM.from_pretrained(folder))
    edit_config(folder, lambda c: c["quantization_config"]["hf_mxfp4"].update(format="folded"))
    with pytest.raises(hf_mxfp4.CheckpointError, match="layout is 'folded'"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_scales_two_too_low_by_an_old_writer_are_warned_of(sources, packed_folder, edit_config, warnings_of):
    folder = packed_folder(sources["qwen3_moe"])
    edit_config(folder, lambda c: c["quantization_config"].update(version="0.13.0"))
    AutoModelForCausalLM.from_pretrained(folder)
    assert any("compressed-tensors 0.13.0" in message for message in warnings_of())


def test_pattern_that_matches_nothing_is_warned_of(sources, load, warnings_of):
    load(sources["qwen3_moe"], config=hf_mxfp4.MXFP4Config(modules_to_not_convert=["layer.0"]))
    assert any("'layer.0' in modules_to_not_convert matches no module" in message for message in warnings_of())


@pytest.fixture
def warnings_of(monkeypatch):
    messages = []
    for module in ("config", "hf_quantizer"):
        monkeypatch.setattr(f"hf_mxfp4.quantizer.{module}.logger.warning", messages.append)
    return lambda: messages


def test_options_in_a_config_are_checked_like_options_that_are_passed(sources, load):
    config = AutoConfig.from_pretrained(sources["qwen3_moe"])
    config.quantization_config = {"quant_method": "hf_mxfp4", "dequantise": True}
    with pytest.raises(TypeError, match="no option 'dequantise'"):
        AutoModelForCausalLM.from_pretrained(sources["qwen3_moe"], config=config)
    config.quantization_config = hf_mxfp4.MXFP4Config(backend="reference")
    model = AutoModelForCausalLM.from_pretrained(sources["qwen3_moe"], config=config)
    assert {row.reason for row in hf_mxfp4.packed_report(model).rows} == {"asked for by backend"}


@pytest.mark.parametrize("options", [{"dequantize": "false"}, {"modules_to_not_convert": "lm_head"}, {"requantize": 1}])
def test_option_of_another_type_is_refused(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        hf_mxfp4.MXFP4Config(**options)


def test_float32_bin_file_is_quantized_from_float32(write, tmp_path, load, packed_of):
    path = Path(write("qwen3_moe", tmp_path / "fp32", dtype=torch.float32))
    want = packed_of(load(path))
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    for name, module in packed_of(load(path)).items():
        for proj in module.projection_names:
            assert torch.equal(module.packed(proj).blocks, want[name].packed(proj).blocks)


def test_state_dict_of_other_bytes_is_viewed_and_of_numbers_refused(sources, load, packed_of):
    module = packed_of(load(sources["qwen3_moe"]))["model.layers.0.mlp.experts"]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    viewed = {n: t.view(torch.float8_e8m0fnu) if n.endswith("scales") else t for n, t in before.items()}
    module.load_state_dict(viewed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    with pytest.raises(TypeError, match=r"down_proj_scales have dtype torch\.float32"):
        module.load_state_dict({n: t.float() if n == "down_proj_scales" else t for n, t in before.items()})


def test_saving_in_memory_names_under_another_layouts_config_is_refused(sources, load, tmp_path):
    with pytest.raises(ValueError, match="save_original_format=False"):
        load(sources["qwen3_moe"]).save_pretrained(tmp_path / "out", save_original_format=False)
    assert not (tmp_path / "out").exists()


def test_gpt_oss_layout_for_another_model_is_refused(sources, load):
    with pytest.raises(ValueError, match="save_format='gpt-oss' is for gpt-oss models, not mixtral"):
        load(sources["mixtral"], config=hf_mxfp4.MXFP4Config(save_format="gpt-oss"))
