"""accelerate treats packed experts as any parameters: sized by their bytes, put on disk and read back as they are.

There is one device here, the CPU, so maps split a model between "cpu" and "disk". What is on disk is on meta in the
model, and is brought to the CPU for each forward.
"""

from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.utils.offload import load_offloaded_weight
from safetensors import safe_open
from transformers import AutoModelForCausalLM
from transformers.integrations.accelerate import compute_module_sizes

import hf_mxfp4


@pytest.fixture(params=["dense", "packed"])
def path(request, source, packed_folder):
    """A folder whose experts are quantized as they load, and one that holds them packed."""
    return source if request.param == "dense" else packed_folder(source)


@pytest.fixture
def whole(path, load):
    """The model in memory."""
    return load(path, dtype=torch.bfloat16)


def map_of(model, *on_disk):
    """Every module that has tensors of its own on the CPU, but for those on disk."""
    modules = [name for name, module in model.named_modules() if list(module.parameters(recurse=False)) and name]
    modules += [name for name, module in model.named_modules() if list(module.buffers(recurse=False))]
    kept = {name: "cpu" for name in modules if not any(f"{name}.".startswith(f"{disk}.") for disk in on_disk)}
    return kept | dict.fromkeys(on_disk, "disk")


def experts_of(model):
    return [name for name, module in model.named_modules() if isinstance(module, hf_mxfp4.MXFP4Experts)]


def stored(model):
    """Every offloaded tensor as it lies on disk, and the folder of its file."""
    tensors, folders = {}, {}
    for module in model.modules():
        weights_map = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for name, entry in getattr(getattr(weights_map, "dataset", None), "index", {}).items():
            with safe_open(entry["safetensors_file"], framework="pt") as file:
                tensors[name] = file.get_tensor(entry["weight_name"])
            folders[name] = Path(entry["safetensors_file"]).parent
    return tensors, folders


def thresholds(model):
    """Limits a byte below and at the sum of the first modules, where a wrong size moves a module over to the disk."""
    sizes = compute_module_sizes(model)[0]
    layers = [sizes[name] for name, module in model.named_modules() if type(module).__name__ in model._no_split_modules]
    embedding = next(size for name, size in sizes.items() if "embed" in name)
    sums = [embedding + sum(layers[:i]) + max(layers) for i in range(1, len(layers) + 1)]
    return [limit for total in sums for limit in (total - 1, total, total + 1)] + [sizes[""] - 1]


def test_auto_splits_by_the_bytes_that_packed_experts_take(source, path, load, tmp_path, logits):
    """As accelerate splits the model that is there, at limits where a byte tells; dense experts would differ.

    In float32, since older versions of Transformers count 16 bits for biases that they keep in 32.
    """
    whole, dense = load(path), AutoModelForCausalLM.from_pretrained(source)
    differs = 0
    for limit in thresholds(whole):
        options = {"max_memory": {"cpu": limit}, "no_split_module_classes": whole._no_split_modules}
        expected = accelerate.infer_auto_device_map(whole, **options)
        folder = tmp_path / str(limit)
        auto = {"device_map": "auto", "max_memory": {"cpu": limit}, "offload_folder": str(folder)}
        model = load(path, **auto)
        assert getattr(model, "hf_device_map", {"": "cpu"}) == expected  # not set for a single device
        differs += accelerate.infer_auto_device_map(dense, **options) != expected
        assert torch.equal(logits(model), logits(whole))
    assert differs


def test_auto_keeps_all_in_memory_where_there_is_room(path, load, whole, logits):
    model = load(path, dtype=torch.bfloat16, device_map="auto")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), logits(whole))


def test_experts_on_disk_are_packed_there_and_read_as_they_are(path, whole, load, tmp_path, logits):
    experts = experts_of(whole)
    options = {"device_map": map_of(whole, *experts), "offload_folder": str(tmp_path / "offload")}
    model = load(path, dtype=torch.bfloat16, **options)
    assert torch.equal(logits(model), logits(whole))
    assert {name for name, parameter in model.named_parameters() if parameter.is_meta} == {
        f"{name}.{key}" for name in experts for key, _ in whole.get_submodule(name).named_parameters(recurse=False)
    }
    tensors, _ = stored(model)
    for name in experts:
        for key, expected in whole.get_submodule(name).named_parameters(recurse=False):
            assert tensors[f"{name}.{key}"].dtype == expected.dtype
            assert torch.equal(tensors[f"{name}.{key}"].view(expected.shape), expected)
    hf_mxfp4.assert_packed(model)
    assert {row.layout for row in hf_mxfp4.packed_report(model).rows} == {"uint8 blocks and scales on meta"}
    assert hf_mxfp4.packed_report(model).bytes == hf_mxfp4.packed_report(whole).bytes


