"""The choice of a backend: made by one function, which says why and can be overruled."""

import _ctypes
import contextlib
import logging
import shutil

import pytest
import torch

from hf_mxfp4 import MXFP4Experts, backends, mxfp4_expert_linear, packed_report
from hf_mxfp4.backends import BACKENDS, choose, cpu, unavailable
from hf_mxfp4.cli import main

MISSING = [name for name in BACKENDS if unavailable(name)]


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_auto_finds_a_backend_and_says_why(device):
    choice = choose("auto", device)
    assert unavailable(choice.name, device) is None
    reasons = {
        "cpu": "native kernel, ",
        "triton": "Triton kernels, interpreter",
        "reference": f"plain torch on {device}: ",
    }
    assert choice.reason.startswith(reasons[choice.name])


def test_asking_is_a_reason():
    assert choose("reference", "cpu") == ("reference", "asked for by backend")


@pytest.mark.parametrize("requested", ["auto", "reference", "cpu", "nonsense"])
def test_the_environment_variable_comes_before_the_request(requested, monkeypatch):
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    assert choose(requested, "cpu") == ("reference", "asked for by HF_MXFP4_BACKEND")


@pytest.mark.parametrize("requested", ["auto", "reference"])
@pytest.mark.parametrize("value", ["nonsense", *MISSING])
def test_a_variable_that_cannot_be_followed_raises_and_is_named(value, requested, monkeypatch):
    monkeypatch.setenv("HF_MXFP4_BACKEND", value)
    with pytest.raises(ValueError, match=f"HF_MXFP4_BACKEND is '{value}'"):
        choose(requested, "cpu")


def test_an_empty_variable_is_as_if_unset(monkeypatch):
    monkeypatch.setenv("HF_MXFP4_BACKEND", "")
    assert choose("reference", "cpu").reason == "asked for by backend"


def test_unknown_names_raise_and_the_known_ones_are_listed():
    with pytest.raises(ValueError, match=r"backend is 'cuda'; expected auto, reference, cpu, triton"):
        choose("cuda", "cuda")


@pytest.mark.parametrize("name", MISSING)
def test_a_backend_that_cannot_be_used_raises_and_says_why(name):
    with pytest.raises(ValueError, match=f"backend is '{name}', but {unavailable(name, 'cpu')}"):
        choose(name, "cpu")


def test_experts_pass_their_request_on_and_never_fall_back(stock_experts, monkeypatch):
    arguments = torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    forced = MXFP4Experts.from_dense(stock_experts("mixtral"), backend="nonsense")
    with pytest.raises(ValueError, match="backend is 'nonsense'"):
        forced(*arguments)
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    forced(*arguments)
    assert forced.backend_choice("cpu").reason == "asked for by HF_MXFP4_BACKEND"


# The native library, there or not

NATIVE = pytest.mark.skipif(unavailable("cpu") is not None, reason="no native kernels")


@pytest.fixture
def library_in(monkeypatch):
    """library_in(folder): the native library is looked for there from now on, as in a new process."""
    caches = cpu._library, cpu._native, backends._say_once

    def library_in(folder):
        monkeypatch.setattr(cpu, "_FOLDER", folder)
        for cached in caches:
            cached.cache_clear()

    yield library_in
    for cached in caches:
        cached.cache_clear()


@NATIVE
@pytest.mark.parametrize("name", cpu.INSTRUCTION_SETS)
def test_an_instruction_set_can_be_forced_or_says_what_can(name, monkeypatch):
    monkeypatch.setenv("HF_MXFP4_CPU_ISA", "scalar")
    assert choose("auto", "cpu") == ("cpu", "native kernel, scalar")
    monkeypatch.setenv("HF_MXFP4_CPU_ISA", name)
    with contextlib.suppress(ValueError):
        assert choose("auto", "cpu") == ("cpu", f"native kernel, {name}")
        assert choose("cpu", "cpu") == ("cpu", f"asked for by backend, {name}")
        return
    with pytest.raises(
        ValueError, match=f"HF_MXFP4_CPU_ISA is '{name}', which cannot be used here; usable are .*scalar"
    ):
        choose("auto", "cpu")


