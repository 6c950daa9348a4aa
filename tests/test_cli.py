"""The commands, their exit status, and that the demo needs no network, no GPU, no compiler and no optional package."""

import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_mxfp4
from hf_mxfp4.backends import choose, unavailable
from hf_mxfp4.cli import COMMANDS, demo, main


def test_demo_passes_and_shows_all_parts(capsys):
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    parts = (
        "dense experts",
        "packed experts",
        "tokens/s",
        "packed report",
        "4.25",
        "all bytes equal",
        "KL",
        "demo passed",
    )
    for part in parts:
        assert part in out


BARE = """
import socket, sys

def closed(*args, **kwargs):
    raise OSError("sockets are closed")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = closed
for name in ("triton", "kernels", "compressed_tensors", "gguf", "ml_dtypes", "peft"):
    sys.modules[name] = None  # importing it raises ImportError
from hf_mxfp4.cli import main
sys.exit(main(["demo"]))
"""


def test_demo_without_network_optional_packages_and_compiler(tmp_path):
    environment = {"PATH": str(tmp_path), "CC": "/nonexistent", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    result = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "demo passed" in result.stdout


def test_demo_takes_another_model_and_prompt(tmp_path, capsys):
    source = hf_mxfp4.demo_model_path()
    assert main(["demo", "--model", source, "--prompt", "JULIET.\n", "--tokens", "5"]) == 0
    out = capsys.readouterr().out
    assert "JULIET." in out
    assert "quality gate" not in out


def test_demo_of_a_packed_model_compares_it_with_its_dense_one(tmp_path, capsys):
    source = hf_mxfp4.demo_model_path()
    AutoModelForCausalLM.from_pretrained(source, quantization_config=hf_mxfp4.MXFP4Config()).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path)
    assert main(["demo", "--model", str(tmp_path), "--tokens", "3"]) == 0
    smaller = re.search(r"([\d.]+) times smaller than dense", capsys.readouterr().out)
    assert float(smaller[1]) > 3


def test_demo_fails_when_a_byte_changes_between_save_and_reload(monkeypatch, capsys):
    original = demo._same_bits
    monkeypatch.setattr(demo, "_same_bits", lambda a, b: a.dtype is not torch.uint8 and original(a, b))
    assert main(["demo", "--model", hf_mxfp4.demo_model_path(), "--tokens", "2"]) == 1
    assert "FAILED: model.layers.0.mlp.experts.down_proj_blocks changed" in capsys.readouterr().out


def test_demo_fails_when_the_gate_does(monkeypatch, capsys):
    monkeypatch.setattr("hf_mxfp4.gate.KL_LIMIT", 0.001)
    assert main(["demo", "--tokens", "2"]) == 1
    assert "FAILED: KL 0.0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--tokens", "0"], "--tokens is 0"),
        (["demo", "--model", "{tmp}"], "hf-mxfp4 demo: "),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, tmp_path, capsys):
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_unknown_command_is_status_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["dance"])
    assert stop.value.code == 2
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_doctor_says_what_is_usable_and_why_not(capsys):
    choice = choose("auto", "cpu")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in (
        "transformers",
        "ok (>=5.17)",
        "reference            usable",
        f"cpu                  {unavailable('cpu') or 'usable'}",
        f"triton               {unavailable('triton') or 'usable in Triton'}",
        f"on cpu: {choice.name}, because {choice.reason}",
        "all that is needed",
    ):
        assert part in out


def test_doctor_fails_when_something_needed_is_too_old(monkeypatch, capsys):
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["transformers>=99"])
    assert main(["doctor"]) == 1
    assert "pip install 'transformers>=99'" in capsys.readouterr().out


def test_installed_command_runs():
    command = [sys.executable, "-c", "from hf_mxfp4.cli import main; raise SystemExit(main(['--version']))"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.strip() == f"hf_mxfp4 {hf_mxfp4.__version__}"


@pytest.mark.parametrize("command", ["demo", "doctor"])
def test_quiet_leaves_the_exit_status_alone(command, capsys):
    assert main([command, "--quiet"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_quiet(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "--quiet" in capsys.readouterr().out
