"""Each fault that a file can have, in every dialect: refused with the tensor's name, or loaded to the same bytes."""

import json
from pathlib import Path

import layouts
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.quantizers.base import HfQuantizer

import hf_mxfp4

LAYER = "model.layers.1.mlp"
# How errors may call the weight that the faults are in: as the model does, or as the file does.
IN_MODEL = rf"{LAYER}\.experts\.down_proj"
E = 3
# Transformers before 5.21 would cast scales that are stored as F8_E8M0; there such files are refused as a whole.
READS_E8M0 = hasattr(HfQuantizer, "get_new_dtype")
DIALECTS = tuple(dialect for dialect in layouts.DIALECTS if READS_E8M0 or dialect != "deepseek-v4")
PER_EXPERT = tuple(dialect for dialect in DIALECTS if dialect in layouts.PER_EXPERT)
# For config keys that say what the weights are: where the key is, as a path.
FORMAT_KEYS = {
    "gpt-oss": ("quant_method",),
    "hf_mxfp4": ("format",),
    "vllm": ("quant_method",),
    "compressed-tensors": ("format",),
    "auto-round": ("data_type",),
    "quark": ("global_quant_config", "weight", "dtype"),
    "modelopt": ("quant_algo",),
    "mimo": ("store_dtype",),
    "deepseek-v4": ("expert_dtype",),
    "ling": ("routed_experts_quant_method",),
    "mlx": ("mode",),
}
# Keys that real files have beside those that say it, for their being null.
OTHER_KEYS = (
    *("config_groups", "ignore", "kv_cache_scheme", "global_compression_ratio", "sparsity_config", "version"),
    *("transform_config", "quantization_status", "modules_to_not_convert", "weight_block_size", "exclude", "producer"),
    *("layer_quant_config", "layer_type_quant_config", "algo_config", "export", "extra_config", "hf_mxfp4"),
    *("block_name_to_quantize", "packing_format", "activation_scheme", "scale_fmt", "fmt", "ignored_layers"),
)


def names(dialect):
    """The names of codes and of scales of a down projection; of expert 3 where each has its own."""
    if dialect in layouts.PER_EXPERT:
        codes, _, scales, _ = layouts.PER_EXPERT[dialect]
        base = f"{LAYER}.experts.{E}.down_proj"
        return base + codes, base + scales
    if dialect == "mlx":
        return f"{LAYER}.switch_mlp.down_proj.weight", f"{LAYER}.switch_mlp.down_proj.scales"
    if dialect == "vllm":
        return f"{LAYER}.experts.w2_weight", f"{LAYER}.experts.w2_weight_scale"
    return f"{LAYER}.experts.down_proj_blocks", f"{LAYER}.experts.down_proj_scales"


def weight(name):
    """The pattern of a tensor's name."""
    return rf"{name}(?!\w)".replace(".", r"\.")


def either(dialect):
    """The pattern of the name of the weight that the faults are in, by any of its tensors."""
    return "|".join([IN_MODEL, *map(weight, names(dialect))])


@pytest.fixture(scope="session")
def whole(tmp_path_factory, sources):
    """Folder and tensors of a dialect without a fault, and the bytes that they load to."""
    root, made = tmp_path_factory.mktemp("whole"), {}

    def make(dialect):
        if dialect not in made:
            family = "gpt_oss" if dialect == "gpt-oss" else "qwen3_moe"
            folder = Path(layouts.lay_out(dialect, sources[family], root / dialect))
            made[dialect] = folder, load_file(folder / "model.safetensors"), packed_bytes(load(folder))
        return made[dialect]

    return make


@pytest.fixture
def faulty(whole, tmp_path):
    """faulty(dialect, change=None, configure=None) -> folder with tensors, or config, changed in place."""

    def make(dialect, change=None, configure=None):
        folder, tensors, _ = whole(dialect)
        tensors, config = dict(tensors), json.loads((folder / "config.json").read_text())
        if change is not None:
            change(tensors)
        if configure is not None:
            configure(config)
        tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def load(folder, **options):
    config = hf_mxfp4.MXFP4Config(**options)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)


def packed_bytes(model):
    hf_mxfp4.assert_packed(model)
    return {name: value.clone() for name, value in model.state_dict().items() if ".experts." in name}


def assert_loads_right(folder, expected):
    found = packed_bytes(load(folder))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def assert_refused(folder, pattern):
    with pytest.raises(hf_mxfp4.CheckpointError, match=pattern):
        load(folder)
    with hf_mxfp4.enable(), pytest.raises(hf_mxfp4.CheckpointError, match=pattern):
        AutoModelForCausalLM.from_pretrained(folder)


