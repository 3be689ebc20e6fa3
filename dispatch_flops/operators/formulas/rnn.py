"""Recurrent layers, fused.

Letters: T·B tokens (time steps x batch; packed: the sum of batch_sizes), I inputs, H hidden
units, P projected size. Every weight matrix is applied to every token once: tokens x elements
MACs. A bias vector costs one addition per token and element. Summing over the weights sums over
layers and directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, contraction

Tensor = torch.Tensor

# Modes, the same in cuDNN, MIOpen and oneDNN.
RELU, TANH, LSTM, GRU = 0, 1, 2, 3

# FLOPs per token and hidden unit besides matrices and biases, as in the unfused cells.
# RNN: input and hidden parts summed, activation.
# LSTM: 4 sums, 4 gate activations; c' = f·c + i·g: 3; h' = o·tanh(c'): 2.
# GRU: reset and update gates: 2 sums, 2 sigmoids; new gate tanh(i + r·h): 3; h' = (h-n)·z + n: 3.
CELL_FLOPS = {RELU: 2, TANH: 2, LSTM: 13, GRU: 10}

# FLOPs per token and hidden unit of the gradients, where g·(1-y)·y and g·(1-y²) are 3 each.
# RNN: the activation's: 3 for tanh, 1 for relu (a comparison; selecting is free).
# LSTM: o: tanh(c'), a product, sigmoid's 3; c': a product, tanh's 3, a sum; i, f, g, c: 4
# products; sigmoid's 3 twice, tanh's 3.
# GRU: n: g·(1-z), tanh's 3, times r; z: g·(h-n), sigmoid's 3; r: a product, sigmoid's 3; h: g·z;
# 1-z and h-n are a difference each: 2+3+1+2+3+1+3+1.
CELL_GRAD_FLOPS = {RELU: 1, TANH: 3, LSTM: 23, GRU: 16}


def layers_cost(tokens: int, weights: Sequence[Tensor], mode: int, hidden: int) -> OpCost:
    """Return the cost of layers with these weights, one cell per layer and direction.

    weights: per cell w_ih[gates·H,I], w_hh[gates·H,P or H] and, if any, b_ih, b_hh[gates·H] and
    w_hr[P,H].
    MACs: tokens·Σ elements of matrices. FLOPs: 2·MACs + tokens·Σ elements of vectors
    + tokens·H·CELL_FLOPS per cell.
    """
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    vectors = sum(w.numel() for w in weights if w.dim() == 1)
    pointwise = CELL_FLOPS[mode] * hidden * _cells(weights, hidden)
    return contraction(tokens * matrices, extra_flops=tokens * (vectors + pointwise))


def layers_backward_cost(
    tokens: int,
    weights: Sequence[Tensor],
    mode: int,
    hidden: int,
    *,
    to_weights: bool = True,
) -> OpCost:
    """Return the gradients of ``layers_cost`` for inputs and states, and for weights if needed.

    MACs: the forward's for each of the two. FLOPs: 2·MACs + tokens·H·CELL_GRAD_FLOPS per cell
    + one sum over tokens per bias element.
    """
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    vectors = sum(w.numel() for w in weights if w.dim() == 1) if to_weights else 0
    extra = tokens * CELL_GRAD_FLOPS[mode] * hidden * _cells(weights, hidden)
    extra += max(0, tokens - 1) * vectors
    return contraction(tokens * matrices * (1 + to_weights), extra_flops=extra)


def _cells(weights: Sequence[Tensor], hidden: int) -> int:
    """Number of cells: each has two matrices of gates, and maybe a projection to P < H."""
    gates = [w for w in weights if w.dim() == 2 and not _is_projection(w, hidden)]
    return len(gates) // 2


def _is_projection(weight: Tensor, hidden: int) -> bool:
    return weight.shape[0] < hidden and weight.shape[1] == hidden


def _tokens(x: Tensor) -> int:
    """Number of tokens of x[T,B,I] or of packed x[tokens,I]."""
    return prod(x.shape[:-1])


def _between_layers(
    tokens: int, output: Tensor, num_layers: int, dropout: float, train: bool
) -> OpCost:
    """Dropout after every layer but the last: the mask is scaled, then multiplied with."""
    elements = tokens * output.shape[-1] if train and dropout > 0 else 0
    return OpCost(flops=2 * elements * (num_layers - 1))


# -- oneDNN: one layer, one direction per call ---------------------------------------------


@register_flops(ops("mkldnn_rnn_layer"), by_name=True)
def mkldnn_rnn_layer(
    *,
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    mode: int,
    hidden_size: int,
    has_biases: bool,
    out: Any,
    **_: Any,
) -> OpCost:
    """x[T,B,I] through one LSTM layer in one direction.

    MACs: T·B·4H·(I+H). FLOPs: 2·MACs + 13·T·B·H, + 8·T·B·H with biases.
    Source: aten's LSTMCell, which runs where oneDNN does not.
    """
    weights = _without_placeholders((weight0, weight1, weight2, weight3), has_biases)
    return layers_cost(_tokens(input), weights, mode, hidden_size)


@register_flops(ops("mkldnn_rnn_layer_backward"), by_name=True)
def mkldnn_rnn_layer_backward(
    *,
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    weight4: Tensor,
    mode: int,
    hidden_size: int,
    has_biases: bool,
    out: Any,
    **_: Any,
) -> OpCost:
    """All gradients of ``mkldnn_rnn_layer``, needed or not.

    MACs: 2 x forward. FLOPs: 2·MACs + 23·T·B·H, + (T·B-1)·8H with biases.
    """
    weights = _without_placeholders((weight1, weight2, weight3, weight4), has_biases)
    return layers_backward_cost(_tokens(input), weights, mode, hidden_size)


def _without_placeholders(weights: tuple[Tensor, ...], has_biases: bool) -> tuple[Tensor, ...]:
    """w_ih, w_hh and, if there are any, b_ih and b_hh: missing biases are zeros, not None."""
    return weights if has_biases else weights[:2]


# -- cuDNN, MIOpen: all layers and directions in one call ----------------------------------


@register_flops(ops("_cudnn_rnn", "miopen_rnn"), by_name=True)
@tells_apart(0)
def vendor_rnn(
    *,
    input: Tensor,
    weight: Sequence[Tensor],
    mode: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    train: bool,
    out: Any,
    **_: Any,
) -> OpCost:
    """x[T,B,I] or packed x[Σ batch_sizes, I].

    MACs: over layers and directions, tokens·gates·H·(inputs + P or H), + tokens·P·H to project.
    FLOPs: 2·MACs + biases + the cells' pointwise operations + 2 per element for dropout between
    layers.
    """
    tokens = _tokens(input)
    cost = layers_cost(tokens, weight, mode, hidden_size)
    return cost + _between_layers(tokens, out[0], num_layers, dropout, train)


@register_flops(ops("_cudnn_rnn_backward", "miopen_rnn_backward"), by_name=True)
@tells_apart(0)
def vendor_rnn_backward(
    *,
    input: Tensor,
    weight: Sequence[Tensor],
    output: Tensor,
    mode: int,
    hidden_size: int,
    num_layers: int,
    dropout: float,
    train: bool,
    output_mask: Sequence[bool],
    out: Any,
    **_: Any,
) -> OpCost:
    """Gradients for input and states, always computed, and for weights if the mask asks.

    MACs: the forward's for each of the two. FLOPs: 2·MACs + the cells' pointwise
    operations, a sum over tokens per bias element, and 1 per element for dropout between layers.
    """
    tokens = _tokens(input)
    to_weights = bool(output_mask[3])
    cost = layers_backward_cost(tokens, weight, mode, hidden_size, to_weights=to_weights)
    dropped = _between_layers(tokens, output, num_layers, dropout, train)
    return cost + OpCost(flops=dropped.flops // 2)


# -- MPS -----------------------------------------------------------------------------------


@register_flops(ops("_lstm_mps"), by_name=True)
@tells_apart(0)
def lstm_mps(
    *,
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    num_layers: int,
    dropout: float,
    train: bool,
    out: Any,
    **_: Any,
) -> OpCost:
    """x[T,B,I] through all layers and directions. As ``aten._cudnn_rnn``, without projections."""
    tokens = _tokens(input)
    cost = layers_cost(tokens, params, LSTM, hx[1].shape[-1])
    return cost + _between_layers(tokens, out[0], num_layers, dropout, train)


@register_flops(ops("lstm_mps_backward"), by_name=True)
def lstm_mps_backward(
    *, input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], out: Any, **_: Any
) -> OpCost:
    """All gradients of ``lstm_mps``. MACs: 2 x forward."""
    return layers_backward_cost(_tokens(input), params, LSTM, hx[1].shape[-1])
