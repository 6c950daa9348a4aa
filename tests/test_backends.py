"""The choice of a backend: made by one function, which says why and can be overruled."""

import pytest
import torch

from hf_mxfp4 import MXFP4Experts
from hf_mxfp4.backends import BACKENDS, choose, unavailable

MISSING = [name for name in BACKENDS if unavailable(name)]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_finds_a_backend_and_says_why(device):
    choice = choose("auto", device)
    assert unavailable(choice.name) is None
    assert device in choice.reason


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
    with pytest.raises(ValueError, match=f"backend is '{name}', but {unavailable(name)}"):
        choose(name, "cpu")


def test_experts_pass_their_request_on_and_never_fall_back(stock_experts, monkeypatch):
    arguments = torch.zeros(1, 64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    forced = MXFP4Experts.from_dense(stock_experts("mixtral"), backend="nonsense")
    with pytest.raises(ValueError, match="backend is 'nonsense'"):
        forced(*arguments)
    monkeypatch.setenv("HF_MXFP4_BACKEND", "reference")
    forced(*arguments)
    assert forced.backend_choice("cpu").reason == "asked for by HF_MXFP4_BACKEND"