dialects = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.mark.parametrize("part", [0, 1], ids=["codes", "scales"])
@dialects
def test_one_tensor_missing(dialect, part, faulty):
    lost = names(dialect)[part]
    assert_refused(faulty(dialect, lambda tensors: tensors.pop(lost)), f"{weight(lost)} is missing")


@dialects
def test_codes_and_scales_missing(dialect, faulty):
    def change(tensors):
        for name in names(dialect):
            del tensors[name]

    assert_refused(faulty(dialect, change), either(dialect))


@dialects
def test_every_expert_missing(dialect, faulty):
    def change(tensors):
        for name in [name for name in tensors if "experts." in name or "switch_mlp" in name]:
            del tensors[name]

    folder = faulty(dialect, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match="hold no packed experts"):
        load(folder)


@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)], ids=["codes", "scales", "both"])
@dialects
def test_renamed(dialect, parts, faulty):
    """A letter of the projection's name is another one: the weight is missing, or what is there fits nothing."""
    renamed = {part: names(dialect)[part].replace("w2", "w5").replace("down_proj", "down_prox") for part in parts}

    def change(tensors):
        for part, other in renamed.items():
            tensors[other] = tensors.pop(names(dialect)[part])

    assert_refused(faulty(dialect, change), "|".join([either(dialect), *map(weight, renamed.values())]))


@pytest.mark.parametrize("kept", [-1, 5000, 4], ids=["a byte is missing", "header alone", "no header"])
@dialects
def test_truncated(dialect, kept, faulty):
    file = faulty(dialect) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert_refused(file.parent, r"model\.safetensors is no whole safetensors file")


WRONG_DTYPES = [
    (part, dtype)
    for part, dtypes in (
        (0, (torch.float32, torch.bfloat16, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn)),
        (1, (torch.float32, torch.bfloat16, torch.int32, torch.float8_e4m3fn)),
    )
    for dtype in dtypes
]


@pytest.mark.parametrize(("part", "dtype"), WRONG_DTYPES, ids=lambda value: str(value).removeprefix("torch."))
@dialects
def test_wrong_dtype(dialect, part, dtype, faulty):
    def change(tensors):
        name = names(dialect)[part]
        tensors[name] = tensors[name].view(torch.uint8).to(dtype)

    folder = faulty(dialect, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=either(dialect)):
        load(folder)


