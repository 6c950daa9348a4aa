"""A save that fails or is killed leaves what was there, whole; one that works leaves nothing of an older one."""

import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_mxfp4
from hf_mxfp4.quantizer import staging


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture
def target(sources, packed_folder):
    """A saved packed model, by another rule than the models that the tests save."""
    return packed_folder(sources["qwen3_moe"], "target", scale_rule="floor")


@pytest.fixture
def model(sources, load):
    return load(sources["qwen3_moe"], dtype=torch.bfloat16)


def assert_is_whole(folder, before):
    assert contents(folder) == before
    assert not (folder / staging.STAGING).exists()
    hf_mxfp4.assert_packed(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()], ids=["full", "interrupt"])
@pytest.mark.parametrize("shard", [0, 2])
def test_save_that_fails_after_some_shards_leaves_the_old_checkpoint(target, model, monkeypatch, error, shard):
    before = contents(target)
    written, original = [], transformers_save_file()

    def failing(tensors, filename, **kwargs):
        if len(written) == shard:
            raise error
        written.append(filename)
        original(tensors, filename, **kwargs)

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", failing)
    with pytest.raises(type(error)):
        model.save_pretrained(target, max_shard_size="30KB")
    assert len(written) == shard
    assert_is_whole(target, before)


def transformers_save_file():
    import transformers.modeling_utils

    return transformers.modeling_utils.safe_save_file


def test_target_on_which_a_file_cannot_grow_is_left_whole(target, sources):
    """As on a full disk: the system refuses to write past 100 kB, which the config fits and the weights do not."""
    before = contents(target)
    code = (
        "import sys, signal, resource, hf_mxfp4\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=hf_mxfp4.MXFP4Config())\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "model.save_pretrained(sys.argv[2])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, sources["qwen3_moe"], str(target)], capture_output=True, text=True
    )
    assert result.returncode != 0
    assert "File too large" in result.stderr
    assert_is_whole(target, before)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("error", [OSError("Input/output error"), KeyboardInterrupt()], ids=["disk", "interrupt"])
def test_save_that_fails_while_files_change_places_puts_the_old_ones_back(target, model, monkeypatch, error):
    before, calls, stop = contents(target), 0, 0
    original = Path.replace

    def failing(self, to):
        nonlocal calls
        calls += 1
        if calls == stop:
            raise error
        return original(self, to)

    for stop in itertools.count(1):  # noqa: B007  # at every rename in turn
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", failing)
            try:
                model.save_pretrained(target, max_shard_size="30KB")
            except type(error):
                assert contents(target) == before
                assert not (target / staging.STAGING).exists()
            else:
                break
    assert stop > 15  # the old ones out, the new ones in
    assert not (target / staging.STAGING).exists()
    again = AutoModelForCausalLM.from_pretrained(target)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
@pytest.mark.parametrize("rename", [2, 5, 12])
def test_save_killed_while_files_change_places_is_undone_by_the_next(target, model, sources, monkeypatch, rename):
    before = contents(target)
    code = (
        "import os, pathlib, signal, sys, hf_mxfp4\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=hf_mxfp4.MXFP4Config())\n"
        "replace, calls = pathlib.Path.replace, []\n"
        "def killing(self, to):\n"
        "    calls.append(to)\n"
        "    if len(calls) == int(sys.argv[3]): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return replace(self, to)\n"
        "pathlib.Path.replace = killing\n"
        "model.save_pretrained(sys.argv[2], max_shard_size='30KB')\n"
    )
    result = subprocess.run([sys.executable, "-c", code, sources["qwen3_moe"], str(target), str(rename)])
    assert result.returncode == -signal.SIGKILL
    assert (target / staging.STAGING).exists()
    if rename > 2:
        with pytest.raises((OSError, ValueError), match="config"):
            AutoModelForCausalLM.from_pretrained(target)

    def failing(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", failing)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(target)
    assert_is_whole(target, before)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_killed_save_leaves_the_old_checkpoint_and_the_next_one_cleans_up(target, model, sources):
    before = contents(target)
    code = (
        "import sys, time, hf_mxfp4, transformers.modeling_utils as m\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=hf_mxfp4.MXFP4Config())\n"
        "write = m.safe_save_file\n"
        "def slow(*args, **kwargs):\n"
        "    write(*args, **kwargs); print('shard', flush=True); time.sleep(60)\n"
        "m.safe_save_file = slow\n"
        "model.save_pretrained(sys.argv[2], max_shard_size='30KB')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, sources["qwen3_moe"], str(target)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "shard\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert contents(target) == before
    hf_mxfp4.assert_packed(AutoModelForCausalLM.from_pretrained(target))
    assert (target / staging.STAGING).exists()
    model.save_pretrained(target)
    assert not (target / staging.STAGING).exists()
    assert contents(target)["model.safetensors"] != before["model.safetensors"]


def test_failed_save_to_a_new_folder_leaves_no_folder(model, tmp_path, monkeypatch):
    def failing(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", failing)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_read_only_target_is_named(model):
    nobody = 65534
    with tempfile.TemporaryDirectory() as temporary:  # not in tmp_path, which only its owner may enter
        target = Path(temporary) / "target"
        model.save_pretrained(target)
        before = contents(target)
        Path(temporary).chmod(0o755)
        target.chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:  # who may write anywhere
                os.seteuid(nobody)
            with pytest.raises(PermissionError, match=str(target)):
                model.save_pretrained(target)
        finally:
            os.seteuid(user)
            target.chmod(0o755)
        assert contents(target) == before


def test_target_that_is_no_folder_is_named(model, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        model.save_pretrained(tmp_path / "file" / "inside")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(("first", "second"), [("30KB", "1GB"), ("1GB", "30KB"), ("30KB", "60KB")])
def test_no_weight_file_of_an_older_save_is_left(model, tmp_path, first, second):
    model.save_pretrained(tmp_path, max_shard_size=first)
    (tmp_path / "tokenizer.json").write_text("mine")
    model.save_pretrained(tmp_path, max_shard_size=second)
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
    files = sorted(tmp_path.glob("*.safetensors"))
    names = [name for file in files for name in load_file(file)]
    assert len(names) == len(set(names))
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(files) > 1)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in model.state_dict().items())


def test_saves_of_other_models_are_stock(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "save", None)
    AutoModelForCausalLM.from_pretrained(sources["qwen3_moe"]).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert PreTrainedModel.save_pretrained.__wrapped__.__doc__ == PreTrainedModel.save_pretrained.__doc__


def test_interrupted_load_leaves_nothing_behind(sources, load, monkeypatch, tmp_path):
    calls, original = [], hf_mxfp4.mxfp4.quantize

    def interrupt(*args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr("hf_mxfp4.mxfp4.quantize", interrupt)
    source, start = contents(Path(sources["qwen3_moe"])), time.time()
    with pytest.raises(KeyboardInterrupt):
        load(sources["qwen3_moe"], device_map={"": "cpu", "model.layers.1": "disk"}, offload_folder=tmp_path)
    monkeypatch.undo()
    assert time.time() - start < 30
    assert contents(Path(sources["qwen3_moe"])) == source
    assert list(tmp_path.iterdir()) == []
    hf_mxfp4.assert_packed(load(sources["qwen3_moe"]))
