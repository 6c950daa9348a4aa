"""GGUF files: MXFP4 blocks against the package `gguf`, the container, and small models written and read back.

E experts, N output features, K input features. The package `gguf` is the oracle for bytes that it defines.
"""

import re
import sys
import threading
import weakref

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_mxfp4
from hf_mxfp4.experts import MXFP4Experts, find_experts
from hf_mxfp4.formats import CheckpointError
from hf_mxfp4.formats import gguf as layout
from hf_mxfp4.formats.gguf import Entry
from hf_mxfp4.mxfp4 import MXFP4Tensor
from hf_mxfp4.quantizer import gguf as models

SHAPES = [
    (0, 2, 32),  # no experts
    (1, 1, 32),  # one block
    (3, 5, 96),  # odd sizes
    (2, 300, 1024),  # more than one chunk
]


def random_blocks(shape, seed=0):
    """Any bytes: [..., K / 32 * 17]."""
    *lead, width = shape
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (*lead, width // 32 * 17), dtype=torch.uint8, generator=generator)


# --- the blocks


@pytest.mark.parametrize("shape", SHAPES)
def test_any_bytes_come_back_as_they_were(shape):
    blocks = random_blocks(shape)
    packed = layout.decode(blocks)
    *lead, width = shape
    assert packed.blocks.shape == (*lead, width // 2)
    assert packed.scales.shape == (*lead, width // 32)
    assert torch.equal(layout.encode(packed), blocks)


def test_values_are_those_of_gguf_for_every_pair_of_code_and_scale():
    scales = torch.arange(255)  # byte 255 is NaN here, and a number there
    blocks = torch.zeros(len(scales), 17, dtype=torch.uint8)
    blocks[:, 0] = scales
    blocks[:, 1:] = torch.arange(16, dtype=torch.uint8) * 16 + torch.arange(15, -1, -1, dtype=torch.uint8)
    with np.errstate(over="ignore"):
        expected = gguf.quants.MXFP4.dequantize(blocks.numpy())
    # Compared as values: code 8 is -0 here and +0 there.
    assert np.array_equal(layout.decode(blocks).dequantize().numpy(), expected)


def test_one_block_by_hand():
    # Weights 0 to 15 are codes 0 to 15, weights 16 to 31 the same backwards; the scale is 2^1.
    block = torch.tensor([[128, *(j + 16 * (15 - j) for j in range(16))]], dtype=torch.uint8)
    packed = layout.decode(block)
    codes = [*range(16), *range(15, -1, -1)]
    assert packed.blocks.tolist() == [[codes[2 * j] + 16 * codes[2 * j + 1] for j in range(16)]]
    assert packed.scales.tolist() == [[128]]
    assert packed.dequantize()[0, 1] == 1.0


def test_views_are_decoded_and_encoded_as_copies_are():
    blocks = random_blocks((4, 6, 64))[:, ::2]
    packed = layout.decode(blocks)
    assert torch.equal(layout.encode(packed), blocks)
    rows = MXFP4Tensor(packed.blocks[:, 1:], packed.scales[:, 1:])
    assert torch.equal(layout.encode(rows), blocks[:, 1:])


@pytest.mark.parametrize("offset", [1, 3])
def test_bytes_at_any_address_are_read_and_left_as_they_are(offset):
    memory = random_blocks((1, 64))[0].repeat(3)
    before = memory.clone()
    for blocks in (memory[offset:][:17], memory[offset:][:34]):
        packed = layout.decode(blocks)
        assert torch.equal(layout.encode(packed), blocks)
    tensor = MXFP4Tensor(memory[offset:][:32], memory[offset:][:2])
    again = layout.decode(layout.encode(tensor))
    assert torch.equal(again.blocks, tensor.blocks)
    assert torch.equal(memory, before)


def test_bytes_that_are_no_whole_blocks_are_refused():
    with pytest.raises(ValueError, match=r"blocks \[2, 18\] are not whole blocks of 17 bytes"):
        layout.decode(torch.zeros(2, 18, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"torch\.int8"):
        layout.decode(torch.zeros(2, 17, dtype=torch.int8))
    with pytest.raises(ValueError, match="do not fit scales"):
        layout.encode(MXFP4Tensor(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)))


# --- the container


@pytest.fixture
def small_file(tmp_path):
    """A file with a tensor of each kind, and what was written to it."""
    packed = layout.decode(random_blocks((2, 3, 64)))
    dense = {
        "b": torch.randn(3, 5).bfloat16(),
        "c": torch.randn(7),
        "d": torch.randn(2, 4).half(),
    }
    entries = [Entry("a", "MXFP4", (2, 3, 64), lambda: packed)]
    for name, kind in (("b", "BF16"), ("c", "F32"), ("d", "F16")):
        entries.append(Entry(name, kind, tuple(dense[name].shape), lambda name=name: dense[name]))
    metadata = {"x.int": 7, "x.float": 1e-6, "x.bool": True, "x.str": "é", "x.list": ["a", "b"], "x.negative": -3}
    path = tmp_path / "small.gguf"
    layout.write(path, "x", metadata, entries)
    return path, metadata, packed, dense


def test_what_is_written_is_read(small_file):
    path, metadata, packed, dense = small_file
    header = layout.read_header(path)
    assert header.architecture == "x"
    for key, value in metadata.items():
        assert header.metadata.get(key) == (None if isinstance(value, list) else value)
    assert layout.tensor_infos(header) == {
        "a": ("MXFP4", (2, 3, 64)),
        "b": ("BF16", (3, 5)),
        "c": ("F32", (7,)),
        "d": ("F16", (2, 4)),
    }
    assert torch.equal(header.tensors["a"].bytes(), layout.encode(packed))
    for name, tensor in dense.items():
        assert np.array_equal(layout.dequantize(name, header.tensors[name]), tensor.float().numpy())


def test_files_are_as_the_package_reads_them(small_file):
    path, _, packed, _ = small_file
    reader = gguf.GGUFReader(path)
    assert {key: reader.fields[key].contents() for key in ("x.int", "x.list")} == {"x.int": 7, "x.list": ["a", "b"]}
    first = reader.tensors[0]
    assert (first.name, first.tensor_type) == ("a", gguf.GGMLQuantizationType.MXFP4)
    assert first.data.tobytes() == layout.encode(packed).numpy().tobytes()


def test_a_file_cut_anywhere_is_refused_by_name(small_file, tmp_path):
    path = small_file[0]
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    used = 32 + max(offset.data_offset + offset.n_bytes for offset in gguf.GGUFReader(path).tensors) // 32 * 32
    for size in (*range(0, 600, 13), used - 64):
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=re.escape(f"{cut} cannot be read as a GGUF file")):
            layout.read_header(cut)


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + b"\0" * 60, b"GGUF" + b"\xff" * 60], ids=["empty", "zip", "ff"]
)
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        layout.read_header(path)