def experts_of(tensors):
    """The tensors of layer 1's experts, by name."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(LAYER) and "gate." not in name}


@pytest.mark.parametrize("layers", ["one", "every"])
@pytest.mark.parametrize("count", ["fewer", "more"])
@dialects
def test_other_number_of_experts_than_the_config_says(dialect, count, layers, faulty, whole):
    def change(tensors):
        own = experts_of(tensors) if layers == "one" else tensors
        for name, tensor in list(own.items()):
            if dialect in layouts.PER_EXPERT and ".experts.0." in name and count == "more":
                tensors[name.replace(".experts.0.", ".experts.5.")] = tensor
            elif dialect in layouts.PER_EXPERT and ".experts.4." in name and count == "fewer":
                del tensors[name]
            elif dialect not in layouts.PER_EXPERT and (".experts." in name or "switch_mlp" in name):
                tensors[name] = tensor[:-1] if count == "fewer" else torch.cat([tensor, tensor[:1]])

    name = rf"{'model.layers.1' if layers == 'one' else 'model.layers.[01]'}\.mlp\.(?:experts|switch_mlp)\."
    assert_refused(faulty(dialect, change), name)


@dialects
def test_config_with_many_more_experts_than_the_file(dialect, faulty):
    def configure(config):
        for key in config.keys() & {"num_experts", "num_local_experts"}:
            config[key] = 128

    assert_refused(faulty(dialect, configure=configure), r"model\.layers\.\d\.mlp\.(?:experts|switch_mlp)\.")


def rows(tensor):
    """Without the last 32 rows."""
    axis = 1 if tensor.ndim > 2 else 0
    return tensor.narrow(axis, 0, tensor.shape[axis] - 32)


def columns(tensor):
    """Without the last block of columns, in codes (K / 2, K / 8 words, or blocks of 16 bytes) or scales (K / 32)."""
    axis = 2 if tensor.ndim > 2 else 1
    blocks = 3  # the width is 96
    return tensor.narrow(axis, 0, tensor.shape[axis] // blocks * (blocks - 1))


@pytest.mark.parametrize("parts", [(0, 1), (0,), (1,)], ids=["both", "codes", "scales"])
@pytest.mark.parametrize("cut", [rows, columns])
@dialects
def test_wrong_shape(dialect, cut, parts, faulty):
    def change(tensors):
        for part in parts:
            name = names(dialect)[part]
            tensors[name] = cut(tensors[name])

    folder = faulty(dialect, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=either(dialect)):
        load(folder)


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
@dialects
def test_config_of_another_width(dialect, key, faulty):
    key = "intermediate_size" if dialect == "gpt-oss" and key == "moe_intermediate_size" else key
    folder = faulty(dialect, configure=lambda config: config.update({key: 128}))
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"model\.layers\.\d\.mlp\.(?:experts|switch_mlp)\."):
        load(folder)


@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name not in ("gpt-oss", "hf_mxfp4", "vllm")])
def test_gate_and_up_of_other_heights_do_not_make_up_for_each_other(dialect, faulty):
    """32 rows more in one and 32 less in the other are as many rows in all."""
    module = "switch_mlp" if dialect == "mlx" else f"experts.{E}"

    def change(tensors):
        for name in [name for name in tensors if name.startswith(f"{LAYER}.{module}.gate_proj")]:
            other = name.replace("gate_proj", "up_proj")
            axis = tensors[name].ndim - 2
            moved = tensors[other].narrow(axis, 0, 32)
            # Concatenated as bytes, since not every dtype can be.
            joined = torch.cat([tensors[name].view(torch.uint8), moved.view(torch.uint8)], axis)
            tensors[name], tensors[other] = joined.view(tensors[name].dtype), rows(tensors[other])

    folder = faulty(dialect, change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=rf"{LAYER}\.(?:experts|switch_mlp)\."):
        load(folder)


def scales_of(dialect, tensors):
    ending = (
        layouts.PER_EXPERT[dialect][2] if dialect in layouts.PER_EXPERT else names(dialect)[1].split("down_proj")[-1]
    )
    ending = "_weight_scale" if dialect == "vllm" else ending
    return [name for name in tensors if name.endswith(ending)]


@dialects
def test_scale_bytes_as_e8m0_or_as_uint8_are_the_same_bytes(dialect, faulty, whole, reads_e8m0):
    def change(tensors):
        found = scales_of(dialect, tensors)
        assert found
        for name in found:
            other = torch.uint8 if tensors[name].dtype is torch.float8_e8m0fnu else torch.float8_e8m0fnu
            tensors[name] = tensors[name].view(other)

    folder, expected = faulty(dialect, change), whole(dialect)[2]
    with reads_e8m0:
        assert_loads_right(folder, expected)


@dialects
def test_codes_as_int8_or_as_uint8_are_the_same_bytes(dialect, faulty, whole):
    """MLX's words as signed ones."""
    swapped = {torch.uint8: torch.int8, torch.int8: torch.uint8, torch.uint32: torch.int32}

    def change(tensors):
        ending = names(dialect)[0].removeprefix(f"{LAYER}.experts.{E}.down_proj").split("down_proj")[-1]
        ending = "_weight" if dialect == "vllm" else ending
        found = [
            n
            for n in tensors
            if n.endswith(ending) and tensors[n].dtype in swapped and n not in scales_of(dialect, tensors)
        ]
        assert found
        for name in found:
            tensors[name] = tensors[name].view(swapped[tensors[name].dtype])

    assert_loads_right(faulty(dialect, change), whole(dialect)[2])


def stored(config):
    return config["quantization" if "quantization" in config else "quantization_config"]


@dialects
def test_unknown_format_is_named(dialect, faulty):
    def configure(config):
        *path, last = FORMAT_KEYS[dialect]
        level = stored(config)
        for key in path:
            level = level[key]
        level[last] = "mxfp5-foo"

    folder = faulty(dialect, configure=configure)
    with pytest.raises(hf_mxfp4.CheckpointError, match="mxfp5-foo"):
        load(folder)


@dialects
def test_config_keys_that_are_null_are_as_if_absent(dialect, faulty, whole):
    def configure(config):
        level = stored(config)
        said = FORMAT_KEYS[dialect][0]
        level.update({key: None for key in OTHER_KEYS if key != said and key not in level})
        if dialect == "compressed-tensors":
            level["config_groups"] = {"group_0": {"targets": ["Linear"], "format": None, "weights": None}}
        for key in ("expert_dtype", "quantization_config", "quantization"):
            config.setdefault(key, None)

    assert_loads_right(faulty(dialect, configure=configure), whole(dialect)[2])


@dialects
def test_a_config_that_says_nothing_leaves_it_to_the_tensors(dialect, faulty, whole):
    def configure(config):
        config.pop("quantization", None)
        config["quantization_config"] = None

    assert_loads_right(faulty(dialect, configure=configure), whole(dialect)[2])


@dialects
def test_scales_of_activations_beside_experts_are_not_needed(dialect, faulty, whole):
    def change(tensors):
        for name in experts_of(tensors):
            base = name.rpartition(".")[0] if dialect in (*layouts.PER_EXPERT, "mlx") else name.rpartition("_")[0]
            if dialect in ("gpt-oss", "hf_mxfp4", "vllm"):
                added = [f"{base.removesuffix('_weight')}_input_scale"]
            else:
                added = [f"{base}.input_scale", f"{base}.input_global_scale"]
            tensors.update(dict.fromkeys(added, torch.ones(1)))

    assert_loads_right(faulty(dialect, change), whole(dialect)[2])


