"""Recurrent networks cost what their definitions cost, every kind, fused or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.oracles.comparing import check, examples, flag, macs_of, tensor
from tests.oracles.counting import Count, count
from tests.oracles.recurrent import recurrent

KINDS = ("RNN", "GRU", "LSTM")
IN, HIDDEN, PROJECTED = 3, 4, 2


def _network(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return getattr(nn, kind)(IN, HIDDEN, batch_first=True, **options).double()


def _weights(network: Any) -> list[list[Mapping[str, torch.Tensor]]]:
    directions = ("", "_reverse") if network.bidirectional else ("",)
    return [
        [_cell(network, f"_l{layer}{direction}") for direction in directions]
        for layer in range(network.num_layers)
    ]


def _cell(network: Any, suffix: str) -> Mapping[str, torch.Tensor]:
    names = {"ih": "weight_ih", "hh": "weight_hh", "hr": "weight_hr"}
    names |= {"b_ih": "bias_ih", "b_hh": "bias_hh"}
    return {
        short: getattr(network, long + suffix)
        for short, long in names.items()
        if hasattr(network, long + suffix)
    }


def _expected(network: Any, x: torch.Tensor, lengths: list[int] | None = None) -> Count:
    kind = type(network).__name__
    lengths = lengths or [x.shape[1]] * x.shape[0]

    def run(sequences: Any, layers: Any) -> Any:
        return recurrent(kind, [s[:n] for s, n in zip(sequences, lengths, strict=True)], layers)

    return count(run, x, _weights(network))


@pytest.mark.parametrize("kind", KINDS)
def test_unfused_layer_costs_its_definition(kind: str) -> None:
    """float64 takes the unfused path for every kind: gradients as needed, none for the initial
    zeros of the hidden state."""

    @examples(8)
    @given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), flag, flag, flag, flag)
    def run(
        batch: int, steps: int, layers: int, both: bool, bias: bool, grad: bool, frozen: bool
    ) -> None:
        network = _network(kind, num_layers=layers, bidirectional=both, bias=bias)
        network.requires_grad_(not frozen)
        x = tensor(batch, steps, IN, grad=grad)
        expected = _expected(network, x)
        gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
        directions = 1 + both
        later = (layers - 1) * (directions * HIDDEN + HIDDEN)
        cells = directions * gates * HIDDEN * (IN + HIDDEN + later)
        assert expected.macs == batch * steps * cells
        assert macs_of(lambda: network(x)[0]) == (expected.macs, expected.backward_macs)

    run()


@pytest.mark.parametrize("kind", KINDS)
def test_definition_computes_what_torch_computes(kind: str) -> None:
    """The definition computes what torch computes."""
    network = _network(kind, num_layers=2, bidirectional=True)
    x = tensor(1, 3, IN)
    expected = _expected(network, x)
    once = Count(expected.result[0][None], expected.macs, expected.backward_macs, expected.flops)
    check(lambda: network(x)[0], once)


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_lstm_with_projection_costs_its_definition(both: bool, layers: int) -> None:
    network = _network("LSTM", num_layers=layers, bidirectional=both, proj_size=PROJECTED)
    x = tensor(3, 5, IN, grad=True)
    expected = _expected(network, x)
    directions = 1 + both
    width = 4 * HIDDEN * (IN + PROJECTED) + HIDDEN * PROJECTED
    later = 4 * HIDDEN * (directions * PROJECTED + PROJECTED) + HIDDEN * PROJECTED
    assert expected.macs == 3 * 5 * directions * (width + (layers - 1) * later)
    assert macs_of(lambda: network(x)[0]) == (expected.macs, expected.backward_macs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("both", [False, True])
def test_layer_on_packed_sequences_counts_real_lengths(kind: str, both: bool) -> None:
    network = _network(kind, num_layers=2, bidirectional=both)
    lengths = [5, 3, 2]
    x = tensor(3, 5, IN, grad=True)
    expected = _expected(network, x, lengths)

    def call() -> Any:
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
        return network(packed)[0].data

    assert macs_of(call) == (expected.macs, expected.backward_macs)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_fused_lstm_costs_its_definition(layers: int, both: bool, grad: bool) -> None:
    """float32 on a CPU is one kernel per layer and direction. Its backward computes every
    gradient, including those of the initial state and of the input, needed or not."""
    network = _network("LSTM", num_layers=layers, bidirectional=both).float()
    x = tensor(3, 5, IN, dtype=torch.float32, grad=grad)
    expected = _expected(network, x)
    assert macs_of(lambda: network(x)[0]) == (expected.macs, 2 * expected.macs)


@pytest.mark.parametrize("kind", KINDS)
def test_single_cell_costs_its_definition(kind: str) -> None:
    cell = getattr(nn, f"{kind}Cell")(IN, HIDDEN).double()
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[kind]
    macs = 2 * gates * HIDDEN * (IN + HIDDEN)
    # Neither the input nor the zeros of the state need a gradient, only the weights.
    assert macs_of(lambda: cell(tensor(2, IN))) == (macs, macs)


@pytest.mark.parametrize("kind", KINDS)
def test_unbatched_layer_costs_its_definition(kind: str) -> None:
    network = _network(kind)
    x = tensor(5, IN)
    assert macs_of(lambda: network(x)[0])[0] == macs_of(lambda: network(x[None])[0])[0]