def test_the_package_is_named_where_it_is_missing(small_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="pip install gguf"):
        layout.read_header(small_file[0])


def test_a_model_in_several_files_is_read_from_the_first(tmp_path):
    for i in range(2):
        entry = Entry(f"t{i}", "F32", (3,), lambda i=i: torch.full((3,), float(i)))
        layout.write(tmp_path / f"m-{i + 1:05}-of-00002.gguf", "x", {"split.count": 2, "split.no": i}, [entry])
    header = layout.read_header(tmp_path / "m-00001-of-00002.gguf")
    assert {name: float(tensor.bytes().view(torch.float32)[0]) for name, tensor in header.tensors.items()} == {
        "t0": 0.0,
        "t1": 1.0,
    }
    with pytest.raises(CheckpointError, match="name the first, which ends in -00001-of-00002"):
        layout.read_header(tmp_path / "m-00002-of-00002.gguf")
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="m-00002-of-00002"):
        layout.read_header(tmp_path / "m-00001-of-00002.gguf")


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    wrong = Entry("t", "F32", (3,), lambda: torch.zeros(4))
    with pytest.raises(ValueError, match=re.escape("t: got F32 [4], announced was F32 [3]")):
        layout.write(path, "x", {}, [wrong])
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert path.read_bytes() == b"old"
    with pytest.raises(ValueError, match="cannot be written as MXFP4"):
        layout.write(path, "x", {}, [Entry("t", "MXFP4", (1, 40), lambda: None)])


