"""Recurrent layers: 3 steps, batch 2, 5 features in, 7 hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.probes.probe import layer, of

X, STATE = (3, 2, 5), (2, 7)
GATES = "the gates' products are MACs, biases and activations are not"


class _First(nn.Module):
    """A layer whose first result is its output."""

    def __init__(self, inner: nn.Module, lengths: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.inner, self.lengths = inner, lengths

    def forward(self, x: torch.Tensor) -> Any:
        if self.lengths:
            return self.inner(pack_padded_sequence(x, torch.tensor(self.lengths)))[0].data
        return self.inner(x)[0]


def _of(make: Callable[[], nn.Module], lengths: tuple[int, ...] = ()) -> Callable[[], nn.Module]:
    return lambda: _First(make(), lengths)


def _quantised() -> nn.Module:
    model = _First(nn.LSTM(5, 7)).eval()
    return torch.ao.quantization.quantize_dynamic(model, {nn.LSTM}, dtype=torch.qint8)


PROBES = (
    layer("nn.RNN", _of(lambda: nn.RNN(5, 7)), of(X), (3, 2, 7, 5 + 7), note=GATES),
    layer("nn.GRU", _of(lambda: nn.GRU(5, 7)), of(X), (3, 2, 3 * 7, 5 + 7), note=GATES),
    layer("nn.LSTM", _of(lambda: nn.LSTM(5, 7)), of(X), (3, 2, 4 * 7, 5 + 7), note=GATES),
    layer(
        "nn.LSTM, 2 layers, bidirectional",
        _of(lambda: nn.LSTM(5, 7, 2, bidirectional=True)),
        of(X),
        (3, 2, 2, 4 * 7, 5 + 7),
        (3, 2, 2, 4 * 7, 14 + 7),
        note=GATES,
    ),
    layer(
        "nn.LSTM(proj_size=4)",
        _of(lambda: nn.LSTM(5, 7, proj_size=4)),
        of(X),
        (3, 2, 4 * 7, 5 + 4),
        (3, 2, 7, 4),
        note="7·4 a step bring the state to 4 features, which are fed back; biases are not MACs",
    ),
    layer(
        "nn.LSTM, packed: 3 and 1 steps",
        _of(lambda: nn.LSTM(5, 7), lengths=(3, 1)),
        of(X),
        (4, 4 * 7, 5 + 7),
        note="4 steps run, not 6; " + GATES,
    ),
    layer(
        "nn.LSTM, float64",
        _of(lambda: nn.LSTM(5, 7).double()),
        of(X, dtype=torch.float64),
        (3, 2, 4 * 7, 5 + 7),
        note=GATES,
    ),
    layer("nn.LSTM, dynamically quantised", _quantised, of(X), (3, 2, 4 * 7, 5 + 7), note=GATES),
    layer("nn.RNNCell", lambda: nn.RNNCell(5, 7), of((2, 5), STATE), (2, 7, 5 + 7), note=GATES),
    layer("nn.GRUCell", lambda: nn.GRUCell(5, 7), of((2, 5), STATE), (2, 3 * 7, 5 + 7), note=GATES),
    layer(
        "nn.LSTMCell",
        lambda: _Cell(),
        of((2, 5)),
        (2, 4 * 7, 5 + 7),
        note=GATES,
    ),
)


class _Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(5, 7)

    def forward(self, x: torch.Tensor) -> Any:
        return self.cell(x)[0]