def _signature(dialect):
    return names(dialect)[0].replace(f".{E}.", "."), names(dialect)[1].replace(f".{E}.", ".")


MIXED = [
    (first, second)
    for i, first in enumerate(DIALECTS)
    for second in DIALECTS[i + 1 :]
    if "gpt-oss" not in (first, second) and _signature(first) != _signature(second)
]


@pytest.mark.parametrize(("first", "second"), MIXED, ids=["-".join(pair) for pair in MIXED])
def test_two_dialects_in_one_checkpoint_are_refused(first, second, faulty, whole):
    """Layer 1 is in another dialect than layer 0, which the config names."""

    def change(tensors):
        for name in experts_of(tensors):
            del tensors[name]
        tensors.update(experts_of(whole(second)[1]))

    with pytest.raises(hf_mxfp4.CheckpointError, match=rf"more than one layout: .*{LAYER}\.(?:experts|switch_mlp)\."):
        load(faulty(first, change))


@pytest.mark.parametrize("kind", ["dense beside packed", "one expert dense"])
@dialects
def test_dense_experts_beside_packed_ones_are_refused(dialect, kind, faulty):
    """A dense copy of a weight, or one expert that is stored dense alone, is nothing that can be loaded."""
    codes, scales = names(dialect)

    def change(tensors):
        if kind == "one expert dense":
            del tensors[codes], tensors[scales]
        base = f"{LAYER}.experts.{E}.down_proj.weight"
        if base in tensors:
            base = f"{LAYER}.experts.{E}.down_proj.dense.weight"
        if dialect == "gpt-oss":
            tensors[f"{LAYER}.experts.down_proj"] = torch.zeros(4, 96, 64)
        else:
            tensors[base] = torch.zeros(64, 96)

    with pytest.raises(hf_mxfp4.CheckpointError, match=rf"{LAYER}\.(?:experts|switch_mlp)\."):
        load(faulty(dialect, change))


@dialects
def test_bias_missing_is_named(dialect, sources, tmp_path):
    def change(tensors):
        module = "switch_mlp" if dialect == "mlx" else "experts"
        del tensors[next(n for n in tensors if n.startswith(f"{LAYER}.{module}.") and n.endswith("bias"))]

    folder = layouts.lay_out(dialect, sources["gpt_oss"], tmp_path / "biased", change)
    with pytest.raises(
        hf_mxfp4.CheckpointError, match=rf"{LAYER}\.experts\.\w+(?:_bias|: .*bias; missing of experts 0)"
    ):
        load(folder)


@pytest.mark.parametrize("dialect", PER_EXPERT)
def test_bias_renamed_does_not_go_to_another_expert(dialect, sources, tmp_path):
    def change(tensors):
        tensors[f"{LAYER}.experts.9.down_proj.bias"] = tensors.pop(f"{LAYER}.experts.0.down_proj.bias")

    folder = layouts.lay_out(dialect, sources["gpt_oss"], tmp_path / "biased", change)
    with pytest.raises(hf_mxfp4.CheckpointError, match=rf"{LAYER}\.experts\.down_proj: .*bias; missing of experts 0"):
        load(folder)


@pytest.mark.parametrize("ending", ["bias", "weight_zero_point", "weight_scale_2", "weight_g_idx"])
@pytest.mark.parametrize("dialect", PER_EXPERT)
def test_tensor_of_an_expert_that_has_no_place_is_named(dialect, ending, faulty):
    """What would change the weights, or the result, is not passed over."""
    name = f"{LAYER}.experts.{E}.down_proj.{ending}"
    folder = faulty(dialect, lambda tensors: tensors.update({name: torch.ones(64)}))
    assert_refused(folder, f"{weight(name)}|{either(dialect)}")


@pytest.mark.parametrize("version", ["0.13.0", "0.13.0.dev3", "0.14.0", None])
def test_scales_two_too_low_are_warned_of(version, faulty, whole, monkeypatch):
    """compressed-tensors 0.13.0 wrote them so; the file says no more than the version."""
    messages = []
    monkeypatch.setattr("hf_mxfp4.quantizer.config.logger.warning", messages.append)
    folder = faulty("compressed-tensors", configure=lambda config: stored(config).update(version=version))
    assert_loads_right(folder, whole("compressed-tensors")[2])
    warned = [message for message in messages if "compressed-tensors 0.13.0" in message]
    assert bool(warned) == str(version).startswith("0.13.0")
    assert all("two powers of two too low" in message for message in warned)