def test_tensors_are_made_one_at_a_time(tmp_path):
    alive = weakref.WeakSet()

    def make():
        assert not alive
        tensor = torch.zeros(1000)
        alive.add(tensor)
        return tensor

    layout.write(tmp_path / "m.gguf", "x", {}, [Entry(f"t{i}", "F32", (1000,), make) for i in range(3)])


# --- models

_SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 150000.0}
CONFIGS = {
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 32, "norm_topk_prob": True},
    "gpt_oss": {
        "num_local_experts": 4,
        "intermediate_size": 96,
        "head_dim": 32,
        "sliding_window": 16,
        "rope_parameters": {**_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
    "minimax_m2": {"num_local_experts": 4, "intermediate_size": 96, "head_dim": 32, "rotary_dim": 16},
}


def config_of(family, **changes):
    config = AutoConfig.for_model(family, **{**_SIZES, **CONFIGS[family], **changes})
    config._experts_implementation = "eager"
    return config


def packed_model(config, seed=0):
    """A model with random weights and packed experts."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(seed)
    for value in model.state_dict().values():
        value.copy_(torch.randn(value.shape, generator=generator) * 0.15)
    for name, experts in list(find_experts(model)):
        model.set_submodule(name, MXFP4Experts.from_dense(experts))
    return model


def entries_of(model, *, merged=False):
    """The entries of a model; with one tensor of gates and ups where `merged`."""
    experts, tensors = dict(find_experts(model)), model.state_dict()
    beside = [name for name in tensors if not name.startswith(tuple(f"{module}." for module in experts))]
    found = []
    for own, theirs in models.tensor_names(model.config, beside).items():
        value = tensors[own]
        found.append(models.dense_entry(theirs, tuple(value.shape), value.dtype, lambda value=value: value))
    for name, module in experts.items():
        for proj in module.projection_names:
            packed, (count, rows, half) = module.packed(proj), module.packed(proj).blocks.shape
            new = models.expert_entries(
                model.config, f"{name}.{proj}", (count, rows, 2 * half), lambda packed=packed: packed
            )
            if merged and proj == "gate_up_proj":
                joined = new[0].name.replace("gate", "gate_up")
                new = [Entry(joined, "MXFP4", (count, rows, 2 * half), lambda packed=packed: packed)]
            found += new
            bias = getattr(module, f"{proj}_bias", None)
            if bias is not None:
                shape = tuple(bias.shape)
                found += models.expert_entries(model.config, f"{name}.{proj}_bias", shape, lambda bias=bias: bias)
    return found


def write_model(path, model, entries=None):
    layout.write(path, *models.metadata(model.config), entries or entries_of(model))
    return layout.read_header(path)


def empty_like(header):
    """A model on meta as the file describes it, experts packed, and its config."""
    found = models.config_dict(header)
    config = AutoConfig.for_model(found.pop("model_type"), **found)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, experts in list(find_experts(model)):
        model.set_submodule(name, MXFP4Experts(experts))
    return model


def join(tensors, family):
    """Gates and ups in one tensor, in the order of the model's class."""
    for name in [name for name in tensors if ".gate_proj_" in name and ".experts." in name]:
        gate, up = tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))
        rows = torch.stack([gate, up], dim=2).flatten(1, 2) if family == "gpt_oss" else torch.cat([gate, up], dim=1)
        tensors[name.replace("gate_proj", "gate_up_proj")] = rows
    return tensors


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_comes_back_bit_by_bit_and_gives_the_same_logits(family, tmp_path):
    model = packed_model(config_of(family))
    header = write_model(tmp_path / "m.gguf", model)
    shell = empty_like(header)
    lazy = models.state_dict(header, shell)
    read = {name: tensor[...] for name, tensor in lazy.items()}
    for name, tensor in lazy.items():
        assert (tuple(read[name].shape), read[name].dtype) == (tensor.shape, tensor.dtype), name
    read, written = join(read, family), model.state_dict()
    assert read.keys() == written.keys()
    for name, tensor in written.items():
        assert torch.equal(read[name].to(tensor.dtype), tensor), name
    loaded = packed_model(shell.config, seed=1)
    loaded.load_state_dict(read)
    tokens = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "minimax_m2"])
