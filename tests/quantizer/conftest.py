"""Tiny models of five families, on disk, and what the tests compare with: ml_dtypes, numpy, stock Transformers."""

import contextlib
import copy
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)
from transformers.quantizers.base import HfQuantizer

import hf_mxfp4

COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
COMMON |= {"vocab_size": 256, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# Widths differ from one another, so that a transposed or swapped projection cannot fit.
FAMILIES = {
    # w1, w3, w2 in the file, under a module that the loader renames
    "mixtral": lambda: MixtralConfig(**COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
    # gate_proj, up_proj, down_proj
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, moe_intermediate_size=96, num_experts=5, num_experts_per_tok=2),
    # a dense layer first, shared experts beside the routed ones
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**COMMON, "head_dim": 16, "num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    # stacked in the file, transposed, biased, gate and up interleaved
    "gpt_oss": lambda: GptOssConfig(
        **COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
    # no gate, squared ReLU
    "nemotron_h": lambda: NemotronHConfig(
        **COMMON,
        layers_block_type=["attention", "moe"],
        intermediate_size=96,
        moe_intermediate_size=96,
        moe_shared_expert_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        use_mamba_kernels=False,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
    ),
}


def write_model(family, folder, dtype=torch.bfloat16, **changes):
    """A random model of the family, saved in `folder` as its owner would."""
    torch.manual_seed(0)
    config = FAMILIES[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.15)
            elif parameter.ndim == 1 and not bool(parameter.any()):
                parameter.normal_(std=0.05)  # biases, so that one left out is noticed
    model.save_pretrained(folder)
    return str(folder)


def decode(blocks, scales):
    """float32 weights from packed bytes by ml_dtypes, which shares no code with the package."""
    packed = blocks.numpy()
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    powers = scales.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return torch.from_numpy(values * np.repeat(powers, 32, axis=-1))


def packed_modules(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, hf_mxfp4.MXFP4Experts)}


@pytest.fixture(scope="session")
def sources(tmp_path_factory):
    """Folder of a dense bfloat16 model of each family."""
    root = tmp_path_factory.mktemp("sources")
    return {family: write_model(family, root / family) for family in FAMILIES}


@pytest.fixture(params=list(FAMILIES))
def family(request):
    return request.param


@pytest.fixture
def source(family, sources):
    return sources[family]


@pytest.fixture
def load():
    """from_pretrained in float32, packed."""

    def load(path, *, dtype=torch.float32, config=None, **kwargs):
        config = config if config is not None else hf_mxfp4.MXFP4Config()
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, quantization_config=config, **kwargs)

    return load


@pytest.fixture
def stock_with_decoded():
    """The stock model of a folder, its experts' weights replaced by what ml_dtypes decodes from a packed model."""

    def build(path, packed):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, experts_implementation="eager")
        modules = dict(model.named_modules())
        for name, module in packed_modules(packed).items():
            for proj in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj"):
                weight = decode(*(getattr(module, f"{proj}_{part}").detach() for part in ("blocks", "scales")))
                target = getattr(modules[name], proj)
                target.data.copy_(weight.mT if module.is_transposed else weight)
        return model

    return build


@pytest.fixture
def tokens():
    return torch.randint(3, 250, (2, 13), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def logits(tokens):
    """Of a model, for `tokens`."""

    def logits(model):
        with torch.no_grad():
            return model(tokens).logits

    return logits


@pytest.fixture
def packed_folder(tmp_path, load):
    """Saves a packed model of a source folder and gives the new folder."""

    def save(path, name="packed", **options):
        load(path, dtype=torch.bfloat16, config=hf_mxfp4.MXFP4Config(**options)).save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


@pytest.fixture
def edit():
    """Rewrites a folder's only weight file: `change` gets the tensors by name and returns them."""

    def edit(folder, change):
        file = Path(folder) / "model.safetensors"
        tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
        tensors = change(tensors) or tensors
        save_file(tensors, file, metadata={"format": "pt"})

    return edit


@pytest.fixture
def edit_config():
    def edit(folder, change):
        file = Path(folder) / "config.json"
        config = json.loads(file.read_text())
        change(config)
        file.write_text(json.dumps(config))

    return edit


@pytest.fixture
def write():
    return write_model


@pytest.fixture
def packed_of():
    return packed_modules


@pytest.fixture
def reads_e8m0():
    """Raises where this version of Transformers would cast scales stored as F8_E8M0; else nothing."""
    if hasattr(HfQuantizer, "get_new_dtype"):
        return contextlib.nullcontext()
    return pytest.raises(hf_mxfp4.CheckpointError, match=r"F8_E8M0, which Transformers before 5\.21 casts")


@pytest.fixture
def decoded():
    return decode


@pytest.fixture
def state():
    """A copy of a model's state dict."""
    return lambda model: copy.deepcopy(model.state_dict())


_TABLE = pytest.StashKey()


@pytest.fixture(scope="session")
def family_table(pytestconfig):
    """What each family's checks found, by family and check; printed at the end of the run."""
    return pytestconfig.stash.setdefault(_TABLE, {})


def pytest_terminal_summary(terminalreporter, config):
    table = config.stash.get(_TABLE, {})
    if not table:
        return
    columns = list(dict.fromkeys(check for row in table.values() for check in row))
    terminalreporter.section("families and checks")
    terminalreporter.write_line("family".ljust(28) + "  ".join(columns))
    for family, row in table.items():
        cells = {True: "ok", False: "FAILED", None: "-"}
        texts = [f"{v:.2g}" if type(v) is float else cells[v] for v in (row.get(check) for check in columns)]
        line = "  ".join(text.ljust(len(check)) for text, check in zip(texts, columns, strict=True))
        terminalreporter.write_line(family.ljust(28) + line)
