"""benchmarks/gpu_check.py: its dry run, in Triton's interpreter, and that it fails when kernels are wrong."""

import importlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in :RuntimeWarning")

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu_check.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def correctness(script):
    return importlib.import_module("gpu.correctness")


@pytest.fixture
def run(script, tmp_path):
    return script.Run(script.Device(dry=True), script.TINY, 600, tmp_path / "found.json")


def test_a_dry_run_passes_and_writes_every_block(script, tmp_path):
    path = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--dry-run", "--json", str(path)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["passed"]
    assert found["dry_run"]
    assert {"gpu", "driver", "torch", "triton", "transformers", "hf_mxfp4", "commit"} <= set(found["where"])
    assert list(found["blocks"]) == list(script.BLOCKS)
    for name, block in found["blocks"].items():
        assert block["status"] == "passed", name
        assert block["checks"] or block["figures"] or block["notes"], name
    for name in ("decode", "prefill", "models"):
        assert all(figure["us"] > 0 for figure in found["blocks"][name]["figures"])


def sabotaged_bits(out):
    """As if one weight's last bit were wrong."""
    out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(9.0))
    return out


def swapped_columns(out):
    """As if two lanes stood in each other's place."""
    return out[:, [1, 0, *range(2, out.shape[1])]]


def nothing(out):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize("sabotage", [sabotaged_bits, swapped_columns, nothing])
def test_a_wrong_product_fails_the_read_back(sabotage, correctness, run, monkeypatch):
    product, cases = correctness.triton.grouped_linear, correctness.read_back_cases
    monkeypatch.setattr(correctness.triton, "grouped_linear", lambda *given: sabotage(product(*given)))
    monkeypatch.setattr(correctness, "read_back_cases", lambda *given: itertools.islice(cases(*given), 1))
    block = run.block("read-back", correctness.read_back)
    assert block.status == "failed"
    assert [check["ok"] for check in block.checks] == [True, False]
    assert not run.passed
    assert json.loads(run.path.read_text())["blocks"]["read-back"]["status"] == "failed"


def test_a_wrong_decode_here_fails_the_read_back(correctness, run, monkeypatch):
    decode = correctness.decode_float64
    monkeypatch.setattr(correctness, "decode_float64", lambda *packed: 2 * decode(*packed))
    monkeypatch.setattr(correctness, "read_back_cases", lambda *given: iter(()))
    assert run.block("read-back", correctness.read_back).status == "failed"


def test_a_result_off_or_not_repeated_fails(script, correctness):
    right = torch.ones(2, 4)
    for got, ok in (((right, right), True), ((right * 1.1, right * 1.1), False), ((right, right + 1e-6), False)):
        results = iter(got)
        block = script.Block("accuracy")
        correctness.compare(
            block, correctness.Case("a case", lambda results=results: next(results), lambda: right, 1e-3)
        )
        block.close()
        assert block.status == ("passed" if ok else "failed")


def test_what_is_not_required_fails_nothing(script, correctness):
    block = script.Block("accuracy")
    correctness.compare(
        block, correctness.Case("a case", lambda: nothing(None), lambda: torch.ones(1), 1e-3, required=False)
    )
    block.close()
    assert block.status == "passed"
    assert "no such instruction" in block.checks[0]["detail"]


def test_a_block_that_raises_is_an_error_and_one_without_time_is_skipped(script, run):
    assert run.block("ceilings", lambda *given: nothing(None)).status == "error"
    assert not run.passed
    run.stop = 0
    assert run.block("models", script.models).status == "skipped"
    assert list(json.loads(run.path.read_text())["blocks"]) == ["ceilings", "models"]


def test_the_command_exits_with_1_when_a_block_failed(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--dry-run"])
    monkeypatch.setattr(script, "BLOCKS", {"ceilings": lambda run, block: block.check("a check", False, "wrong")})
    assert script.main() == 1


def test_shares_of_what_is_compiled_ahead_are_all_of_it(script, monkeypatch):
    ran = []
    monkeypatch.setattr(script, "kernel_calls", lambda *given: [lambda n=n: ran.append(n) for n in range(7)])
    device = script.Device(dry=True)
    assert [script.compile_share(device, script.TINY, share, 3) for share in range(3)] == [3, 2, 2]
    assert sorted(ran) == list(range(7))
