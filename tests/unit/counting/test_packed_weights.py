"""Packed weights of quantised modules, which are not parameters."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from dispatch_flops import profile_model
from dispatch_flops.counting.packed_weights import packed_values

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.ao.quantization import quantize_dynamic

D, H = 3, 7
pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated


def quantized(model: nn.Module) -> nn.Module:
    return quantize_dynamic(model, {nn.Linear, nn.LSTM, nn.GRUCell})


def values(model: nn.Module) -> list[int]:
    return sorted(size for module in model.modules() for size in packed_values(module))


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(D, H)),
        nn.Sequential(nn.LSTM(D, H, num_layers=2, bidirectional=True)),
        nn.Sequential(nn.LSTM(H, H)),  # both weights have one shape
        nn.Sequential(nn.GRUCell(H, H)),
    ],
    ids=["linear", "lstm", "square lstm", "gru cell"],
)
def test_packed_values_of_a_quantised_model_are_those_of_its_parameters(model: nn.Module) -> None:
    expected = sorted(parameter.numel() for parameter in model.parameters())
    assert values(quantized(model)) == expected


def test_packed_values_of_a_model_with_parameters_are_empty() -> None:
    assert values(nn.Sequential(nn.Linear(D, H), nn.ReLU())) == []


def test_profile_of_a_quantised_model_notes_its_packed_weights() -> None:
    model = quantized(nn.Sequential(nn.Linear(D, H), nn.ReLU(), nn.Linear(H, D)))
    profile = profile_model(model, args=[torch.ones(2, D)])
    assert profile.total_params == 0
    assert f"4 packed weights and biases with {2 * D * H + H + D} values" in profile.notes[0]
    assert profile.uncalled_modules() == []


def test_holder_of_packed_weights_that_did_not_run_is_uncalled() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(D, H), nn.Linear(D, H)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.used(x)
            return out

    profile = profile_model(quantized(Half()), args=[torch.ones(2, D)])
    assert profile.uncalled_modules() == ["unused._packed_params"]
