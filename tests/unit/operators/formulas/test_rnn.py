"""Recurrent layers: fused kernels and unfused cells, against closed forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from dispatch_flops.operators.formulas._arithmetic import cost_of
from dispatch_flops.operators.formulas.rnn import CELL_FLOPS, GRU, LSTM, RELU, TANH
from dispatch_flops.profile.cost import OpCost
from tests.helpers.profiling import numbers, profile_of

aten = torch.ops.aten
T, B, D, H = 5, 3, 10, 20

PROJECTED = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")

# gates, and FLOPs per hidden unit besides matrices and biases
KINDS: dict[str, tuple[type[nn.RNNBase], int, int, dict[str, Any]]] = {
    "lstm": (nn.LSTM, 4, 13, {}),
    "gru": (nn.GRU, 3, 10, {}),
    "tanh": (nn.RNN, 1, 2, {}),
    "relu": (nn.RNN, 1, 2, {"nonlinearity": "relu"}),
}


def closed_form(
    gates: int, pointwise: int, *, tokens: int, layers: int, directions: int, bias: bool
) -> tuple[int, int]:
    macs = flops = 0
    for layer in range(layers):
        inputs = D if layer == 0 else directions * H
        macs += directions * tokens * gates * H * (inputs + H)
        flops += directions * tokens * H * (pointwise + bias * 2 * gates)
    return macs, 2 * macs + flops


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_recurrent_layer_forward_matches_closed_form(
    kind: str, bidirectional: bool, bias: bool, layers: int, dtype: torch.dtype
) -> None:
    """float32 takes oneDNN's kernel for the LSTM, float64 the unfused cells."""
    cls, gates, pointwise, options = KINDS[kind]
    module = cls(D, H, layers, bidirectional=bidirectional, bias=bias, dtype=dtype, **options)
    cost = profile_of(module, torch.ones(T, B, D, dtype=dtype)).total()
    assert numbers(cost) == closed_form(
        gates,
        pointwise,
        tokens=T * B,
        layers=layers,
        directions=1 + bidirectional,
        bias=bias,
    )


def test_lstm_matches_an_exact_count() -> None:
    lstm, x = nn.LSTM(10, 20), torch.ones(5, 3, 10)
    assert profile_of(lstm, x).total().macs == 36_000
    assert profile_of(lstm.to("meta"), x.to("meta")).total().macs == 36_000


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lstm_without_gradients_costs_the_same(mode: Any) -> None:
    with mode():
        assert profile_of(nn.LSTM(D, H), torch.ones(T, B, D)).total().macs == 36_000


@PROJECTED
def test_lstm_with_projection_matches_closed_form() -> None:
    p = 7
    cost = profile_of(nn.LSTM(D, H, proj_size=p), torch.ones(T, B, D)).total()
    assert cost.macs == T * B * (4 * H * (D + p) + p * H)
    assert cost.flops == 2 * cost.macs + T * B * H * (13 + 8)


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layer_on_packed_sequences_counts_real_tokens(kind: str) -> None:
    cls, gates, pointwise, options = KINDS[kind]
    lengths = [5, 3, 1]
    packed = pack_padded_sequence(torch.ones(5, 3, D), lengths)
    cost = profile_of(cls(D, H, **options), packed).total()
    assert numbers(cost) == closed_form(
        gates, pointwise, tokens=sum(lengths), layers=1, directions=1, bias=True
    )


def test_lstm_backward_is_two_forwards() -> None:
    x = torch.ones(T, B, D, requires_grad=True)
    lstm = nn.LSTM(D, H)
    profile = profile_of(lambda: lstm(x)[0].sum().backward())
    forward, backward = profile.total("forward"), profile.total("backward")
    assert backward.macs == 2 * forward.macs
    layer = profile.by_operator("backward")["aten.mkldnn_rnn_layer_backward.default"].cost
    assert layer is not None
    assert layer.flops == 2 * backward.macs + T * B * H * 23 + (T * B - 1) * 8 * H


# -- kernels of backends, called with shapes only ------------------------------------------


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def flat_weights(module: nn.RNNBase) -> list[torch.Tensor]:
    return [w.to("meta") for w in module._flat_weights]


def cudnn(module: nn.RNNBase, mode: int, x: torch.Tensor, batch_sizes: list[int]) -> OpCost:
    """Return the cost of one call of cuDNN's kernel, with shapes only."""
    weights = flat_weights(module)
    directions = 1 + module.bidirectional
    width = directions * (module.proj_size or module.hidden_size)
    state = meta(module.num_layers * directions, B, module.hidden_size)
    return cost_of(
        aten._cudnn_rnn,
        *(x, weights, len(module.all_weights[0]), None, state, state, mode, module.hidden_size),
        *(module.proj_size, module.num_layers, False, module.dropout, True),
        *(module.bidirectional, batch_sizes, None),
        out=(meta(*x.shape[:-1], width), state, state, meta(0), meta(0)),
    )


