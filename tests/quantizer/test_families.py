"""Every experts class of Transformers that can be packed, in a tiny model of its family; those that cannot, by name.

Each model is quantized on load, run, saved, reloaded and dequantized. What it computes is compared with the stock
model whose experts ml_dtypes decoded from the packed bytes. The run ends with a table of families and checks.
"""

import importlib
import inspect
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from safetensors.torch import load_file
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import use_experts_implementation

import hf_mxfp4
from hf_mxfp4.families import UNDECORATED, layout_of

# Sizes by whatever name a config has for them. Hidden and intermediate sizes differ where a family lets them.
TEXT = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "sliding_window"), 16),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_d_head", "mamba_d_state", "ssm_state_size", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_head_dim"), 32),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("max_window_layers", "mamba_expand", "expand", "zero_expert_num"), 2),
    **dict.fromkeys(("decoder_sparse_step", "n_groups", "mamba_n_groups", "moe_layer_interval"), 1),
    **dict.fromkeys(("moe_layer_freq", "moe_layer_end_index", "expert_layer_period"), 1),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "vocab_size_per_layer_input"), 256),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "index_topk"), 8),
    **{
        "moe_layer_start_index": 0,
        "expert_layer_offset": 0,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
VISION = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "out_hidden_size", "d_model", "output_dim"), 64),
    **dict.fromkeys(("mlp_dim", "encoder_ffn_dim", "projection_dim", "dec_dim"), 64),
    **dict.fromkeys(("depth", "num_hidden_layers", "num_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "position_embedding_size", "num_position_embeddings"), 16),
    **{
        "patch_size": 14,
        "image_size": 28,
        "vocab_size": 256,
        "spatial_merge_size": 1,
        "deepstack_visual_indexes": [0, 1],
    },
}
MLA = {"num_key_value_heads": 4, "head_dim": 16}
SPARSE = {"mlp_layer_types": ["sparse", "sparse"]}
UNPADDED = {"unpadded_vocab_size": 250}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}


def rope(sections, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}}


# What a family needs beside the sizes: consistent heads, at least one MoE layer, small parts of its own.
EXTRA = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), MLA
    ),
    **dict.fromkeys(("dots3_note_text", "longcat_flash", "mistral_large4_text", "lara_mini", "hy_v4", "kolibri1"), MLA),
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe_text", "granitemoehybrid"), HYBRID),
    **dict.fromkeys(("beam", "deepseek_ocr2_text", "unlimited_ocr_text", "step3p5"), SPARSE),
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text", "inkling_text"), UNPADDED),
    "bailing_hybrid": MLA | HYBRID | SPARSE,
    "kimi_linear": MLA | HYBRID | SPARSE,
    "mistral4": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8, "kv_n_heads": 2}, "max_seq_len": 64}
    | {"ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "ffn_act_fn": {"name": "silu"}}},
    "flint": {"mlp_only_layers": []},
    "gemma4_text": {"enable_moe_block": True},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 0},
    "hy_v4_vl_text": MLA | rope([4, 2, 2]),
    "glm4v_moe_text": rope([1, 1, 2], partial_rotary_factor=0.5),
    "ernie4_5_vl_moe_text": rope([3, 3, 2]) | {"moe_intermediate_size": [64, 32]},
    "glm5_next_text": MLA
    | {"qk_rope_head_dim": 0, "qk_head_dim": 16, "index_topk": 16}
    | {"layer_types": ["linear_attention", "indexed_attention"], **SPARSE},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2}
    | {"indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4},
    "qwen3_omni_moe_talker_text": rope([3, 3, 2]) | {"shared_expert_intermediate_size": 64},
    "muse_spark": {"out_hidden_size": 64, "projector_hidden_size": 64},
    "muse_spark_text": {"moe_hidden_size": 64},
    "muse_spark_audio": {
        "out_hidden_size": 64,
        "depths": (1, 1, 1, 1),
        "hidden_sizes": (16,) * 4,
        "num_hidden_layers": 4,
    },
    "diffusion_gemma": {
        "vision_config": {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 14}
        | {"position_embedding_size": 16}
    },
    "mistral_large4": {
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "head_dim": 16}
        | {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    },
}

