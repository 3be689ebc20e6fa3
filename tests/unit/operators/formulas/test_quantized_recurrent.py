"""Dynamically quantised recurrent layers and cells: the products of the original."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.operators.formulas._arithmetic import cost_of
from tests.helpers.profiling import macs_and_flops

pytestmark = pytest.mark.filterwarnings("ignore")

ops = torch.ops.quantized


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("both", [True, False])
def test_dynamic_recurrent_layer_has_the_macs_of_its_original(kind: Any, both: bool) -> None:
    original = kind(5, 3, num_layers=2, bidirectional=both).eval()
    x = torch.rand(7, 2, 5)
    dynamic = torch.ao.quantization.quantize_dynamic(original, {kind}, dtype=torch.qint8)
    assert macs_and_flops(dynamic, x)[0] == macs_and_flops(original, x)[0]
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 4]))
    assert macs_and_flops(dynamic, packed)[0] == macs_and_flops(original, packed)[0]


@pytest.mark.parametrize("form", ["input_legacy", "data_legacy"])
def test_recurrent_layer_with_weights_as_tensors_is_counted(form: str) -> None:
    """Old programs do this: no type then distinguishes the state from the packed lengths."""
    x, state, weight = (torch.empty(n, 7, device="meta") for n in (3, 3, 3 * 7))
    lengths = torch.empty(1, device="meta", dtype=torch.int64)
    sequence = (x, lengths) if form == "data_legacy" else (x,)
    op = getattr(torch.ops.aten.quantized_gru, form)
    last = () if form == "data_legacy" else (False,)
    options = (True, 1, 0.0, False, False, *last)
    found = cost_of(op, *sequence, state, [weight, weight], *options, out=None)
    assert found.macs == 3 * 3 * 7 * (7 + 7)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_dynamic_cell_counts_all_gates(kind: Any, gates: int) -> None:
    cell = nn.Sequential(kind(5, 3)).eval()
    dynamic = torch.ao.quantization.quantize_dynamic(cell, {kind}, dtype=torch.qint8)
    assert macs_and_flops(dynamic, torch.rand(7, 5))[0] == 7 * gates * 3 * (5 + 3)


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
@pytest.mark.parametrize(
    ("kind", "gates"),
    [(nn.LSTM, 4), (nn.GRU, 3), (nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)],
)
def test_dynamic_quantisation_costs_what_it_costs_the_linear_layers_within(
    kind: Any, gates: int, dtype: torch.dtype
) -> None:
    """One of the inputs and one of the states. Nothing is quantised for float16 weights."""

    def costs_more(layer: nn.Module, width: int) -> int:
        original, x = nn.Sequential(layer).eval(), torch.rand(7, width)
        x = x if "Cell" in kind.__name__ else x[:, None]
        dynamic = torch.ao.quantization.quantize_dynamic(original, {type(layer)}, dtype=dtype)
        return macs_and_flops(dynamic, x)[1] - macs_and_flops(original, x)[1]

    linear = costs_more(nn.Linear(5, gates * 3), 5), costs_more(nn.Linear(3, gates * 3), 3)
    assert (dtype is torch.qint8) == any(linear)
    assert costs_more(kind(5, 3), 5) == sum(linear)