@NATIVE
def test_an_instruction_set_that_does_not_exist_is_refused(monkeypatch, capsys, stock_experts):
    monkeypatch.setenv("HF_MXFP4_CPU_ISA", "avx1024")
    message = "HF_MXFP4_CPU_ISA is 'avx1024'; expected one of avx512_bf16, avx512, avx2, neon, scalar"
    for call in (
        lambda: choose("auto", "cpu"),
        lambda: choose("cpu", "cpu"),
        lambda: MXFP4Experts(stock_experts("mixtral"))(
            torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert choose("reference", "cpu").name == "reference"
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert message in out
    assert "something has to be put right" in out


@NATIVE
def test_an_empty_instruction_set_is_as_if_unset(monkeypatch):
    monkeypatch.setenv("HF_MXFP4_CPU_ISA", "")
    best = choose("auto", "cpu")
    monkeypatch.delenv("HF_MXFP4_CPU_ISA")
    assert choose("auto", "cpu") == best


def broken_library(folder):
    (folder / "_native.abi3.so").write_bytes(b"not a library")


def other_library(folder):
    """A library that is sound, and somebody else's."""
    shutil.copy(_ctypes.__file__, folder / "_native.abi3.so")


MISSING_LIBRARY = [
    pytest.param(lambda folder: None, "it was not built", id="nothing"),
    pytest.param(
        lambda folder: (folder / "native_failure.txt").write_text("it could not be built: no compiler, see\n"),
        "it could not be built: no compiler, see",
        id="a failure that was written down",
    ),
    pytest.param(broken_library, "_native.abi3.so cannot be loaded: ", id="a file that is no library"),
    pytest.param(other_library, "_native.abi3.so cannot be loaded: ", id="a library of another kind"),
]


@pytest.mark.parametrize(("prepare", "why"), MISSING_LIBRARY)
def test_without_the_library_plain_torch_runs_and_says_why(
    prepare, why, library_in, tmp_path, stock_experts, caplog, capsys
):
    """Once in the log, and wherever somebody asks."""
    hidden, ids, weights = torch.randn(3, 64), torch.tensor([[0], [3], [1]]), torch.ones(3, 1)
    packed = MXFP4Experts.from_dense(stock_experts("mixtral"))
    expected = packed(hidden, ids, weights)
    prepare(tmp_path)
    library_in(tmp_path)
    with caplog.at_level(logging.WARNING, logger="hf_mxfp4"):
        choice = choose("auto", "cpu")
        assert choice.name == "reference"
        assert choice.reason.startswith(f"plain torch on cpu: the native kernel is not there: {why}")
        other = MXFP4Experts.from_dense(stock_experts("mixtral"))
        for _ in range(3):
            torch.testing.assert_close(other(hidden, ids, weights), expected, rtol=1e-5, atol=1e-4)
        blocks, scales = other.packed("down_proj")
        mxfp4_expert_linear(torch.randn(3, 96), blocks, scales, ids, weights, torch.zeros(3, 64))
    said = [record.getMessage() for record in caplog.records if record.name == "hf_mxfp4"]
    assert len(said) == 1
    assert why in said[0]
    (row,) = packed_report(other, check=True).rows
    assert (row.backend, row.reason) == choice
    assert row.error < 1e-5
    assert why in str(packed_report(other))
    assert main(["doctor"]) == 0
    assert why in capsys.readouterr().out
    with pytest.raises(ValueError, match=f"backend is 'cpu', but the native kernel is not there: {why}"):
        choose("cpu", "cpu")


def test_a_forced_backend_that_is_missing_never_falls_back(library_in, tmp_path, stock_experts, monkeypatch):
    library_in(tmp_path)
    monkeypatch.setenv("HF_MXFP4_BACKEND", "cpu")
    with pytest.raises(ValueError, match="HF_MXFP4_BACKEND is 'cpu', but the native kernel is not there"):
        MXFP4Experts.from_dense(stock_experts("mixtral"))(
            torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
        )


def test_an_instruction_set_is_not_asked_for_where_there_is_no_library(library_in, tmp_path, monkeypatch):
    """Plain torch needs none: nothing fails that ran without the variable."""
    library_in(tmp_path)
    monkeypatch.setenv("HF_MXFP4_CPU_ISA", "neon")
    assert choose("auto", "cpu").name == "reference"


@NATIVE
def test_the_reference_runs_where_it_is_asked_for(monkeypatch, stock_experts):
    packed = MXFP4Experts.from_dense(stock_experts("mixtral"), backend="reference")
    variable = MXFP4Experts.from_dense(stock_experts("mixtral"))
    monkeypatch.setattr(cpu, "grouped_linear", None)
    monkeypatch.setattr(cpu, "experts_mlp", None)
    arguments = torch.randn(3, 64), torch.tensor([[0], [3], [1]]), torch.ones(3, 1)
    packed(*arguments)
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    assert torch.equal(variable(*arguments), packed(*arguments))


def test_native_kernels_are_for_tensors_on_cpu():
    with pytest.raises(ValueError, match="backend is 'cpu', but it is for tensors on cpu, and these are on cuda"):
        choose("cpu", "cuda")
