"""The quality gate on the shipped model, and the comparison it rests on."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import hf_mxfp4
from hf_mxfp4 import gate


class Fixed(nn.Module):
    """A language model that always predicts the same."""

    def __init__(self, probabilities):
        super().__init__()
        self.logits = torch.tensor(probabilities).log()

    def forward(self, tokens):
        return SimpleNamespace(logits=self.logits.expand(*tokens.shape, -1))


def test_shipped_model_passes_the_gate():
    result = gate.run(hf_mxfp4.demo_model_path())
    assert result.failures() == []
    assert result.default.tokens > 40_000
    assert 0.01 < result.default.kl <= 0.0300
    assert result.default.top1 >= 0.85
    assert result.default.kl <= 0.93 * result.floor.kl


def test_comparison_against_figures_worked_out_by_hand():
    quality = gate.compare(Fixed([0.5, 0.25, 0.25]), Fixed([0.25, 0.5, 0.25]), torch.zeros(300, dtype=torch.int64))
    assert quality.tokens == 256  # two whole windows
    assert quality.kl == pytest.approx(0.5 * torch.tensor(2.0).log().item() - 0.25 * torch.tensor(2.0).log().item())
    assert quality.top1 == 0.0
    same = gate.compare(Fixed([0.5, 0.25, 0.25]), Fixed([0.5, 0.25, 0.25]), torch.zeros(128, dtype=torch.int64))
    assert (same.kl, same.top1) == (pytest.approx(0.0, abs=1e-12), 1.0)


def test_each_limit_is_named_when_it_does_not_hold():
    good, bad = gate.Quality(0.02, 0.9, 128), gate.Quality(0.04, 0.8, 128)
    assert gate.GateResult(good, bad).failures() == []
    messages = gate.GateResult(bad, bad).failures()
    assert [message.split()[0] for message in messages] == ["KL", "top-1", "KL"]


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="100 tokens are less than a window of 128"):
        gate.compare(Fixed([1.0]), Fixed([1.0]), torch.zeros(100, dtype=torch.int64))