FAMILIES = """
afmoe aria_text axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
diffusion_gemma dots1 dots3_note_text ernie4_5_moe ernie4_5_vl_moe exaone_moe flex_olmo flint gemma4_text glm4_moe
glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared
hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl inkling2_loop_text inkling2_text inkling_text jamba kimi_linear kolibri1 laguna
lara_mini lfm2_moe llama4_text longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mistral4
mistral_large4 mixtral muse_spark nemotron_h olmoe openai_privacy_filter phimoe qwen2_moe qwen3_5_moe_text qwen3_moe
qwen3_next qwen3_omni_moe_talker_text qwen3_omni_moe_thinker qwen3_vl_moe qwen4_exp_text solar_open step3p7
unlimited_ocr zaya dbrx
""".split()  # noqa: SIM905  # one a line would be seventy lines
MODELS = Path(transformers.__file__).parent / "models"
SOURCES = {file: file.read_text(encoding="utf-8") for file in MODELS.glob("*/modeling_*.py")}
DECORATED = {f.parent.name for f, text in SOURCES.items() if re.search(r"^@use_experts_impl", text, re.MULTILINE)}
UNDECORATED_FOLDERS = {"dbrx", "llama4", "longcat_flash", "step3p7"}


# Parts of a model that no AutoModel makes.
NO_AUTO_CLASS = {"qwen3_omni_moe_talker_text": "Qwen3OmniMoeTalkerModel"}

# What does not continue token ids one by one: it draws, it has no head, or its config lacks what generation needs.
NO_GREEDY_TOKENS = {
    "diffusion_gemma",
    "openai_privacy_filter",
    "qwen3_omni_moe_talker_text",
    "qwen3_omni_moe_thinker",
}


def config_module(family):
    """The module of the family's models."""
    name = inspect.getmodule(CONFIG_MAPPING[family]).__name__.replace("configuration_", "modeling_")
    return importlib.import_module(name).__name__


def folder_of(family):
    return inspect.getmodule(CONFIG_MAPPING[family]).__name__.split(".")[-2]


FAMILIES = [f for f in FAMILIES if f in CONFIG_MAPPING and folder_of(f) in DECORATED | UNDECORATED_FOLDERS]
OLDER = Version(transformers.__version__) < Version("5.24")

NOT_PACKED = {"DogeCDMoE", "JetMoeParallelExperts", "NllbMoeExperts", "SwitchTransformersExperts", "VitPoseNaiveMoe"}


def names_of(config_class):
    names = set()
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {})) | set(inspect.signature(base.__init__).parameters)
    return names


def tiny_config(config_class, vision=False):
    """A small config of the class and of its parts."""
    sizes = VISION if vision else TEXT
    options = {name: value for name, value in sizes.items() if name in names_of(config_class)}
    for name, part in dict(getattr(config_class, "sub_configs", None) or {}).items():
        if isinstance(part, type) and part is not AutoConfig:
            text = ("text", "llm", "language", "thinker", "talker", "decoder", "code_predictor")
            options[name] = tiny_config(part, not any(word in name for word in text))
    return config_class(**options | EXTRA.get(getattr(config_class, "model_type", ""), {}))


def build(family):
    torch.manual_seed(0)
    try:
        config = tiny_config(CONFIG_MAPPING[family])
        if family in NO_AUTO_CLASS:
            part = getattr(sys.modules[config_module(family)], NO_AUTO_CLASS[family])(config).float().eval()
            for parameter in part.parameters():  # only the whole model initialises its experts
                parameter.data = torch.randn_like(parameter) / 10 if parameter.ndim == 3 else parameter.data
            return part
        autos = [
            (MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM),
            (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText),
        ]
        auto = next((auto for mapping, auto in autos if type(config) in mapping), AutoModel)
        return auto.from_config(config).float().eval()
    except (ValueError, StrictDataclassError) as error:
        if OLDER:
            pytest.skip(f"Transformers {transformers.__version__} does not take this tiny config: {error}"[:200])
        raise


def run(model, tokens):
    torch.manual_seed(7)  # diffusion_gemma draws
    with torch.no_grad():
        if type(model).__name__ in NO_AUTO_CLASS.values():
            out = model(inputs_embeds=nn.functional.one_hot(tokens % 64, 64).float())
        else:
            out = model(tokens)
    logits = getattr(out, "logits", None)
    return out.last_hidden_state if logits is None else logits


