"""Definitions of the recurrent networks, step by step.

Weights are torch's: ``w_ih`` (gates * H, In), ``w_hh`` (gates * H, H or P), ``w_hr`` (P, H).
The hidden state starts at zeros that need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.oracles.contractions import linear
from tests.oracles.counting import Array, Number

Weights = Mapping[str, Array]
State = tuple[Array, ...]
Cell = Callable[[Array, State, Weights], State]


def rnn_cell(x: Array, state: State, w: Weights) -> State:
    """h = tanh(W_ih x + W_hh h)."""
    (h,) = state
    return (_each(Number.tanh, _gates(x, w, "ih") + _gates(h, w, "hh")),)


def gru_cell(x: Array, state: State, w: Weights) -> State:
    """r, z = sigmoid(..); n = tanh(W_in x + r (W_hn h)); h = (1 - z) n + z h."""
    (h,) = state
    xr, xz, xn = np.split(_gates(x, w, "ih"), 3)
    hr, hz, hn = np.split(_gates(h, w, "hh"), 3)
    r, z = _each(Number.sigmoid, xr + hr), _each(Number.sigmoid, xz + hz)
    n = _each(Number.tanh, xn + r * hn)
    return (n + z * (h - n),)


def lstm_cell(x: Array, state: State, w: Weights) -> State:
    """i, f, o = sigmoid(..); g = tanh(..); c = f c + i g; h = o tanh(c), projected by w_hr."""
    h, c = state
    i, f, g, o = np.split(_gates(x, w, "ih") + _gates(h, w, "hh"), 4)
    c = _each(Number.sigmoid, f) * c + _each(Number.sigmoid, i) * _each(Number.tanh, g)
    h = _each(Number.sigmoid, o) * _each(Number.tanh, c)
    return (linear(h, w["hr"]) if "hr" in w else h, c)


CELLS: dict[str, Cell] = {"RNN": rnn_cell, "GRU": gru_cell, "LSTM": lstm_cell}


def recurrent(
    kind: str, sequences: Sequence[Array], layers: Sequence[Sequence[Weights]]
) -> list[Array]:
    """Return the last layer's outputs of each sequence (T_i, In), each of its own length.

    layers[l] holds one set of weights per direction. The second runs backwards in time, and the
    directions' outputs are concatenated.
    """
    outputs = []
    longest = max(len(sequence) for sequence in sequences)
    for sequence in sequences:
        joins = len(sequence) < longest
        for directions in layers:
            forward = _run(kind, sequence, directions[0])
            if len(directions) == 2:
                back = _run(kind, sequence[::-1], directions[1], joins=joins)[::-1]
                forward = np.concatenate([forward, back], axis=1)
            sequence = forward
        outputs.append(sequence)
    return outputs


def _run(kind: str, sequence: Array, w: Weights, *, joins: bool = False) -> Array:
    """One layer in one direction.

    joins: backwards in time, a shorter sequence joins a running batch. Its zeros are then rows of a
    matrix whose other rows need gradients, so theirs are computed too.
    """
    hidden = w["hh"].shape[1]
    needs = joins and bool(w["hh"].flat[0].needs)
    state: State = (_zeros(hidden, needs),)
    if kind == "LSTM":
        state += (_zeros(w["hh"].shape[0] // 4, needs),)
    out = []
    for x in sequence:
        state = CELLS[kind](x, state, w)
        out.append(state[0])
    return np.array(out, dtype=object).reshape(len(out), hidden)


def _gates(x: Array, w: Weights, which: str) -> Array:
    return linear(x, w[which], w.get(f"b_{which}"))


def _each(function: Callable[[Number], Number], row: Array) -> Array:
    return np.array([function(x) for x in row], dtype=object)


def _zeros(n: int, needs: bool) -> Array:
    return np.array([Number(0.0, needs=needs) for _ in range(n)], dtype=object)
