"""Recurrent layers on the meta device, where torch runs them by other operators than devices do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile

LAYERS: dict[str, Any] = {
    "aten.lstm.input": nn.LSTM,
    "aten.gru.input": nn.GRU,
    "aten.rnn_tanh.input": nn.RNN,
    "aten.rnn_relu.input": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu"),
}


def memory_of(layer: nn.Module, x: torch.Tensor) -> MemoryProfile:
    model = nn.Sequential(layer).to(x.device)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(x)
    assert counter.profile.memory is not None
    return counter.profile.memory


@pytest.mark.parametrize("operator", LAYERS)
def test_recurrent_layer_on_meta_has_an_approximate_peak(operator: str) -> None:
    memory = memory_of(LAYERS[operator](3, 5), torch.randn(7, 2, 3, device="meta"))
    assert memory.decomposed == (operator,)
    assert memory.is_approximate and not memory.is_lower_bound


@pytest.mark.parametrize("operator", LAYERS)
def test_recurrent_layer_on_the_cpu_has_an_exact_peak(operator: str) -> None:
    memory = memory_of(LAYERS[operator](3, 5), torch.randn(7, 2, 3))
    assert memory.decomposed == () and not memory.is_approximate


def test_cell_on_meta_has_the_peak_of_the_cpu() -> None:
    on_meta = memory_of(nn.GRUCell(3, 5), torch.randn(2, 3, device="meta"))
    on_cpu = memory_of(nn.GRUCell(3, 5), torch.randn(2, 3))
    assert on_meta.decomposed == ()
    assert on_meta.peak_bytes == on_cpu.peak_bytes