def names_in(folder):
    return {name for file in Path(folder).glob("*.safetensors") for name in load_file(file)}


def with_decoded_experts(model, packed, decoded):
    """The stock model with weights that ml_dtypes decoded; experts past those with weights keep none."""
    modules = dict(model.named_modules())
    for name, module in packed.items():
        for proj in module.projection_names:
            weight = decoded(*module.packed(proj))
            weight = weight.mT if module.layout.is_transposed else weight
            if module.layout.is_flat:
                inner, flat = modules[name].mlp, (-1, modules[name].hidden_size)
                if proj == "down_proj":
                    inner.w2.data = weight.mT.reshape(flat)
                else:
                    inner.w1.data, inner.v1.data = (half.reshape(flat) for half in weight.chunk(2, dim=1))
                continue
            stack = getattr(modules[name], proj).data
            stack.zero_()[: weight.shape[0]] = weight
    return model


def largest_error(given, decoded, packed):
    """The largest relative RMSE of a weight that was packed; 0.114 is what the format makes of a normal distribution.

    Rows past those of the experts with weights (longcat_flash has identity experts) are left out.
    """
    errors = [0.0]
    for name, before in given.items():
        if not torch.equal(before, decoded[name]):
            module = packed[next(prefix for prefix in packed if name.startswith(f"{prefix}."))]
            rows = module.num_routed if before.ndim == 3 else len(before)
            errors.append(((decoded[name][:rows] - before[:rows]).norm() / before[:rows].norm()).item())
    return max(errors)


@pytest.fixture(scope="module")
def packed_classes():
    """The classes that were packed, by the family in whose model they were."""
    return {}


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family, packed_of, decoded, family_table, packed_classes):
    row = family_table.setdefault(family, {})
    source, saved = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    with source, saved:
        stock = build(family)
        stock.save_pretrained(source.name)
        cls = type(stock)
        packed = cls.from_pretrained(source.name, quantization_config=hf_mxfp4.MXFP4Config(), dtype=torch.float32)
        hf_mxfp4.assert_packed(packed)
        packed_classes[family] = {module.dense_class.__name__ for module in packed_of(packed).values()}
        assert all(row.error < 1e-5 for row in hf_mxfp4.packed_report(packed, check=True).rows)

        tokens = torch.randint(3, 240, (2, 11), generator=torch.Generator().manual_seed(3))
        dense_logits = run(stock, tokens)
        given = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
        reference = with_decoded_experts(stock, packed_of(packed), decoded)
        row["error"] = largest_error(given, reference.state_dict(), packed_of(packed))
        assert 0.05 < row["error"] <= 0.125  # of the source's weights, whatever way they took into the packed bytes
        logits, expected = run(packed, tokens), run(reference, tokens)
        assert not torch.equal(dense_logits, expected)  # the experts take part in what is compared
        row["logits"] = ((logits - expected).norm() / expected.norm()).item()
        assert row["logits"] <= 2e-5

        row["tokens"] = None if family in NO_GREEDY_TOKENS else same_greedy_tokens(packed, reference, tokens)
        assert row["tokens"] is not False

        packed.save_pretrained(saved.name)
        again = cls.from_pretrained(saved.name, dtype=torch.float32)
        hf_mxfp4.assert_packed(again)
        before, after = packed.state_dict(), again.state_dict()
        row["reload"] = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
        assert row["reload"]

        config = hf_mxfp4.MXFP4Config(dequantize=True)
        at_load = cls.from_pretrained(saved.name, quantization_config=config, dtype=torch.float32)
        packed.dequantize()
        for column, dense in (("dequantized at load", at_load), ("dequantized after", packed)):
            assert {n: type(m) for n, m in dense.named_modules()} == {n: type(m) for n, m in stock.named_modules()}
            want = reference.state_dict()
            row[column] = all(torch.equal(t, want[n]) for n, t in dense.state_dict().items() if "experts" in n)
            assert row[column]
            with tempfile.TemporaryDirectory() as folder:
                dense.save_pretrained(folder)
                row["names"] = names_in(folder) == names_in(source.name)
                assert row["names"], column


