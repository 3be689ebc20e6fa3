"""Numbers that count the operations done on them.

A definition written in plain loops is run on ``Number`` or ``Complex`` scalars. Their shared
``OperationCounts`` then holds the exact work of the definition, and their values show that the
definition is correct. Nothing here uses a closed form.

Backward: ``d(s + a*b) = ds + da*b + a*db``, so each multiply-accumulate of the forward pass
adds one for the gradient of each factor that needs one. ``needs`` is autograd's
``requires_grad``: an operand's own flag, or that of anything it was computed from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class OperationCounts:
    """Multiply-accumulates, forward and backward, and other operations by name."""

    macs: int = 0
    backward_macs: int = 0
    operations: Counter[str] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Two per multiply-accumulate, one per other operation."""
        return 2 * self.macs + self.operations.total()


class Number:
    """A real scalar; one without counts is a constant."""

    __slots__ = ("counts", "needs", "value")

    def __init__(
        self, value: float, counts: OperationCounts | None = None, needs: bool = False
    ) -> None:
        self.value = value
        self.counts = counts
        self.needs = needs

    def fma(self, a: Scalar, b: Scalar) -> Scalar:
        """``self + a * b``."""
        if isinstance(a, Complex) or isinstance(b, Complex):
            return Complex(self, ZERO).fma(a, b)
        return self.real_fma(a, b)

    def real_fma(self, a: Number, b: Number, sign: int = 1) -> Number:
        """``self + sign * a * b``: one multiply-accumulate; the sign is not an operation."""
        counts = a.counts or b.counts or self.counts
        if counts is not None:
            counts.macs += 1
            counts.backward_macs += a.needs + b.needs
        value = self.value + sign * a.value * b.value
        return Number(value, counts, self.needs or a.needs or b.needs)

    def _do(self, name: str, value: float, *others: Number) -> Number:
        counts = next((n.counts for n in (self, *others) if n.counts is not None), None)
        if counts is not None:
            counts.operations[name] += 1
        return Number(value, counts, self.needs or any(n.needs for n in others))

    def __add__(self, other: Number) -> Number:
        return self._do("add", self.value + other.value, other)

    def __sub__(self, other: Number) -> Number:
        return self._do("sub", self.value - other.value, other)

    def __mul__(self, other: Number) -> Number:
        return self._do("mul", self.value * other.value, other)

    def __truediv__(self, other: Number) -> Number:
        return self._do("div", self.value / other.value, other)

    def maximum(self, other: Number) -> Number:
        return self._do("max", max(self.value, other.value), other)

    def exp(self) -> Number:
        return self._do("exp", math.exp(self.value))

    def log(self) -> Number:
        return self._do("log", math.log(self.value))

    def rsqrt(self) -> Number:
        return self._do("rsqrt", 1 / math.sqrt(self.value))

    def tanh(self) -> Number:
        return self._do("tanh", math.tanh(self.value))

    def sigmoid(self) -> Number:
        return self._do("sigmoid", 1 / (1 + math.exp(-self.value)))

    def relu(self) -> Number:
        return self._do("max", max(self.value, 0.0))


class Complex:
    """A complex scalar made of two real ones, which count its operations."""

    __slots__ = ("im", "re")

    def __init__(self, re: Number, im: Number) -> None:
        self.re = re
        self.im = im

    def fma(self, a: Scalar, b: Scalar) -> Complex:
        """``(a.re + i a.im)(b.re + i b.im)`` has four products, each accumulated."""
        a, b = _as_complex(a), _as_complex(b)
        re = self.re.real_fma(a.re, b.re).real_fma(a.im, b.im, sign=-1)
        im = self.im.real_fma(a.re, b.im).real_fma(a.im, b.re)
        return Complex(re, im)

    def __add__(self, other: Complex) -> Complex:
        return Complex(self.re + other.re, self.im + other.im)

    def __mul__(self, other: Complex) -> Complex:
        return Complex(
            self.re * other.re - self.im * other.im, self.re * other.im + self.im * other.re
        )

    @property
    def value(self) -> complex:
        return complex(self.re.value, self.im.value)

    @property
    def needs(self) -> bool:
        return self.re.needs or self.im.needs


Scalar = Number | Complex
Array = Any  # np.ndarray of dtype object, holding scalars
ZERO = Number(0.0)


def _as_complex(number: Scalar) -> Complex:
    return number if isinstance(number, Complex) else Complex(number, ZERO)


def dot(pairs: Iterable[tuple[Scalar, Scalar]]) -> Any:
    """Return the sum of ``a * b`` over the pairs, one multiply-accumulate each."""
    total: Scalar = ZERO
    for a, b in pairs:
        total = total.fma(a, b)
    return total


def fill(shape: Iterable[int], cell: Callable[..., Any]) -> Array:
    """Return the array of that shape whose element at ``index`` is ``cell(*index)``."""
    result = np.empty(tuple(shape), dtype=object)
    for index in np.ndindex(*result.shape):
        result[index] = cell(*index)
    return result


def elementwise(function: Callable[..., Any], *arrays: Array) -> Array:
    """Apply ``function`` to each element of the arrays, broadcast against each other."""
    arrays = np.broadcast_arrays(*arrays)
    return fill(arrays[0].shape, lambda *index: function(*(array[index] for array in arrays)))


def numbers(tensor: torch.Tensor, counts: OperationCounts) -> Array:
    """Return a tensor as an array of counting numbers, which need gradients if the tensor does."""
    flat = tensor.detach().reshape(-1).tolist()
    needs = tensor.requires_grad
    cells = [
        Complex(Number(v.real, counts, needs), Number(v.imag, counts, needs))
        if isinstance(v, complex)
        else Number(v, counts, needs)
        for v in flat
    ]
    result = np.empty(len(cells), dtype=object)
    result[:] = cells
    return result.reshape(tuple(tensor.shape))


def values(array: Array, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the values of an array of numbers."""
    flat = [number.value for number in np.asarray(array, dtype=object).reshape(-1)]
    if any(isinstance(value, complex) for value in flat):
        dtype = torch.complex128
    return torch.tensor(flat, dtype=dtype).reshape(np.shape(array))


@dataclass(frozen=True)
class Count:
    """Cost and result of running a definition."""

    result: Any
    macs: int
    backward_macs: int
    flops: int


def count(definition: Callable[..., Any], *args: Any, **kwargs: Any) -> Count:
    """Run a definition with every tensor among its arguments made of counting numbers."""
    counts = OperationCounts()

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return numbers(value, counts)
        if isinstance(value, (list, tuple)):
            return type(value)(convert(item) for item in value)
        if isinstance(value, dict):
            return {key: convert(item) for key, item in value.items()}
        return value

    result = definition(*convert(args), **convert(kwargs))
    return Count(result, counts.macs, counts.backward_macs, counts.flops)
