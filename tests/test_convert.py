"""Checkpoints on disk, converted between dialects and compared: the same bytes, whole or not at all, clear words."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import layouts
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.quantizers.base import HfQuantizer

import hf_mxfp4
from hf_mxfp4.cli import main
from hf_mxfp4.convert import conversion, convert, experts, shards, verify
from hf_mxfp4.formats import nvfp4

COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
COMMON |= {"vocab_size": 256, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=96, num_experts=5, num_experts_per_tok=2, norm_topk_prob=True
    ),
    # w1, w3, w2 in files of one tensor an expert
    "mixtral": lambda: MixtralConfig(**COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2),
    # stacked in the dense file, transposed, with biases, gates and ups in turns
    "gpt_oss": lambda: GptOssConfig(
        **COMMON, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    ),
}
DIALECTS = {
    family: [name for name in layouts.DIALECTS if name != "gpt-oss" or family == "gpt_oss"] for family in FAMILIES
}
PAIRS = [(family, *pair) for family in FAMILIES for pair in itertools.permutations(DIALECTS[family], 2)]
TOKENS = torch.arange(3, 19)[None]


@pytest.fixture(scope="session")
def dense(tmp_path_factory):
    """Folder of a dense bfloat16 model of a family, with a file beside it that is no weights."""
    root, made = tmp_path_factory.mktemp("dense"), {}

    def make(family):
        if family not in made:
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(FAMILIES[family]()).to(torch.bfloat16)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(std=0.15)
            model.save_pretrained(root / family)
            (root / family / "chat_template.jinja").write_text("{{ messages }}")
            made[family] = root / family
        return made[family]

    return make


@pytest.fixture(scope="session")
def packed(tmp_path_factory, dense):
    """Folder of a family in a dialect, laid out by hand."""
    root, made = tmp_path_factory.mktemp("packed"), {}

    def make(family, dialect):
        if (family, dialect) not in made:
            folder = layouts.lay_out(dialect, dense(family), root / f"{family}-{dialect}")
            made[family, dialect] = Path(folder)
        return made[family, dialect]

    return make


def tensors_of(folder):
    """Every tensor of a folder: dtype, shape and bytes, by name."""
    found = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dictionary
                tensor = opened.get_tensor(name)
                raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
                found[name] = tensor.dtype, tuple(tensor.shape), raw
    return found


def files_of(folder):
    """Every file of a folder: its bytes, by its path in it."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def edited(folder, target, change):
    """A copy of a folder whose only weight file `change` has changed, given its tensors by name."""
    shutil.copytree(folder, target)
    tensors = {name: tensor.clone() for name, tensor in load_file(target / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(("family", "one", "other"), PAIRS)
def test_there_and_back_is_byte_identical(family, one, other, packed, tmp_path):
    convert(packed(family, one), tmp_path / "there", other, progress=False)
    assert tensors_of(tmp_path / "there") == tensors_of(packed(family, other))
    convert(tmp_path / "there", tmp_path / "back", one, progress=False)
    assert tensors_of(tmp_path / "back") == tensors_of(packed(family, one))


@pytest.mark.parametrize(("family", "dialect"), [(f, d) for f in FAMILIES for d in DIALECTS[f]])
def test_dense_experts_become_what_a_load_and_a_save_make_of_them(family, dialect, dense, tmp_path):
    config = hf_mxfp4.MXFP4Config(save_format=dialect, scale_rule="even")
    model = AutoModelForCausalLM.from_pretrained(dense(family), dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    convert(dense(family), tmp_path / "converted", dialect, from_dense=True, rule="even", progress=False)
    assert tensors_of(tmp_path / "converted") == tensors_of(tmp_path / "saved")
    ours, theirs = (
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("converted", "saved")
    )
    assert ours["hf_mxfp4"] == theirs["hf_mxfp4"]
    routers = ours.keys() - theirs.keys()  # MLX has a key for each layer; a router is none in Transformers
    assert all(name.endswith((".gate", ".router")) for name in routers)
    assert not theirs.keys() - ours.keys()


@pytest.mark.parametrize(("family", "dialect"), [(f, d) for f in FAMILIES for d in DIALECTS[f]])
def test_converted_folder_loads_packed_with_equal_logits(family, dialect, dense, tmp_path):
    convert(dense(family), tmp_path / "converted", dialect, from_dense=True, progress=False)
    if dialect == "deepseek-v4" and not hasattr(HfQuantizer, "get_new_dtype"):
        pytest.skip("Transformers before 5.21 casts its scales; the load is refused")
    config = hf_mxfp4.MXFP4Config()
    quantized = AutoModelForCausalLM.from_pretrained(dense(family), dtype=torch.float32, quantization_config=config)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", dtype=torch.float32)  # by its marker
    hf_mxfp4.assert_packed(converted)
    with torch.no_grad():
        assert torch.equal(converted(TOKENS).logits, quantized(TOKENS).logits)


def test_files_without_weights_go_along(dense, tmp_path):
    folder = tmp_path / "source"
    shutil.copytree(dense("qwen3_moe"), folder)
    (folder / "hf_quant_config.json").write_text("{}")
    (folder / "code").mkdir()
    (folder / "code" / "modeling_own.py").write_text("own = 1\n")
    (folder / "original").mkdir()
    save_file({"w": torch.zeros(2)}, folder / "original" / "model.safetensors")
    convert(folder, tmp_path / "target", "modelopt", from_dense=True, progress=False)
    expected = {"chat_template.jinja", "code/modeling_own.py", "config.json", "generation_config.json"}
    assert files_of(tmp_path / "target").keys() == expected | {"model.safetensors"}
    assert not list(tmp_path.glob("*.partial"))


def test_shards_are_about_as_large_as_the_sources(dense, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(dense("qwen3_moe"), dtype="auto")
    model.save_pretrained(tmp_path / "source", max_shard_size="100KB")
    sizes = [file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors")]
    assert len(sizes) > 3
    for dialect in ("compressed-tensors", "hf_mxfp4"):
        done = convert(tmp_path / "source", tmp_path / dialect, dialect, from_dense=True, progress=False)
        index = json.loads((tmp_path / dialect / "model.safetensors.index.json").read_text())
        files = sorted((tmp_path / dialect).glob("*.safetensors"))
        assert [file.name for file in files] == [
            f"model-{i:05}-of-{done.files:05}.safetensors" for i in range(1, 1 + done.files)
        ]
        assert 1 < len(files) <= len(sizes)
        assert max(file.stat().st_size for file in files) <= max(sizes) + 20_000  # headers
        tensors = tensors_of(tmp_path / dialect)
        assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in tensors.values()) == done.nbytes
        assert index["weight_map"].keys() == tensors.keys()
        for file in files:
            with safe_open(file, framework="pt") as opened:
                assert opened.metadata() == {"format": "pt"}
                assert {index["weight_map"][name] for name in opened.keys()} == {file.name}  # noqa: SIM118
        whole = tmp_path / f"{dialect}-whole"
        convert(dense("qwen3_moe"), whole, dialect, from_dense=True, progress=False)
        assert tensors == tensors_of(whole)


def test_a_config_says_what_is_written_and_nothing_of_what_was(packed, tmp_path):
    convert(packed("qwen3_moe", "deepseek-v4"), tmp_path / "mlx", "mlx", progress=False)
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert config["quantization"]["mode"] == "mxfp4"
    assert config["quantization"]["model.layers.0.self_attn.q_proj"] is False
    assert "model.embed_tokens" not in config["quantization"]
    assert config["quantization_config"]["hf_mxfp4"]["format"] == "mlx"
    convert(tmp_path / "mlx", tmp_path / "quark", "quark", progress=False)
    config = json.loads((tmp_path / "quark" / "config.json").read_text())
    assert "quantization" not in config
    assert config["quantization_config"]["quant_method"] == "quark"


def with_fp8(tensors):
    """Makes a layer beside the experts FP8, with a scale of activations."""
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = (tensors[name].float() / 0.25).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.25)
    tensors["model.layers.0.self_attn.o_proj.input_scale"] = torch.ones(1)
    tensors["model.layers.0.mlp.experts.0.down_proj.input_scale"] = torch.ones(1)


def test_fp8_layers_stay_where_the_config_can_say_so_and_are_decoded_elsewhere(packed, dense, tmp_path):
    source = edited(packed("qwen3_moe", "ling"), tmp_path / "source", with_fp8)
    name = "model.layers.0.self_attn.o_proj.weight"
    before = load_file(source / "model.safetensors")
    done = convert(source, tmp_path / "mimo", "mimo", progress=False)
    after, config = (
        load_file(tmp_path / "mimo" / "model.safetensors"),
        json.loads((tmp_path / "mimo/config.json").read_text()),
    )
    assert done.decoded == 0
    assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8))
    assert {key for key in after if "o_proj" in key or "input_scale" in key} == {
        key for key in before if "o_proj" in key
    }
    dense_layers = config["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.0.self_attn.o_proj" not in dense_layers
    assert "model.layers.1.self_attn.o_proj" in dense_layers
    done = convert(source, tmp_path / "quark", "quark", progress=False)
    after = load_file(tmp_path / "quark" / "model.safetensors")
    assert done.decoded == 1
    assert torch.equal(after[name], (before[name].float() * 0.25).bfloat16())
    assert not [key for key in after if "input_scale" in key or key.endswith("_scale_inv")]


def test_packed_layers_beside_experts_are_decoded(packed, tmp_path):
    name, made = "model.layers.0.self_attn.o_proj", {}

    def pack(tensors):
        made["weight"] = hf_mxfp4.quantize(tensors.pop(f"{name}.weight"))
        tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"] = made["weight"]

    source = edited(packed("qwen3_moe", "compressed-tensors"), tmp_path / "source", pack)
    assert convert(source, tmp_path / "target", "compressed-tensors", progress=False).decoded == 1
    after = load_file(tmp_path / "target" / "model.safetensors")
    assert torch.equal(after[f"{name}.weight"], made["weight"].dequantize(torch.bfloat16))
    assert f"{name}.weight_packed" not in after


def as_nvfp4(tensors):
    """The experts of a compressed-tensors folder as NVFP4 of random bytes."""
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        base, (rows, width) = name.removesuffix("_packed"), tensors[name].shape
        scales = torch.rand(rows, width // 8, generator=generator) + 0.5
        tensors[f"{base}_scale"] = scales.to(torch.float8_e4m3fn)
        tensors[f"{base}_global_scale"] = torch.full((1,), 100.0)


def test_nvfp4_is_requantized_only_when_asked_for_and_the_error_told(packed, tmp_path, capsys):
    source = edited(packed("qwen3_moe", "compressed-tensors"), tmp_path / "source", as_nvfp4)
    with pytest.raises(ValueError, match=r"nvfp4 .*--requantize"):
        convert(source, tmp_path / "target", "hf_mxfp4", progress=False)
    command = ["convert", str(source), str(tmp_path / "target"), "--to", "hf_mxfp4", "--requantize"]
    assert main(command) == 0
    assert "requantizing added a relative error of" in capsys.readouterr().out
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "target" / "model.safetensors")
    base = "model.layers.1.mlp.experts.3.down_proj.weight"
    parts = (before[f"{base}_{part}"] for part in ("packed", "scale", "global_scale"))
    right = hf_mxfp4.quantize(nvfp4.decode(*parts, reciprocal=True))
    error, norm = 0.0, 0.0
    for name in [name for name in before if name.endswith("_global_scale")]:
        stored = (before[name.replace("_global_scale", f"_{part}")] for part in ("packed", "scale", "global_scale"))
        weight = nvfp4.decode(*stored, reciprocal=True).double()
        error += float((hf_mxfp4.quantize(weight.float()).dequantize().double() - weight).square().sum())
        norm += float(weight.square().sum())
    for target in ("again", "file.gguf"):
        to = "gguf" if target.endswith("gguf") else "mlx"
        done = convert(source, tmp_path / target, to, requantize=True, progress=False)
        assert done.error == pytest.approx((error / norm) ** 0.5, rel=1e-6)
    assert torch.equal(after["model.layers.1.mlp.experts.down_proj_blocks"][3], right.blocks)


def slowly(source, target, dialect, connection):
    """A conversion in a process of its own, with time to be killed in."""
    torch.set_num_threads(1)
    original = shards.raw

    def raw(tensor):
        time.sleep(0.001)
        return original(tensor)

    shards.raw = raw
    started = time.monotonic()
    connection.send("begins")
    convert(source, target, dialect, from_dense=True, progress=False)
    connection.send(time.monotonic() - started)


@pytest.fixture
def process():
    """Starts `slowly` with the arguments given, and gives the process and a connection to it, once it has begun."""
    fork = multiprocessing.get_context("fork")

    def start(*arguments):
        ours, theirs = fork.Pipe()
        child = fork.Process(target=slowly, args=(*arguments, theirs))
        child.start()
        theirs.close()
        assert ours.recv() == "begins"
        return child, ours

    return start


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A dense folder in several files, large enough that a conversion takes a while."""
    torch.manual_seed(1)
    config = Qwen3MoeConfig(**COMMON, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=2)
    config.hidden_size, config.num_hidden_layers = 256, 4
    folder = tmp_path_factory.mktemp("sharded") / "dense"
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="5MB")
    return folder


@pytest.mark.parametrize("dialect", ["compressed-tensors", "hf_mxfp4"])
def test_killed_at_any_moment_and_started_again_it_ends_with_the_same_bytes(dialect, sharded, tmp_path, process):
    moments, whole, target = random.Random(dialect), tmp_path / "whole", tmp_path / "target"
    child, connection = process(sharded, whole, dialect)
    takes, expected = connection.recv(), files_of(whole)
    child.join()
    assert len(expected) > 6
    done = []
    for _ in range(12):
        child, _ = process(sharded, target, dialect)
        time.sleep(moments.random() * takes / 2)
        child.kill()
        child.join()
        if target.exists():
            break
        done.append(len(list(tmp_path.glob("target.partial/new/*.safetensors"))))
    assert done
    assert done == sorted(done)  # what is whole stays
    if not target.exists():
        child, connection = process(sharded, target, dialect)
        connection.recv()
        child.join()
    assert files_of(target) == expected
    shutil.rmtree(tmp_path / "target.partial", ignore_errors=True)  # killed after its last step


class StoppedError(Exception):
    """Stands for a process that ends."""


@pytest.mark.parametrize("moment", range(8))
def test_stopped_between_any_two_files_it_goes_on_there(moment, sharded, tmp_path, monkeypatch):
    convert(sharded, tmp_path / "whole", "quark", from_dense=True, progress=False)
    written, original = [], shards.write

    def write(path, units, advance):
        if len(written) == moment:
            raise StoppedError
        original(path, units, advance)
        written.append(path.name)

    monkeypatch.setattr(shards, "write", write)
    count = len(list((tmp_path / "whole").glob("*.safetensors")))
    if moment < count:
        with pytest.raises(StoppedError):
            convert(sharded, tmp_path / "target", "quark", from_dense=True, progress=False)
        assert not (tmp_path / "target").exists()
    before, moment = list(written), -1
    convert(sharded, tmp_path / "target", "quark", from_dense=True, progress=False)
    assert len(set(written)) == len(written) == count  # no file twice
    assert written[: len(before)] == before
    assert files_of(tmp_path / "target") == files_of(tmp_path / "whole")


def test_another_source_or_other_options_start_anew(sharded, tmp_path, monkeypatch):
    def stop(*arguments):
        raise StoppedError

    folder, written, original = tmp_path / "source", [], shards.write
    shutil.copytree(sharded, folder)
    monkeypatch.setattr(shards, "write", lambda path, *rest: (original(path, *rest), written.append(path.name)))

    def unfinished(**options):
        """How many files were written by a conversion that then stops."""
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "_write_rest", stop)
            with pytest.raises(StoppedError):
                convert(folder, tmp_path / "target", "quark", from_dense=True, progress=False, **options)
        return len(written)

    count = unfinished()
    assert count > 3
    assert unfinished() == 0
    assert unfinished(rule="even") == count
    assert unfinished(rule="even") == 0
    first = next(folder.glob("*.safetensors"))
    os.utime(first, ns=(first.stat().st_atime_ns, first.stat().st_mtime_ns + 1))
    assert unfinished(rule="even") == count
    convert(folder, tmp_path / "target", "quark", from_dense=True, progress=False)
    convert(folder, tmp_path / "right", "quark", from_dense=True, progress=False)
    assert files_of(tmp_path / "target") == files_of(tmp_path / "right")


def test_killed_after_its_last_step_it_says_that_all_is_done(dense, tmp_path, monkeypatch):
    target, original = tmp_path / "target", shutil.rmtree

    def rmtree(*arguments, **options):
        if target.exists():
            raise StoppedError
        original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(conversion.shutil, "rmtree", rmtree)
        with pytest.raises(StoppedError):
            convert(dense("qwen3_moe"), target, "quark", from_dense=True, progress=False)
    assert (tmp_path / "target.partial").exists()
    assert convert(dense("qwen3_moe"), target, "quark", from_dense=True, progress=False).experts == 2
    assert not (tmp_path / "target.partial").exists()


GGUF_FAMILIES = ("qwen3_moe", "gpt_oss")


@pytest.mark.parametrize(("family", "dialect"), [(f, d) for f in GGUF_FAMILIES for d in DIALECTS[f]])
def test_to_gguf_and_back_is_byte_identical(family, dialect, packed, tmp_path):
    there = tmp_path / "there.gguf"
    done = convert(packed(family, dialect), there, "gguf", progress=False)
    assert done.experts == 2
    assert [path.name for path in tmp_path.iterdir()] == ["there.gguf"]
    verdict = verify(there, packed(family, dialect), progress=False)
    assert verdict.difference is None
    assert verdict.matrices == {"qwen3_moe": 30, "gpt_oss": 48}[family]
    convert(there, tmp_path / "back", dialect, progress=False)
    assert tensors_of(tmp_path / "back") == tensors_of(packed(family, dialect))
    convert(tmp_path / "back", tmp_path / "again.gguf", "gguf", progress=False)
    assert (tmp_path / "again.gguf").read_bytes() == there.read_bytes()


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_of_dense_experts_loads_packed_with_equal_logits(family, dense, tmp_path):
    convert(dense(family), tmp_path / "model.gguf", "gguf", from_dense=True, progress=False)
    convert(tmp_path / "model.gguf", tmp_path / "folder", "compressed-tensors", progress=False)
    config = hf_mxfp4.MXFP4Config()
    quantized = AutoModelForCausalLM.from_pretrained(dense(family), dtype=torch.float32, quantization_config=config)
    from_file = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="model.gguf", dtype=torch.float32, quantization_config=config
    )
    from_folder = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float32)
    with torch.no_grad():
        expected = quantized(TOKENS).logits
        for model in (from_file, from_folder):
            hf_mxfp4.assert_packed(model)
            assert torch.equal(model(TOKENS).logits, expected)


def test_gguf_takes_the_tokenizer_along(tmp_path):
    source = hf_mxfp4.demo_model_path()
    convert(source, tmp_path / "model.gguf", "gguf", from_dense=True, progress=False)
    convert(tmp_path / "model.gguf", tmp_path / "folder", "hf_mxfp4", progress=False)
    before, after = (AutoTokenizer.from_pretrained(path) for path in (source, tmp_path / "folder"))
    text = "JULIET.\nO Romeo, Romeo! wherefore art thou?"
    assert after(text)["input_ids"] == before(text)["input_ids"]


def test_what_gguf_cannot_do_is_refused(dense, packed, tmp_path):
    with pytest.raises(ValueError, match=r"does not end in \.gguf"):
        convert(packed("qwen3_moe", "mlx"), tmp_path / "target", "gguf", progress=False)
    with pytest.raises(ValueError, match="this model is a mixtral"):
        convert(packed("mixtral", "mlx"), tmp_path / "target.gguf", "gguf", progress=False)
    file = tmp_path / "file.gguf"
    convert(packed("qwen3_moe", "mlx"), file, "gguf", progress=False)
    with pytest.raises(FileExistsError, match="exists already"):
        convert(packed("qwen3_moe", "mlx"), file, "gguf", progress=False)
    with pytest.raises(ValueError, match="is a GGUF file already"):
        convert(file, tmp_path / "target.gguf", "gguf", progress=False)
    with pytest.raises(ValueError, match="leave out from_dense"):
        convert(file, tmp_path / "target", "mlx", from_dense=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["file.gguf"]


def test_verify_points_into_a_gguf_file(packed, tmp_path):
    convert(packed("gpt_oss", "gpt-oss"), tmp_path / "file.gguf", "gguf", progress=False)

    def change(tensors):
        tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][2, 10, 1] ^= 1  # the gate of row 5

    changed = edited(packed("gpt_oss", "gpt-oss"), tmp_path / "changed", change)
    found = verify(changed, tmp_path / "file.gguf", progress=False).difference
    assert (found.tensor, found.expert, found.place[0]) == ("model.layers.1.mlp.experts.gate_proj", 2, 5)
    assert found.place[1] // 32 == 1


MEASURED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import load_memory
from hf_mxfp4.convert import convert
before = load_memory.anonymous_bytes()
for dialect in ("compressed-tensors", "hf_mxfp4", "gguf"):
    with load_memory.sampled() as peak:
        convert(sys.argv[2], f"{sys.argv[2]}-{dialect}.gguf", dialect, from_dense=True, progress=False)
    print(dialect, peak[0] - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
@pytest.mark.parametrize("stacked", [False, True], ids=["a tensor per expert", "a tensor for all"])
def test_memory_is_that_of_few_matrices(stacked, tmp_path, monkeypatch):
    benchmarks, folder = Path(__file__).parent.parent / "benchmarks", tmp_path / "source"
    monkeypatch.syspath_prepend(str(benchmarks))
    import load_memory

    folder.mkdir()
    sizes = load_memory.Sizes(layers=1, experts=64, hidden=768, intermediate=512)
    assert load_memory.write_checkpoint(folder, sizes, stacked=stacked) > 150e6
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))  # as GGUF means it
    command = [sys.executable, "-c", MEASURED, str(benchmarks), str(folder)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    peaks = {dialect: int(peak) for dialect, peak in map(str.split, output.splitlines())}
    assert len(peaks) == 3
    assert max(peaks.values()) < 60e6, peaks


def test_a_full_disk_leaves_no_target(dense, tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", full)
        command = ["convert", str(dense("qwen3_moe")), str(tmp_path / "target"), "--to", "quark", "--from-dense"]
        assert main([*command, "--quiet"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()
    assert main([*command, "--quiet"]) == 0
    assert (tmp_path / "target" / "config.json").exists()


@pytest.mark.parametrize(
    ("family", "dialect", "options", "message"),
    [
        ("qwen3_moe", None, {"to": "quark"}, r"experts of .* are dense; pass from_dense \(--from-dense\)"),
        ("qwen3_moe", "mlx", {"to": "quark", "from_dense": True}, r"are packed already, as mlx; leave out from_dense"),
        ("qwen3_moe", "mlx", {"to": "gpt-oss"}, r"gpt-oss is for gpt-oss models, not qwen3_moe; use hf_mxfp4"),
        ("qwen3_moe", "mlx", {"to": "gpt-oss-original"}, r"to is 'gpt-oss-original'; expected .*compressed-tensors"),
        ("qwen3_moe", None, {"to": "quark", "from_dense": True, "rule": "best"}, r"scale_rule is 'best'"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(family, dialect, options, message, dense, packed, tmp_path):
    source = dense(family) if dialect is None else packed(family, dialect)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "target", progress=False, **options)
    assert not list(tmp_path.iterdir())


def test_a_target_that_exists_is_refused(packed, tmp_path, capsys):
    (tmp_path / "target").mkdir()
    assert main(["convert", str(packed("qwen3_moe", "mlx")), str(tmp_path / "target"), "--to", "quark"]) == 2
    err = capsys.readouterr().err
    assert "exists already" in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_source_that_is_not_whole_is_refused(packed, tmp_path):
    def lose(tensors):
        for part in ("packed", "scale"):
            del tensors[f"model.layers.1.mlp.experts.2.up_proj.weight_{part}"]

    source = edited(packed("qwen3_moe", "compressed-tensors"), tmp_path / "source", lose)
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.2\.up_proj is missing"):
        convert(source, tmp_path / "target", "mlx", progress=False)
    (source / "config.json").unlink()
    with pytest.raises(hf_mxfp4.CheckpointError, match=r"no config\.json"):
        convert(source, tmp_path / "target", "mlx", progress=False)


def test_a_model_without_experts_is_refused(tmp_path):
    save_file({"model.layers.0.mlp.up_proj.weight": torch.zeros(32, 32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(hf_mxfp4.CheckpointError, match="holds no experts"):
        convert(tmp_path, tmp_path / "target", "mlx", from_dense=True, progress=False)


def test_a_width_that_is_no_multiple_of_32_is_refused_by_name(tmp_path):
    names = [f"model.layers.0.mlp.experts.0.{proj}.weight" for proj in ("gate_proj", "up_proj")]
    tensors = {name: torch.zeros(48, 64) for name in names}
    tensors["model.layers.0.mlp.experts.0.down_proj.weight"] = torch.zeros(64, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    with pytest.raises(ValueError, match=r"experts\.0\.down_proj\.weight: width 48 .* multiple of 32"):
        convert(tmp_path, tmp_path / "target", "mlx", from_dense=True, progress=False)


@pytest.mark.parametrize("transposed", [False, True])
def test_dense_stacks_are_told_from_transposed_ones_by_their_shapes(transposed, tmp_path):
    weights = {"gate_up_proj": torch.randn(3, 128, 128), "down_proj": torch.randn(3, 128, 64)}  # 2 I = H
    tensors = {
        f"model.layers.0.mlp.experts.{proj}": (weight.mT if transposed else weight).contiguous()
        for proj, weight in weights.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_moe_text", "hidden_size": 128}')
    convert(tmp_path, tmp_path / "target", "hf_mxfp4", from_dense=True, progress=False)
    found = load_file(tmp_path / "target" / "model.safetensors")
    for proj, weight in weights.items():
        right = hf_mxfp4.quantize(weight)
        assert torch.equal(found[f"model.layers.0.mlp.experts.{proj}_blocks"], right.blocks)
        assert torch.equal(found[f"model.layers.0.mlp.experts.{proj}_scales"], right.scales)


@pytest.mark.parametrize(("family", "one", "other"), PAIRS[::7])
def test_verify_finds_no_difference_between_dialects(family, one, other, packed, capsys):
    verdict = verify(packed(family, one), packed(family, other), progress=False)
    assert verdict.difference is None
    assert verdict.matrices == {"qwen3_moe": 30, "mixtral": 24, "gpt_oss": 48}[family]
    assert verdict.not_compared == []
    assert main(["verify", str(packed(family, one)), str(packed(family, other)), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


CT = "model.layers.1.mlp.experts.3.up_proj.weight_{}"


def flip_code(tensors):
    codes = tensors[CT.format("packed")]
    codes[7, 9] ^= 0x70  # column 19, in the high nibble


def scale_up(tensors):
    tensors[CT.format("scale")][7, 1] += 1


def test_verify_points_at_a_code_that_differs(packed, tmp_path, capsys):
    source, other = packed("qwen3_moe", "compressed-tensors"), packed("qwen3_moe", "mlx")
    changed = edited(source, tmp_path / "changed", flip_code)
    found = verify(changed, other, progress=False).difference
    place = ("model.layers.1.mlp.experts.up_proj", "values differ", 3, (7, 19))
    assert (found.tensor, found.what, found.expert, found.place) == place
    right, wrong = (
        hf_mxfp4.dequantize(*(load_file(f / "model.safetensors")[CT.format(p)] for p in ("packed", "scale")))[7, 19]
        for f in (source, changed)
    )
    assert found.values == (wrong, right)
    assert main(["verify", str(changed), str(other)]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("model.layers.1.mlp.experts.up_proj, expert 3, row 7, column 19: values differ, ")
    assert main(["verify", str(changed), str(other), "--json", "--quiet"]) == 1
    assert json.loads(capsys.readouterr().out)["difference"]["place"] == [7, 19]


def test_verify_points_at_a_scale_that_differs(packed, tmp_path):
    source = packed("qwen3_moe", "compressed-tensors")
    found = verify(edited(source, tmp_path / "changed", scale_up), source, progress=False).difference
    assert (found.expert, found.place[0], found.place[1] // 32) == (3, 7, 1)
    assert found.values[0] == 2 * found.values[1]
    (code_a, scale_a), (code_b, scale_b) = found.stored
    assert (code_a, scale_a) == (code_b, scale_b + 1)


def test_verify_tells_bytes_from_values(packed, tmp_path):
    source = packed("qwen3_moe", "compressed-tensors")

    def zeros(tensors):
        codes, scales = tensors[CT.format("packed")], tensors[CT.format("scale")]
        codes[7, :16], scales[7, 0] = 0, 120

    def negative(tensors):
        zeros(tensors)
        tensors[CT.format("packed")][7, 9] = 0x80

    def scaled(tensors):
        zeros(tensors)
        tensors[CT.format("scale")][7, 0] = 99

    one = edited(source, tmp_path / "zeros", zeros)
    sign = verify(one, edited(source, tmp_path / "sign", negative), progress=False).difference
    assert (sign.what, sign.place, sign.stored) == ("bytes differ, values equal", (7, 19), ((0, 120), (8, 120)))
    scale = verify(one, edited(source, tmp_path / "scale", scaled), progress=False).difference
    assert (scale.what, scale.place, scale.stored) == ("bytes differ, values equal", (7, 0), ((0, 120), (0, 99)))


def test_verify_finds_what_is_missing(packed, tmp_path):
    source = packed("qwen3_moe", "compressed-tensors")

    def without(*parts):
        def change(tensors):
            for name in [name for name in tensors if all(part in name for part in parts)]:
                del tensors[name]

        return change

    fewer = edited(source, tmp_path / "fewer", without("layers.1.", ".experts.4."))
    found = verify(source, fewer, progress=False).difference
    assert str(found) == "model.layers.1.mlp.experts.gate_proj: 5 experts and 4"
    layer = edited(source, tmp_path / "layer", without("layers.1.", ".experts."))
    found = verify(layer, source, progress=False).difference
    assert str(found) == "model.layers.1.mlp.experts.gate_proj: only the second checkpoint has it"


def test_verify_compares_biases_and_other_tensors(packed, tmp_path):
    source, other = packed("gpt_oss", "gpt-oss"), packed("gpt_oss", "vllm")

    def change_bias(tensors):
        tensors["model.layers.0.mlp.experts.gate_up_proj_bias"][2, 11] = 4.0  # the up of row 5

    found = verify(edited(source, tmp_path / "bias", change_bias), other, progress=False).difference
    assert (found.tensor, found.expert, found.place) == ("model.layers.0.mlp.experts.up_proj", 2, (5,))
    assert found.values[0] == 4.0

    def change_norm(tensors):
        tensors["model.norm.weight"][5] = 4.0
        tensors["model.extra.weight"] = torch.zeros(2)

    verdict = verify(edited(source, tmp_path / "norm", change_norm), other, progress=False)
    assert str(verdict.difference).startswith("model.norm.weight, index [5]: values differ, 4 and ")
    assert verdict.not_compared == ["model.extra.weight"]


def test_verify_takes_packed_checkpoints_alone(dense, packed, tmp_path, capsys):
    assert main(["verify", str(dense("qwen3_moe")), str(packed("qwen3_moe", "mlx"))]) == 2
    assert "holds no packed experts" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "nothing"), str(packed("qwen3_moe", "mlx"))]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_commands_tell_what_they_did(packed, tmp_path, capsys):
    source, target = str(packed("qwen3_moe", "mlx")), str(tmp_path / "target")
    assert main(["convert", source, target, "--to", "compressed-tensors"]) == 0
    captured = capsys.readouterr()
    assert "2 modules of experts as compressed-tensors" in captured.out
    assert "Converting" in captured.err
    assert main(["verify", source, target]) == 0
    captured = capsys.readouterr()
    assert "the same: 30 matrices of experts" in captured.out
    assert "Comparing" in captured.err


def test_what_no_conversion_made_is_left_alone(dense, tmp_path, capsys):
    work = tmp_path / "target.partial"
    work.mkdir()
    (work / "precious.txt").write_text("mine")
    assert main(["convert", str(dense("qwen3_moe")), str(tmp_path / "target"), "--to", "quark", "--from-dense"]) == 2
    assert "target.partial is in the way" in capsys.readouterr().err
    assert (work / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize("files", [{"a": 5}, {"a": None}, {"a": ["b"]}])
def test_an_index_of_no_names_is_refused_in_one_line(files, tmp_path, capsys):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text("{}")
    for command in (["inspect"], ["verify", str(tmp_path)], ["convert", "--to", "quark", str(tmp_path / "new")]):
        assert main([command[0], str(tmp_path), *command[1:]]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("model_type", ["kimi_linear", "bailing_hybrid", "glm5_next", "qwen4_exp_text", "lara_mini"])
def test_conversions_that_are_not_of_experts_are_no_names(model_type):
    assert set(experts.names_of(model_type).spelled) <= {"gate_proj", "up_proj", "down_proj"}
