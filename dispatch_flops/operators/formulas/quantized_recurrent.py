"""Dynamically quantised recurrent layers and cells.

Letters: T rows in all steps together, G gates, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas._quantized import is_packed, quantized
from dispatch_flops.operators.formulas.fake_quantize import dynamic
from dispatch_flops.operators.formulas.rnn import CELL_FLOPS, GRU, LSTM, RELU, TANH
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import ZERO, OpCost, contraction

Tensor = torch.Tensor

GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}


_REALS, _INTEGERS = "float32", "int8"


def _dtype_of_layer(arguments: Mapping[str, Any]) -> str | None:
    """Return the dtype of the products: float16 weights are multiplied as float32.

    Source: fbgemm's FbgemmFP16.h.
    """
    params = arguments["params"]
    if not is_packed(params[0]):
        return None
    return _REALS if _weight_bytes(params) == 2 else _INTEGERS


@register_flops(ops("quantized_lstm"), by_name=True, computes_in=_dtype_of_layer)
def quantized_lstm(*, hx: Sequence[Tensor], **arguments: Any) -> OpCost:
    """Dynamically quantised LSTM, each product as ``quantized.linear_dynamic``."""
    return recurrent(LSTM, hx[0], states=hx, **arguments)


@register_flops(ops("quantized_gru"), by_name=True, computes_in=_dtype_of_layer)
def quantized_gru(*, hx: Tensor, **arguments: Any) -> OpCost:
    """Dynamically quantised GRU, each product as ``quantized.linear_dynamic``."""
    return recurrent(GRU, hx, states=hx, **arguments)


def recurrent(
    mode: int,
    state: Tensor,
    *,
    states: Any,
    params: Sequence[Any],
    input: Any = None,
    data: Any = None,
    batch_sizes: Tensor | None = None,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    out: Any,
    **_: Any,
) -> OpCost:
    """All layers, directions and steps. T rows in all steps together, of ``input`` or
    of the packed ``data``.

    MACs per layer and direction: T·G·H·(inputs + H). FLOPs: 2·MACs, ``CELL_FLOPS``, and per
    product as ``linear_dynamic`` (steps quantised one by one; their 10 for scale and zero point
    are counted once per layer and direction), with float16 weights as ``linear_dynamic_fp16``.
    Bytes: each packed weight and float32 bias, once.
    """
    x: Tensor = data if input is None else input
    hidden = state.shape[-1]
    rows, inputs, directions = x.numel() // x.shape[-1], x.shape[-1], 1 + bidirectional
    total, gates = ZERO, GATES[mode] * hidden
    weights, biases = 0, 2 * gates * directions * num_layers * has_biases
    in_integers = not (is_packed(params[0]) and _weight_bytes(params) == 2)
    for _layer in range(num_layers):
        total += directions * cell(mode, rows, inputs, hidden, has_biases, in_integers=in_integers)
        weights += directions * gates * (inputs + hidden)
        inputs = hidden * directions
    read = nbytes(x, batch_sizes, states, params)
    if is_packed(params[0]):
        read += weights * _weight_bytes(params) + 4 * biases
    return total + OpCost(bytes_read=read, bytes_written=nbytes(out))


def _weight_bytes(params: Sequence[Any]) -> int:
    """Return the bytes of one packed weight: 2 in float16, else 1."""
    state, _class_name = params[0].__getstate__()
    return 2 if state[0] == "quantized_fp16" else 1


def cell(
    mode: int, rows: int, inputs: int, hidden: int, bias: bool, *, in_integers: bool
) -> OpCost:
    """Rows of inputs and of states through one dynamically quantised cell."""
    results = rows * GATES[mode] * hidden
    surround = 2 * results * bias
    if in_integers:
        surround += dynamic(rows * inputs) + dynamic(rows * hidden) + 2 * results
    return contraction(
        results * (inputs + hidden), extra_flops=surround + rows * hidden * CELL_FLOPS[mode]
    )


def _is_float16(weight: Any) -> bool:
    return bool(weight.unpack()[0].dtype == torch.float32)  # float16, shown as float32


def _dtype_of_cell(arguments: Mapping[str, Any]) -> str:
    """Return the dtype of the products, see ``_dtype_of_layer``."""
    return _REALS if _is_float16(arguments["w_ih"]) else _INTEGERS


_CELLS = {"lstm": LSTM, "gru": GRU, "rnn_relu": RELU, "rnn_tanh": TANH}


def register_cell(name: str, mode: int) -> None:
    """Register one step of a dynamically quantised recurrent cell."""

    @register_flops(
        quantized(f"quantized_{name}_cell_dynamic"),
        note=f"one step of a dynamically quantised {name}",
        computes_in=_dtype_of_cell,
    )
    def formula(
        x: Tensor, hx: Any, w_ih: Any, w_hh: Any, *biases: Any, out: Any, **_: Any
    ) -> OpCost:
        state = hx[0] if isinstance(hx, (list, tuple)) else hx
        rows = x.numel() // x.shape[-1]
        in_integers = not _is_float16(w_ih)
        cost = cell(mode, rows, x.shape[-1], state.shape[-1], True, in_integers=in_integers)
        weights = GATES[mode] * state.shape[-1] * (x.shape[-1] + state.shape[-1])
        read = nbytes(x, hx, biases) + weights * (1 if in_integers else 2)
        return cost + OpCost(bytes_read=read, bytes_written=nbytes(out))


for _name, _mode in _CELLS.items():
    register_cell(_name, _mode)