def same_greedy_tokens(a, b, tokens):
    """Whether both models continue the tokens in the same way."""
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    expected = b.generate(tokens, **options)
    assert expected.shape[1] > tokens.shape[1]
    return torch.equal(a.generate(tokens, **options), expected)


def test_every_decorated_class_of_the_installed_version_is_in_the_list():
    assert {folder_of(family) for family in FAMILIES} >= DECORATED
    assert len(DECORATED) > 50


def test_every_decorated_class_was_packed(packed_classes):
    if len(packed_classes) < len(FAMILIES):
        pytest.skip("not all families were run")
    declared = {
        name
        for text in SOURCES.values()
        for name in re.findall(r"^@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)", text, re.MULTILINE)
    }
    assert len(declared) >= len(DECORATED)
    assert declared - set().union(*packed_classes.values()) == set()


def test_undecorated_rows_name_classes_that_exist():
    text = "".join(SOURCES.values())
    assert [name for name in UNDECORATED if f"class {name}(" not in text and not OLDER] == []


UNPACKABLE = {
    "doge": {"is_moe": True, "num_experts": 16, "num_experts_per_tok": 2},
    "jetmoe": {},
    "switch_transformers": {"d_model": 64, "d_ff": 64, "d_kv": 16, "num_heads": 4},
    "nllb-moe": {"encoder_layers": 4, "decoder_layers": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    "vitpose_backbone": {"num_experts": 2, "part_features": 16},
}


@pytest.mark.parametrize("family", UNPACKABLE)
def test_classes_without_routes_are_refused_by_name(family, tmp_path):
    config_class = CONFIG_MAPPING[family]
    options = {name: value for name, value in TEXT.items() if name in names_of(config_class)}
    config = config_class(**options | UNPACKABLE[family])
    model = (
        AutoModel.from_config(config) if family != "vitpose_backbone" else transformers.AutoBackbone.from_config(config)
    )
    classes = {type(module).__name__ for module in model.modules()} & NOT_PACKED
    assert len(classes) == 1
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"has no experts to keep in MXFP4; its .*{classes.pop()}"):
        type(model).from_pretrained(tmp_path, quantization_config=hf_mxfp4.MXFP4Config())


class NewConfig(PretrainedConfig):
    model_type = "a_family_of_tomorrow"
    hidden_size = 64
    num_experts = 3
    width = 96


@use_experts_implementation(is_transposed=True, has_bias=True)
class TomorrowsExperts(nn.Module):
    """Decorated as Transformers' own are, with an activation that none of them has."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, 2 * config.width))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(config.num_experts, 2 * config.width))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, config.width, config.hidden_size))
        self.down_proj_bias = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.power = 3

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.sinh(gate) ** self.power + up

    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for t, j in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(ids.shape[1])).tolist():
            e = ids[t, j]
            hidden = self._apply_gate(x[t] @ self.gate_up_proj[e] + self.gate_up_proj_bias[e])
            out[t] += weights[t, j] * (hidden @ self.down_proj[e] + self.down_proj_bias[e])
        return out


class TomorrowsModel(PreTrainedModel):
    config_class = NewConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        self.experts = TomorrowsExperts(config)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, TomorrowsExperts):
            for parameter in module.parameters():
                parameter.data.normal_(std=0.2)

    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)


def test_a_family_of_tomorrow_needs_no_change_here(tmp_path, packed_of, decoded):
    torch.manual_seed(0)
    stock = TomorrowsModel(NewConfig())
    stock.config._experts_implementation = "eager"
    stock.save_pretrained(tmp_path / "dense")
    packed = TomorrowsModel.from_pretrained(
        tmp_path / "dense", quantization_config=hf_mxfp4.MXFP4Config(), experts_implementation="eager"
    )
    hf_mxfp4.assert_packed(packed)
    assert layout_of(packed.experts).is_transposed
    inputs = torch.randn(5, 64), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    expected = with_decoded_experts(stock, packed_of(packed), decoded)(*inputs)
    assert (packed(*inputs) - expected).norm() <= 2e-5 * expected.norm()
    packed.save_pretrained(tmp_path / "packed")
    again = TomorrowsModel.from_pretrained(tmp_path / "packed")
    hf_mxfp4.assert_packed(again)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in packed.state_dict().items())