def test_stock_transformers_reads_the_same_model(family, tmp_path):
    model = packed_model(config_of(family))
    header = write_model(tmp_path / "m.gguf", model)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    models.fix_config(config, header)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=config, dtype=torch.bfloat16)
    for name, experts in list(find_experts(model)):
        model.set_submodule(name, experts.dequantize())
    held = stock.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(held[name], tensor), name


def test_tensor_names_are_those_of_llama_cpp(tmp_path):
    names = {entry.name: (entry.dtype, entry.shape) for entry in entries_of(packed_model(config_of("gpt_oss")))}
    expected = {
        "token_embd.weight": ("BF16", (96, 64)),
        "blk.1.attn_sinks.weight": ("F32", (4,)),
        "blk.1.post_attention_norm.weight": ("F32", (64,)),
        "blk.1.ffn_gate_inp.weight": ("F32", (4, 64)),
        "blk.1.ffn_gate_exps.weight": ("MXFP4", (4, 96, 64)),
        "blk.1.ffn_up_exps.bias": ("F32", (4, 96)),
        "blk.1.ffn_down_exps.weight": ("MXFP4", (4, 64, 96)),
        "output.weight": ("BF16", (96, 64)),
    }
    assert {name: names.get(name) for name in expected} == expected
    shared = {entry.name: entry.shape for entry in entries_of(packed_model(config_of("qwen2_moe")))}
    assert shared["blk.0.ffn_gate_inp_shexp.weight"] == (64,)
    biased = {entry.name for entry in entries_of(packed_model(config_of("minimax_m2")))}
    assert "blk.0.exp_probs_b.bias" in biased


def test_stock_config_is_corrected(tmp_path):
    model = packed_model(config_of("qwen3_moe"))
    header = write_model(tmp_path / "m.gguf", model)
    config = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert config.moe_intermediate_size == 768  # what Transformers 5.24 makes of it
    models.fix_config(config, header)
    for attr in ("moe_intermediate_size", "rms_norm_eps", "vocab_size", "head_dim", "rope_parameters"):
        assert getattr(config, attr) == getattr(model.config, attr), attr


def test_gates_and_ups_in_one_tensor_are_taken_apart(tmp_path):
    model = packed_model(config_of("qwen3_moe"))
    header = write_model(tmp_path / "m.gguf", model, entries_of(model, merged=True))
    read = {name: tensor[...] for name, tensor in models.state_dict(header, empty_like(header)).items()}
    read = join(read, "qwen3_moe")
    for name, tensor in model.state_dict().items():
        assert torch.equal(read[name], tensor), name


def test_tied_output_is_not_written(tmp_path):
    model = packed_model(config_of("qwen3_moe", tie_word_embeddings=True))
    header = write_model(tmp_path / "m.gguf", model)
    assert "output.weight" not in header.tensors
    assert models.config_dict(header)["tie_word_embeddings"]
    assert "lm_head.weight" not in models.state_dict(header, empty_like(header))


def test_a_model_without_its_head_is_filled(tmp_path):
    model = packed_model(config_of("qwen3_moe"))
    header = write_model(tmp_path / "m.gguf", model)
    whole, inner = models.names(model, header), models.names(model.model, header)
    assert inner == {key: name.removeprefix("model.") for key, name in whole.items() if key != "output.weight"}


