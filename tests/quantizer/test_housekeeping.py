"""What surrounds a model in daily use: its size, its map, copies, child processes, the meta device, uploads."""

import copy
import filecmp
import io
import json
import multiprocessing
import os
import pickle
from pathlib import Path

import accelerate
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import hf_mxfp4


@pytest.fixture
def packed(source, load):
    return load(source, dtype=torch.bfloat16)


# Size and place


def test_footprint_is_that_of_the_file(packed, tmp_path):
    """Tensors of the file, which has no names for the few buffers that are made anew."""
    packed.save_pretrained(tmp_path)
    written = {name: tensor.nbytes for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    buffers = sum(buffer.nbytes for name, buffer in packed.named_buffers() if name not in packed.state_dict())
    assert packed.get_memory_footprint() == sum(written.values()) + buffers
    assert packed.get_memory_footprint(return_buffers=False) == sum(p.nbytes for p in packed.parameters())
    experts = sum(p.nbytes for n, p in packed.named_parameters() if n.endswith(("_blocks", "_scales")))
    report = hf_mxfp4.packed_report(packed)
    assert experts == report.bytes == report.weights * 17 // 32


def test_footprint_of_an_offloaded_model_is_that_of_the_model(source, load, packed, tmp_path):
    model = load(source, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=str(tmp_path))
    assert model.get_memory_footprint() == packed.get_memory_footprint()


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_device_map_says_where_each_parameter_is(source, packed_folder, load, tmp_path, kind):
    path = source if kind == "dense" else packed_folder(source)
    names = [name for name, _ in load(path).named_parameters()]
    on_disk = {name.rpartition(".")[0] for name in names if name.endswith(("_blocks", "_scales"))}
    device_map = {name: "disk" if name.rpartition(".")[0] in on_disk else "cpu" for name in names}
    device_map = {name.rpartition(".")[0] or name: device for name, device in device_map.items()}
    whole = load(path)
    device_map |= {name: "cpu" for name, module in whole.named_modules() if module._buffers and name not in device_map}
    model = load(path, device_map=device_map, offload_folder=str(tmp_path / "offload"))
    assert model.hf_device_map == device_map
    for name, parameter in model.named_parameters():
        owner = next(key for key in sorted(device_map, key=len, reverse=True) if f"{name}.".startswith(f"{key}."))
        assert parameter.device.type == {"cpu": "cpu", "disk": "meta"}[model.hf_device_map[owner]]


# Copies and child processes


def test_a_copy_shares_no_byte_with_the_model(packed, logits):
    expected = logits(packed)
    copied = copy.deepcopy(packed)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if name.endswith("_blocks"):
                parameter.fill_(0x77)
    assert torch.equal(logits(packed), expected)
    assert not torch.equal(logits(copied), expected)


def test_a_copy_tells_and_saves_what_the_model_does(packed, tmp_path, logits):
    logits(packed)  # by which a backend has been chosen
    for number, copied in enumerate((copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)))):
        assert hf_mxfp4.packed_report(copied) == hf_mxfp4.packed_report(packed)
        copied.save_pretrained(tmp_path / str(number))
        packed.save_pretrained(tmp_path / "model")
        assert same_files(tmp_path / str(number), tmp_path / "model")


def test_torch_save_of_a_whole_model(packed, logits):
    file = io.BytesIO()
    torch.save(packed, file)
    file.seek(0)
    assert torch.equal(logits(torch.load(file, weights_only=False)), logits(packed))


def test_copies_of_an_offloaded_model_read_its_files(source, load, packed, tmp_path, logits):
    model = load(source, dtype=torch.bfloat16, device_map={"": "disk"}, offload_folder=str(tmp_path))
    expected = logits(model)
    assert torch.equal(expected, logits(packed))
    assert torch.equal(logits(copy.deepcopy(model)), expected)


def run_in_child(model, tokens, queue):
    with torch.no_grad():
        queue.put(model(tokens).logits.float().numpy())