@pytest.mark.parametrize(
    ("kind", "mode"), [("relu", RELU), ("tanh", TANH), ("lstm", LSTM), ("gru", GRU)]
)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_cudnn_layer_costs_as_on_the_cpu(
    kind: str, mode: int, bidirectional: bool, packed: bool
) -> None:
    cls, gates, pointwise, options = KINDS[kind]
    module = cls(D, H, 2, bidirectional=bidirectional, **options)
    x, sizes = (meta(9, D), [3, 2, 2, 1, 1]) if packed else (meta(T, B, D), [])
    assert numbers(cudnn(module, mode, x, sizes)) == closed_form(
        gates,
        pointwise,
        tokens=9 if packed else T * B,
        layers=2,
        directions=1 + bidirectional,
        bias=True,
    )


@PROJECTED
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_cudnn_layer_with_projection_and_dropout_costs_as_on_the_cpu(dropout: float) -> None:
    module = nn.LSTM(D, H, 3, proj_size=7, bidirectional=True, dropout=dropout)
    expected = profile_of(module, torch.ones(T, B, D)).total()
    assert numbers(cudnn(module, LSTM, meta(T, B, D), [])) == numbers(expected)


@pytest.mark.parametrize("to_weights", [False, True])
def test_cudnn_backward_counts_each_gradient(to_weights: bool) -> None:
    module = nn.LSTM(D, H, 2)
    state = meta(2, B, H)
    backward = cost_of(
        aten._cudnn_rnn_backward,
        *(meta(T, B, D), flat_weights(module), 4, meta(0), state, state, meta(T, B, H)),
        *(meta(T, B, H), None, None, LSTM, H, 0, 2, False, 0.0, True, False, [], None, meta(0)),
        [True, True, True, to_weights],
        out=None,
    )
    once = T * B * 4 * H * (D + H + H + H)
    assert backward.macs == (1 + to_weights) * once
    biases = (T * B - 1) * 2 * 8 * H if to_weights else 0
    assert backward.flops == 2 * backward.macs + T * B * 2 * H * 23 + biases


@pytest.mark.parametrize(("mode", "gates", "op"), [(LSTM, 4, "lstm"), (GRU, 3, "gru")])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_cell_matches_closed_form(mode: int, gates: int, op: str, bias: bool) -> None:
    """A fused cell runs after its two matrix products: the rest of the closed form."""
    product, vector = meta(B, gates * H), meta(gates * H) if bias else None
    cell = getattr(aten, f"_thnn_fused_{op}_cell")
    cost = cost_of(cell, product, product, meta(B, H), vector, vector, out=None)
    assert numbers(cost) == (0, B * H * (CELL_FLOPS[mode] + bias * 2 * gates))


def test_cell_on_the_cpu_runs_unfused() -> None:
    for cls, gates, pointwise in ((nn.LSTMCell, 4, 13), (nn.GRUCell, 3, 10), (nn.RNNCell, 1, 2)):
        cost = profile_of(cls(D, H), torch.ones(B, D)).total()
        assert cost.macs == B * gates * H * (D + H)
        assert cost.flops == 2 * cost.macs + B * H * (pointwise + 2 * gates)


@pytest.mark.parametrize(("op", "bias_rows"), [("lstm", 4), ("gru", 6)])
def test_fused_cell_backward_matches_closed_form(op: str, bias_rows: int) -> None:
    """Both biases of an LSTM cell share one gradient; a GRU cell's have one each."""
    state = meta(B, H)
    args = (None, None, state, state, meta(B, 4 * H)) if op == "lstm" else (state, meta(B, 5 * H))
    backward = getattr(aten, f"_thnn_fused_{op}_cell_backward")
    per_unit = {"lstm": 23, "gru": 16}[op]
    for has_bias in (False, True):
        cost = cost_of(backward, *args, has_bias, out=None)
        assert cost.flops == B * H * per_unit + has_bias * (B - 1) * bias_rows * H


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_mps_layer_costs_as_on_the_cpu(layers: int) -> None:
    module = nn.LSTM(D, H, layers)
    state = meta(layers, B, H)
    cost = cost_of(
        aten._lstm_mps,
        *(
            meta(T, B, D),
            [state, state],
            flat_weights(module),
            True,
            layers,
            0.0,
            True,
            False,
            False,
        ),
        out=(meta(T, B, H),),
    )
    assert numbers(cost) == closed_form(4, 13, tokens=T * B, layers=layers, directions=1, bias=True)