def typed_bytes(shape, kind):
    """Bytes of a type whose weights are of usual size."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    *lead, width = shape
    blocks = np.random.default_rng(0).integers(256, size=(*lead, width // block, size), dtype=np.uint8)
    if kind == "Q4_K":  # its two scales in float16
        blocks[..., :4] = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    if kind == "NVFP4":
        blocks[..., :4] %= 0x30
    return blocks.reshape(*lead, width // block * size)


def write_typed(path, model, names, kind):
    """A model's file with some expert tensors in a type that only the package writes, or in float32."""
    writer = gguf.GGUFWriter(None, "qwen3moe")
    for key, value in models.metadata(model.config)[1].items():
        layout._add(writer, key, value)
    for entry in entries_of(model):
        value, raw_type = entry.read(), None
        if not isinstance(value, MXFP4Tensor):
            data = value.float().numpy()
        elif not re.search(names, entry.name):
            data, raw_type = layout.encode(value).numpy(), gguf.GGMLQuantizationType.MXFP4
        elif kind == "F32":
            data = value.dequantize().numpy()
        else:
            data, raw_type = typed_bytes(entry.shape, kind), gguf.GGMLQuantizationType[kind]
        writer.add_tensor(entry.name, data, raw_dtype=raw_type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return layout.read_header(path)


@pytest.mark.parametrize(("kind", "ending"), [("Q4_K", "_q4_k"), ("NVFP4", "_nvfp4")])
def test_other_blocks_are_read_as_bytes(kind, ending, tmp_path):
    model = packed_model(config_of("qwen3_moe", moe_intermediate_size=256, num_hidden_layers=1))
    header = write_typed(tmp_path / "m.gguf", model, "blk.0.ffn_down_exps.weight", kind)
    read = models.state_dict(header, empty_like(header))
    tensor = read[f"model.layers.0.mlp.experts.down_proj{ending}"]
    assert tensor.get_dtype() == "U8"
    assert torch.equal(tensor[...], header.tensors["blk.0.ffn_down_exps.weight"].bytes())


def test_experts_in_a_type_that_is_not_loaded_are_refused_by_name(tmp_path):
    model = packed_model(config_of("qwen3_moe", num_hidden_layers=1))
    header = write_typed(tmp_path / "m.gguf", model, "blk.0.ffn_up_exps.weight", "Q8_0")
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_up_exps\.weight is of type Q8_0; experts are loaded from"):
        models.state_dict(header, empty_like(header))


def test_surplus_and_missing_tensors_are_refused_by_name(tmp_path):
    model = packed_model(config_of("qwen3_moe"))
    entries = entries_of(model)
    strange = Entry("blk.0.strange.weight", "F32", (3,), lambda: torch.zeros(3))
    header = write_model(tmp_path / "m.gguf", model, [*entries, strange])
    with pytest.raises(CheckpointError, match=r"holds blk\.0\.strange\.weight, which"):
        models.names(empty_like(header), header)
    short = [entry for entry in entries if entry.name != "blk.1.attn_q.weight"]
    header = write_model(tmp_path / "m.gguf", model, short)
    with pytest.raises(CheckpointError, match=r"lacks what .* holds as model\.layers\.1\.self_attn\.q_proj\.weight"):
        models.names(empty_like(header), header)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "means norm_topk_prob=True; this model has False"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_models_that_llama_cpp_would_run_otherwise_are_refused(family, changes, message):
    with pytest.raises(ValueError, match=message):
        models.metadata(config_of(family, **changes))


def test_other_families_are_refused():
    with pytest.raises(ValueError, match="qwen3_moe, gpt_oss, minimax_m2; this model is a mixtral"):
        models.metadata({"model_type": "mixtral"})


def test_yarn_of_a_qwen_model_comes_back(tmp_path):
    model = packed_model(config_of("qwen3_moe", rope_parameters=_YARN, num_hidden_layers=1))
    header = write_model(tmp_path / "m.gguf", model)
    assert models.config_dict(header)["rope_parameters"] == _YARN


def test_the_tokenizer_comes_back(tmp_path):
    folder = hf_mxfp4.demo_model_path()
    config = AutoConfig.from_pretrained(folder)
    architecture, metadata = models.metadata(config)
    tokens = models.tokenizer_metadata(folder, config)
    entry = Entry("token_embd.weight", "F32", (config.vocab_size, 64), lambda: torch.zeros(config.vocab_size, 64))
    layout.write(tmp_path / "m.gguf", architecture, {**metadata, **tokens}, [entry])
    read, own = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"), AutoTokenizer.from_pretrained(folder)
    for text in ("Hello world, it's 1234\n\n  foo(bar)<|endoftext|>x", "é-ü 日本"):
        assert read(text).input_ids == own(text).input_ids
    assert (read.eos_token, read.pad_token) == (own.eos_token, own.pad_token)
    assert models.tokenizer_metadata(tmp_path, config) == {}


def test_several_threads_may_read_at_once(tmp_path):
    model = packed_model(config_of("qwen3_moe"))
    header = write_model(tmp_path / "m.gguf", model)
    lazy = models.state_dict(header, empty_like(header))
    expected = {name: tensor[...] for name, tensor in lazy.items()}
    same = []
    work = [
        threading.Thread(target=lambda: same.append(all(torch.equal(t[...], expected[n]) for n, t in lazy.items())))
        for _ in range(3)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert same == [True] * 3


# --- from_pretrained


def assert_same_model(loaded, model):
    hf_mxfp4.assert_packed(loaded)
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name].to(value.dtype)), name
    tokens = torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf", dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_file_loads_packed(family, merged, tmp_path):
    model = packed_model(config_of(family))
    entries = None if family == "gpt_oss" else entries_of(model, merged=merged)
    write_model(tmp_path / "m.gguf", model, entries)
    loaded = load(tmp_path, quantization_config=hf_mxfp4.MXFP4Config())
    assert {row.source for row in hf_mxfp4.packed_report(loaded).rows} == {"gguf"}
    assert_same_model(loaded, model)