@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_computes_the_same(source, load, tokens, logits, backend, used_before):
    model = load(source, config=hf_mxfp4.MXFP4Config(backend=backend))
    if used_before:
        logits(model)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=run_in_child, args=(model, tokens, queue))
    child.start()
    got = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert torch.equal(torch.from_numpy(got), logits(model).float())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_of_os_fork_computes_and_the_parent_goes_on(sources, load, logits):
    model = load(sources["qwen3_moe"])
    expected = logits(model)
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(logits(model), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(logits(model), expected)


# Meta and back


def test_to_meta_and_back_by_assignment(packed, state, logits):
    expected, tensors = logits(packed), state(packed)
    buffers = {name: buffer.clone() for name, buffer in packed.named_buffers()}
    packed.to("meta")
    assert {parameter.device.type for parameter in packed.parameters()} == {"meta"}
    assert all(p.dtype is torch.uint8 for n, p in packed.named_parameters() if n.endswith(("_blocks", "_scales")))
    result = packed.load_state_dict(tensors, assign=True)
    assert not result.missing_keys
    assert not result.unexpected_keys
    for name, buffer in buffers.items():  # a state dict has none of those that are made anew
        owner, _, leaf = name.rpartition(".")
        packed.get_submodule(owner).register_buffer(leaf, buffer, persistent=name in tensors)
    for name, parameter in packed.named_parameters():
        assert parameter.data_ptr() == tensors[name].data_ptr(), name
        assert parameter.requires_grad == tensors[name].is_floating_point()
    hf_mxfp4.assert_packed(packed)
    assert torch.equal(logits(packed), expected)


def test_to_empty_and_filled_by_a_copy(packed, state, logits):
    expected, tensors = logits(packed), state(packed)
    buffers = {name: buffer.clone() for name, buffer in packed.named_buffers()}
    packed.to("meta").to_empty(device="cpu")
    packed.load_state_dict(tensors)
    for name, buffer in packed.named_buffers():
        buffer.copy_(buffers[name])
    assert torch.equal(logits(packed), expected)


def test_weights_of_another_model_can_be_loaded_strictly_and_not_dense_ones(source, packed, load, state, logits):
    other = load(source, dtype=torch.bfloat16, config=hf_mxfp4.MXFP4Config(scale_rule="floor"))
    packed.load_state_dict(state(other), strict=True)
    assert torch.equal(logits(packed), logits(other))
    with pytest.raises(RuntimeError, match="_blocks"):
        packed.load_state_dict(AutoModelForCausalLM.from_pretrained(source).state_dict())


def test_a_model_made_with_empty_weights_has_dense_experts(source, load):
    """A quantizer acts on loads alone; so a config alone makes a model that the report calls dense."""
    with accelerate.init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    assert not hf_mxfp4.packed_report(model).packed


# Uploads


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the Hub: what would be committed is copied to a folder, whatever way it takes there."""
    uploads = tmp_path / "hub"

    def create_repo(self, repo_id, **kwargs):
        (uploads / repo_id).mkdir(parents=True, exist_ok=True)
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{repo_id}")

    def create_commit(self, repo_id, operations, **kwargs):
        for operation in operations:
            target = uploads / repo_id / operation.path_in_repo
            target.parent.mkdir(parents=True, exist_ok=True)
            with operation.as_file() as file:
                target.write_bytes(file.read())
        return huggingface_hub.CommitInfo(
            commit_url=f"https://huggingface.co/{repo_id}/commit/0", commit_message="", commit_description="", oid="0"
        )

    names = {"create_repo": create_repo, "create_commit": create_commit}
    for name, function in names.items():
        monkeypatch.setattr(huggingface_hub.HfApi, name, function)
    stand_in = huggingface_hub.HfApi()
    for module in ("transformers.utils.hub", "transformers.modeling_utils", "huggingface_hub"):
        for name in names:
            monkeypatch.setattr(f"{module}.{name}", getattr(stand_in, name), raising=False)
    return uploads


def same_files(left, right):
    """Whether two folders hold the same files, byte for byte, but for a model card."""
    files = [sorted(path.name for path in folder.iterdir() if path.suffix != ".md") for folder in (left, right)]
    return files[0] == files[1] and not filecmp.cmpfiles(left, right, files[0], shallow=False)[1]


@pytest.mark.parametrize("size", ["5GB", "30KB"], ids=["one file", "shards"])
def test_push_to_hub_writes_what_save_pretrained_writes(packed, hub, tmp_path, size, logits):
    packed.save_pretrained(tmp_path / "saved", max_shard_size=size)
    packed.push_to_hub("someone/model", max_shard_size=size)
    pushed = hub / "someone" / "model"
    assert same_files(pushed, tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(pushed)
    hf_mxfp4.assert_packed(again)
    assert torch.equal(logits(again), logits(packed))


def test_save_pretrained_that_pushes_uploads_what_it_wrote(sources, load, hub, tmp_path):
    packed = load(sources["gpt_oss"], dtype=torch.bfloat16)
    packed.save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="someone/model")
    pushed = hub / "someone" / "model"
    assert same_files(pushed, tmp_path / "saved")
    stored = json.loads(Path(pushed / "config.json").read_text())["quantization_config"]
    assert stored["quant_method"] == "mxfp4"
