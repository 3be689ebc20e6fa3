"""Definitions without contractions, operation by operation, on one row (or one element).

Every addition, subtraction, multiplication, division, maximum and elementary function counts
1; a sum or maximum of n numbers is n - 1 of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

from tests.oracles.counting import Number

Row = Sequence[Number]


def total(row: Row) -> Number:
    """The sum."""
    return functools.reduce(operator.add, row)


def largest(row: Row) -> Number:
    """The maximum."""
    return functools.reduce(Number.maximum, row)


def mean(row: Row) -> Number:
    """The sum over the number of terms."""
    return total(row) / Number(len(row))


def softmax(row: Row) -> list[Number]:
    """exp(x - max) over its sum."""
    if not row:
        return []
    top = largest(row)
    powers = [(x - top).exp() for x in row]
    scale = total(powers)
    return [power / scale for power in powers]


def log_softmax(row: Row) -> list[Number]:
    """x - max - log(sum(exp(x - max)))."""
    top = largest(row)
    shifted = [x - top for x in row]
    log_scale = total([x.exp() for x in shifted]).log()
    return [x - log_scale for x in shifted]


def variance(row: Row, centre: Number) -> Number:
    """The mean square distance from ``centre``."""
    distances = [x - centre for x in row]
    return mean([d * d for d in distances])


def layer_norm(row: Row, gain: Row | None, shift: Row | None, *, eps: float) -> list[Number]:
    """(x - mean) / sqrt(variance + eps), times gain, plus shift."""
    centre = mean(row)
    scale = (variance(row, centre) + Number(eps)).rsqrt()
    out = [(x - centre) * scale for x in row]
    if gain is not None:
        out = [x * g for x, g in zip(out, gain, strict=True)]
    if shift is not None:
        out = [x + s for x, s in zip(out, shift, strict=True)]
    return out


def rms_norm(row: Row, gain: Row, *, eps: float) -> list[Number]:
    """x / sqrt(mean of squares + eps), times gain."""
    scale = (mean([x * x for x in row]) + Number(eps)).rsqrt()
    return [x * scale * g for x, g in zip(row, gain, strict=True)]


def silu(x: Number) -> Number:
    """x times its sigmoid."""
    return x * x.sigmoid()


def gelu_tanh(x: Number) -> Number:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    inner = Number(math.sqrt(2 / math.pi)) * (x + Number(0.044715) * (x * x * x))
    return Number(0.5) * x * (Number(1.0) + inner.tanh())