@pytest.mark.parametrize("family", CONFIGS)
def test_enabled_a_file_loads_packed_without_a_config(family, tmp_path):
    model = packed_model(config_of(family))
    write_model(tmp_path / "m.gguf", model)
    with hf_mxfp4.enable():
        assert_same_model(load(tmp_path), model)


def test_what_a_file_held_is_saved_as_any_other_model(tmp_path):
    model = packed_model(config_of("qwen3_moe"))
    write_model(tmp_path / "m.gguf", model)
    load(tmp_path, quantization_config=hf_mxfp4.MXFP4Config()).save_pretrained(tmp_path / "saved")
    assert_same_model(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16), model)


def test_without_a_config_a_file_loads_as_stock_has_it(tmp_path):
    model = packed_model(config_of("minimax_m2"))
    write_model(tmp_path / "m.gguf", model)
    assert not hf_mxfp4.packed_report(load(tmp_path)).packed


@pytest.mark.parametrize("kind", ["Q4_K", "NVFP4"])
def test_other_blocks_are_loaded_only_when_asked_for(kind, tmp_path):
    model = packed_model(config_of("qwen3_moe", hidden_size=256, moe_intermediate_size=256, head_dim=64))
    write_typed(tmp_path / "m.gguf", model, "_exps", kind)
    with pytest.raises(CheckpointError, match=r"requantize=True"):
        load(tmp_path, quantization_config=hf_mxfp4.MXFP4Config())
    loaded = load(tmp_path, quantization_config=hf_mxfp4.MXFP4Config(requantize=True))
    hf_mxfp4.assert_packed(loaded)
    header = layout.read_header(tmp_path / "m.gguf")
    for n, row in enumerate(hf_mxfp4.packed_report(loaded).rows):
        error = norm = 0.0
        for part in ("gate", "up", "down"):
            name = f"blk.{n}.ffn_{part}_exps.weight"
            values = torch.from_numpy(gguf.dequantize(header.tensors[name].data, gguf.GGMLQuantizationType[kind]))
            module = loaded.get_submodule(row.name)
            held = module.packed("down_proj" if part == "down" else "gate_up_proj").dequantize()
            if part != "down":
                held = held.chunk(2, dim=1)[part == "up"]
            error += float((held - values).double().square().sum())
            norm += float(values.double().square().sum())
        assert row.loss == pytest.approx((error / norm) ** 0.5, rel=1e-6)
        assert 0 < row.loss < 0.3


def test_dense_experts_are_quantized(tmp_path):
    model = packed_model(config_of("qwen3_moe"))
    write_typed(tmp_path / "m.gguf", model, "_exps", "F32")
    assert_same_model(load(tmp_path, quantization_config=hf_mxfp4.MXFP4Config()), model)  # lossless: they were MXFP4


def test_experts_in_two_types_are_refused(tmp_path):
    model = packed_model(config_of("qwen3_moe", hidden_size=256, moe_intermediate_size=256, head_dim=64))
    write_typed(tmp_path / "m.gguf", model, "blk.1.ffn_up_exps.weight", "Q4_K")
    with pytest.raises(CheckpointError, match=r"experts in more than one type: .*\(MXFP4\).*\(Q4_K\)"):
        load(tmp_path, quantization_config=hf_mxfp4.MXFP4Config(requantize=True))


