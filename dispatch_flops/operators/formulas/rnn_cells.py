"""Recurrent cells, fused: one time step.

Letters: B batch, I inputs, H hidden units. The constants are derived in ``rnn``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.rnn import CELL_FLOPS, CELL_GRAD_FLOPS, GRU, LSTM, TANH
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_given
from dispatch_flops.profile.cost import OpCost, contraction

Tensor = torch.Tensor


# -- cells, after the gates' matrix products -----------------------------------------------


@register_flops(ops("_thnn_fused_lstm_cell"), by_name=True)
def fused_lstm_cell(
    *,
    input_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """input_gates[B,4H], hidden_gates[B,4H], cx[B,H]. FLOPs: 13·B·H + 4·B·H per bias."""
    biases = sum(map(is_given, (input_bias, hidden_bias))) * input_gates.numel()
    return OpCost(flops=CELL_FLOPS[LSTM] * cx.numel() + biases)


@register_flops(
    ops("_thnn_fused_lstm_cell_backward", "_thnn_fused_lstm_cell_backward_impl"), by_name=True
)
def fused_lstm_cell_backward(*, cx: Tensor, has_bias: bool, out: Any, **_: Any) -> OpCost:
    """Gradients for gates, cx and bias. FLOPs: 23·B·H + (B-1)·4H with biases (one sum for both)."""
    return _cell_backward(LSTM, cx, 4, has_bias)


@register_flops(ops("_thnn_fused_gru_cell"), by_name=True)
def fused_gru_cell(
    *,
    input_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """input_gates[B,3H], hidden_gates[B,3H], hx[B,H]. FLOPs: 10·B·H + 3·B·H per bias."""
    biases = sum(map(is_given, (input_bias, hidden_bias))) * input_gates.numel()
    return OpCost(flops=CELL_FLOPS[GRU] * hx.numel() + biases)


@register_flops(ops("_thnn_fused_gru_cell_backward"), by_name=True)
def fused_gru_cell_backward(*, grad_hy: Tensor, has_bias: bool, out: Any, **_: Any) -> OpCost:
    """Gradients for gates, hx and biases. FLOPs: 16·B·H + (B-1)·6H with biases (a sum for each)."""
    return _cell_backward(GRU, grad_hy, 6, has_bias)


def _cell_backward(mode: int, state: Tensor, bias_rows: int, has_bias: bool) -> OpCost:
    hidden = state.shape[-1]
    summed = max(0, state.numel() - hidden) * bias_rows if has_bias else 0
    return OpCost(flops=CELL_GRAD_FLOPS[mode] * state.numel() + summed)


# -- cells with 8-bit weights --------------------------------------------------------------


def _quantized_cell(mode: int, x: Tensor, w_ih: Tensor, w_hh: Tensor, hidden: int) -> OpCost:
    """MACs: B·gates·H·(I+H). FLOPs: 2·MACs + both biases + the cell's."""
    rows = prod(x.shape[:-1])
    extra = rows * (2 * w_ih.shape[0] + CELL_FLOPS[mode] * hidden)
    return contraction(rows * (w_ih.numel() + w_hh.numel()), extra_flops=extra)


@register_flops(ops("quantized_lstm_cell"))
def quantized_lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, *_: Any, out: Any, **__: Any
) -> OpCost:
    """x[B,I], hx and cx[B,H]. MACs: B·4H·(I+H)."""
    return _quantized_cell(LSTM, x, w_ih, w_hh, hx[0].shape[-1])


@register_flops(ops("quantized_gru_cell"))
def quantized_gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, *_: Any, out: Any, **__: Any
) -> OpCost:
    """x[B,I], hx[B,H]. MACs: B·3H·(I+H)."""
    return _quantized_cell(GRU, x, w_ih, w_hh, hx.shape[-1])


@register_flops(ops("quantized_rnn_relu_cell", "quantized_rnn_tanh_cell"))
def quantized_rnn_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, *_: Any, out: Any, **__: Any
) -> OpCost:
    """x[B,I], hx[B,H]. MACs: B·H·(I+H)."""
    return _quantized_cell(TANH, x, w_ih, w_hh, hx.shape[-1])
