"""Which loads come to this quantizer, and that every other one stays as it was."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.quantizers.auto import AutoHfQuantizer

import hf_mxfp4


@pytest.fixture
def hub_folder(sources, packed_folder, edit_config):
    """A gpt-oss folder as the Hub has them: no marker of ours, the config of the published checkpoints."""
    folder = packed_folder(sources["gpt_oss"])
    dense = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

    def change(config):
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": dense}

    edit_config(folder, change)
    return folder


@pytest.fixture(autouse=True)
def _disabled():
    hf_mxfp4.disable()
    yield
    hf_mxfp4.disable()


def is_packed(model):
    return hf_mxfp4.packed_report(model).packed


def test_gpt_oss_as_published_loads_byte_for_byte_with_the_config(hub_folder, sources, load, packed_of):
    model = AutoModelForCausalLM.from_pretrained(hub_folder, quantization_config=hf_mxfp4.MXFP4Config())
    hf_mxfp4.assert_packed(model)
    from_dense = packed_of(load(sources["gpt_oss"]))
    for name, module in packed_of(model).items():
        for proj in module.projection_names:
            for ours, expected in zip(module.packed(proj), from_dense[name].packed(proj), strict=True):
                assert torch.equal(ours, expected)
    assert {row.source for row in hf_mxfp4.packed_report(model).rows} == {"gpt-oss"}


def test_gpt_oss_without_the_config_is_stock_until_enabled_and_after_disabled(hub_folder):
    assert not is_packed(AutoModelForCausalLM.from_pretrained(hub_folder))
    with hf_mxfp4.enable():
        assert is_packed(AutoModelForCausalLM.from_pretrained(hub_folder))
    assert not is_packed(AutoModelForCausalLM.from_pretrained(hub_folder))
    hf_mxfp4.enable()
    assert is_packed(AutoModelForCausalLM.from_pretrained(hub_folder))
    hf_mxfp4.disable()
    assert not is_packed(AutoModelForCausalLM.from_pretrained(hub_folder))


def test_enable_leaves_stock_configs_and_dense_checkpoints_alone(hub_folder, sources):
    with hf_mxfp4.enable():
        stock = AutoModelForCausalLM.from_pretrained(hub_folder, quantization_config=Mxfp4Config(dequantize=True))
        assert not is_packed(stock)
        assert not is_packed(AutoModelForCausalLM.from_pretrained(sources["mixtral"]))


def test_enabled_compressed_tensors_without_our_marker_loads_packed(sources, packed_folder, edit_config):
    folder = packed_folder(sources["qwen3_moe"])
    edit_config(folder, lambda config: config["quantization_config"].pop("hf_mxfp4"))
    with hf_mxfp4.enable():
        assert is_packed(AutoModelForCausalLM.from_pretrained(folder))
    assert not is_packed(AutoModelForCausalLM.from_pretrained(folder))


def test_a_folder_of_ours_read_with_a_stock_config_is_stock(sources, packed_folder):
    folder = packed_folder(sources["gpt_oss"])
    assert is_packed(AutoModelForCausalLM.from_pretrained(folder))
    stock = AutoModelForCausalLM.from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))
    assert not is_packed(stock)


def test_loading_options_apply_to_a_packed_folder_and_its_rule_stays(sources, packed_folder):
    folder = packed_folder(sources["gpt_oss"], scale_rule="even")
    config = hf_mxfp4.MXFP4Config(backend="reference")
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    used = model.hf_quantizer.quantization_config
    assert (used.scale_rule, used.backend) == ("even", "reference")
    assert {row.reason for row in hf_mxfp4.packed_report(model).rows} == {"asked for by backend"}
    assert config.scale_rule == "mse"  # what the caller passed is not changed
    assert config.to_dict()["quant_method"] == "hf_mxfp4"


@pytest.mark.parametrize("prequantized", [False, True])
def test_a_plain_dictionary_works_as_a_config(sources, packed_folder, prequantized):
    path = packed_folder(sources["gpt_oss"]) if prequantized else sources["gpt_oss"]
    options = {"quant_method": "hf_mxfp4", "backend": "reference"}
    assert is_packed(AutoModelForCausalLM.from_pretrained(path, quantization_config=options))


def test_a_loaded_models_config_object_loads_again(sources, packed_folder):
    folder = packed_folder(sources["qwen3_moe"])
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert is_packed(AutoModelForCausalLM.from_pretrained(folder, config=config))


@pytest.mark.parametrize(
    "code",
    [
        "import hf_mxfp4, transformers",
        "import transformers, hf_mxfp4",
        "import transformers.quantizers.auto; import hf_mxfp4; import hf_mxfp4",
        "import hf_mxfp4, importlib; importlib.reload(hf_mxfp4); importlib.reload(hf_mxfp4.quantizer)",
    ],
)
def test_import_order_and_repetition_do_not_matter(sources, packed_folder, code):
    folder = packed_folder(sources["gpt_oss"])
    code += (
        "\nfrom transformers import AutoModelForCausalLM"
        f"\nhf_mxfp4.assert_packed(AutoModelForCausalLM.from_pretrained({str(folder)!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_wrappers_hand_on_what_is_not_ours():
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": None}
    assert isinstance(AutoHfQuantizer.merge_quantization_configs(stored, None), Mxfp4Config)
    assert AutoHfQuantizer.supports_quant_method({"quant_method": "awq"})
    assert not AutoHfQuantizer.supports_quant_method({"quant_method": "no-such-method"})
    with pytest.raises(ValueError, match="no `quant_method`"):
        AutoHfQuantizer.supports_quant_method({"bits": 4})