def write_qwen35(path, config, kind):
    """A file of Qwen3.5-MoE with random tensors under llama.cpp's names; its experts in a type."""
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.norm": "ssm_norm",
        "linear_attn.conv1d": "ssm_conv1d", "linear_attn.out_proj": "ssm_out", "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_bias": "ssm_dt.bias", "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator, entries = torch.Generator().manual_seed(0), []
    for name, value in model.state_dict().items():
        stem, shape = name.removesuffix(".weight"), tuple(value.shape)
        block = re.sub(r"^model\.layers\.(\d+)\.", r"blk.\1.", stem)
        if stem.endswith("experts.gate_up_proj"):
            parts = [
                ("ffn_gate_exps", (shape[0], shape[1] // 2, shape[2])),
                ("ffn_up_exps", (shape[0], shape[1] // 2, shape[2])),
            ]
            stem = "mlp.experts.gate_up_proj"
        elif stem.endswith("experts.down_proj"):
            parts, stem = [("ffn_down_exps", shape)], "mlp.experts.down_proj"
        else:
            stem = block.split(".", 2)[2] if block.startswith("blk.") else stem
            parts = [(names[stem], tuple(side for side in shape if side > 1))]
        for theirs, size in parts:
            drawn = torch.randn(size, generator=generator) * 0.1
            drawn = -drawn.abs() - 0.1 if theirs == "ssm_a" else drawn
            full = f"{block.removesuffix(stem)}{theirs}" if block.startswith("blk.") else theirs
            full += "" if theirs in ("ssm_a", "ssm_dt.bias") else ".weight"
            if theirs.endswith("_exps"):
                packed = hf_mxfp4.quantize(drawn)
                value = packed if kind == "MXFP4" else packed.dequantize()
                entries.append(Entry(full, kind, size, lambda value=value: value))
            else:
                entries.append(Entry(full, "F32", size, lambda drawn=drawn: drawn))
    metadata = {
        "context_length": 512, "embedding_length": 64, "block_count": 2, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.key_length": 32, "attention.layer_norm_rms_epsilon": 1e-6,
        "full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2,
        "ssm.time_step_rank": 4, "ssm.inner_size": 64, "rope.freq_base": 1e4, "rope.dimension_sections": [2, 2, 2, 0],
        "rope.dimension_count": 16, "expert_feed_forward_length": 96, "expert_shared_feed_forward_length": 64,
        "expert_count": 4, "expert_used_count": 2,
    }  # fmt: skip
    metadata = {f"qwen35moe.{key}": value for key, value in metadata.items()}
    metadata["tokenizer.ggml.tokens"] = [str(i) for i in range(96)]
    layout.write(path, "qwen35moe", metadata, entries)


@pytest.mark.parametrize("way", ["config", "enabled"])
def test_what_transformers_reads_by_conversions_of_its_loader(way, tmp_path):
    newer = pytest.importorskip("transformers.integrations.gguf.utils")
    if not newer.is_gguf_arch_supported("qwen35moe"):
        pytest.skip("this version of Transformers does not read the architecture")
    config = AutoConfig.for_model(
        "qwen3_5_moe_text", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=96, moe_intermediate_size=96, shared_expert_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, full_attention_interval=2, linear_conv_kernel_dim=4, linear_key_head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    write_qwen35(tmp_path / "dense.gguf", config, "F32")
    write_qwen35(tmp_path / "m.gguf", config, "MXFP4")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="dense.gguf", dtype=torch.float32)
    options = {"quantization_config": hf_mxfp4.MXFP4Config()} if way == "config" else {}
    with hf_mxfp4.enable():
        model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32, **options)
    hf_mxfp4.assert_packed(model)
    assert {row.source for row in hf_mxfp4.packed_report(model).rows} == {"gguf"}
    expected = stock.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, MXFP4Experts):
            for proj in module.projection_names:
                assert torch.equal(module.packed(proj).dequantize(), expected.pop(f"{name}.{proj}"))
    for name, value in expected.items():
        assert torch.equal(model.get_parameter_or_buffer(name), value), name
    tokens = torch.randint(96, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, stock(tokens).logits, atol=1e-4)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