def test_everything_on_disk_generates_and_saves_what_is_in_memory(path, whole, load, tmp_path, tokens, state):
    model = load(path, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=str(tmp_path / "offload"))
    assert all(parameter.is_meta for parameter in model.parameters())
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(model.generate(tokens, **options), whole.generate(tokens, **options))
    model.save_pretrained(tmp_path / "saved")
    expected = state(whole)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("save_format", ["hf_mxfp4", "gpt-oss"])
def test_stacks_that_a_file_holds_as_they_are_stay_there(
    save_format, family, source, packed_folder, load, tmp_path, logits
):
    """They are not written again, and the model can be saved over the file that it reads them from."""
    if save_format == "gpt-oss" and family != "gpt_oss":
        pytest.skip("the layout is for gpt-oss models")
    folder = packed_folder(source, save_format=save_format)
    whole = load(folder, dtype=torch.bfloat16)
    options = {"device_map": map_of(whole, *experts_of(whole)), "offload_folder": str(tmp_path / "offload")}
    model = load(folder, dtype=torch.bfloat16, **options)
    _, folders = stored(model)
    packed = {name for name in folders if name.endswith(("_blocks", "_scales"))}
    assert packed == {name for name, _ in whole.named_parameters() if name.endswith(("_blocks", "_scales"))}
    assert {folders[name] for name in packed} == {folder}
    expected = logits(whole)
    assert torch.equal(logits(model), expected)
    model.save_pretrained(folder)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder)), expected)
    assert torch.equal(logits(model), expected)


def test_a_wrong_shape_is_found_in_stacks_that_stay_on_disk(sources, packed_folder, load, edit):
    folder = packed_folder(sources["qwen3_moe"], save_format="hf_mxfp4")
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    edit(folder, lambda tensors: tensors | {name: tensors[name][..., :-16].contiguous()})
    with pytest.raises((hf_mxfp4.CheckpointError, RuntimeError)) as error:
        load(folder, device_map={"": "disk"})
    assert "down_proj" in str(error.value)


def test_a_dense_pytorch_folder_is_quantized_to_disk(sources, load, tmp_path, logits):
    """Nothing of it can be read in place."""
    dense = AutoModelForCausalLM.from_pretrained(sources["qwen3_moe"])
    torch.save(dense.state_dict(), tmp_path / "pytorch_model.bin")
    dense.config.save_pretrained(tmp_path)
    model = load(tmp_path, device_map={"": "disk"}, offload_folder=str(tmp_path / "offload"))
    assert torch.equal(logits(model), logits(load(sources["qwen3_moe"])))


def test_cpu_offload(whole, load, path, logits):
    model = accelerate.cpu_offload(load(path, dtype=torch.bfloat16), execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), logits(whole))


def test_disk_offload_writes_the_packed_bytes(whole, load, path, logits, tmp_path, state):
    model = accelerate.disk_offload(load(path, dtype=torch.bfloat16), tmp_path / "offload", execution_device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(logits(model), logits(whole))
    index = accelerate.utils.OffloadedWeightsLoader(save_folder=tmp_path / "offload").index
    for name, expected in state(whole).items():
        tensor = load_offloaded_weight(str(tmp_path / "offload" / f"{name}.dat"), index[name])
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


def test_dispatch_model_by_a_map_that_accelerate_made(whole, load, path, logits, tmp_path):
    model = load(path, dtype=torch.bfloat16)
    limits = {"cpu": thresholds(whole)[0]}
    split = accelerate.infer_auto_device_map(model, limits, no_split_module_classes=model._no_split_modules)
    assert set(split.values()) == {"cpu", "disk"}
    model = accelerate.dispatch_model(model, split, main_device="cpu", offload_dir=tmp_path / "offload")
    assert model.hf_device_map == split
    assert any(parameter.is_meta for name, parameter in model.named_parameters() if "_blocks" in name)
    assert torch.equal(logits(model), logits(whole))


def test_hooks_can_be_taken_off_again(whole, load, path, logits, state):
    model = accelerate.cpu_offload(load(path, dtype=torch.bfloat16), execution_device="cpu")
    logits(model)
    accelerate.hooks.remove_hook_from_submodules(model)
    expected = state(whole)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
    assert torch.equal(logits(model), logits(whole))
