"""Reductions and scans.

n: elements of the input. m: elements of the result (rows).
A reduction of n inputs to m outputs is n-m operations, plus its divisions. Integer and
boolean data cost nothing. Source, unless a docstring names another: torch._refs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import (
    any_complex,
    dtype_asked_for,
    dtype_of_operands,
    dtype_of_result,
)
from dispatch_flops.operators.formulas._foreach import each
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.pointwise import broadcast_elements, per_element, recipe_cost
from dispatch_flops.operators.numbers import depends_on_numbers, tells_apart
from dispatch_flops.operators.registry import (
    ComputesIn,
    Formula,
    Rule,
    add_rules,
    register_flops,
)
from dispatch_flops.operators.tensors import (
    is_inexact,
    is_strided_nested,
    nested_sizes,
    stored_elements,
    tensors_in,
)


def rows(tensor: torch.Tensor, dim: int | Iterable[int] | None) -> int:
    """Return the number of results of a reduction over ``dim`` (None or []: all dimensions)."""
    if tensor.dim() == 0:
        return 1
    dims = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    reduced = {d % tensor.dim() for d in dims} or set(range(tensor.dim()))
    if is_strided_nested(tensor):  # has one shape per item
        return sum(
            math.prod(n for d, n in enumerate(item, start=1) if d not in reduced)
            for item in nested_sizes(tensor)
        )
    return math.prod(size for d, size in enumerate(tensor.shape) if d not in reduced)


def fold(self: torch.Tensor, out: Any, *, per_input: int = 0, per_output: int = 0) -> int:
    """Return n-m operations, plus some per input and per output; complex ones are two real ones."""
    result = next(tensors_in(out))
    if not is_inexact(self, result):
        return 0
    n, m = stored_elements(self), stored_elements(result)
    real = max(n - m, 0) + per_input * n + per_output * m
    return real * (2 if any_complex(self, result) else 1)


def _plain(per_input: int = 0, per_output: int = 0) -> Callable[..., int]:
    def formula(self: torch.Tensor, *_: Any, out: Any, **__: Any) -> int:
        return fold(self, out, per_input=per_input, per_output=per_output)

    return formula


def _sum(per_input: int = 0, per_output: int = 0) -> Callable[..., int]:
    fold_all = _plain(per_input, per_output)

    def formula(self: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> int:
        return fold_all(self, out=out) if is_inexact(out) else 0  # casts to the result's dtype

    return formula


def _register(
    targets: list[Any],
    formula: Formula,
    note: str,
    *,
    by_name: bool = False,
    computes_in: ComputesIn | None = None,
) -> None:
    rule = Rule(
        kind="reduction", formula=formula, note=note, by_name=by_name, computes_in=computes_in
    )
    add_rules(targets, rule)


# The binary overloads, max.other and min.other, decompose into maximum and minimum.
_OF_MAX = ("max.default", "max.dim", "max.dim_max", "max.names_dim", "max.unary_out")
_OF_MIN = ("min.default", "min.dim", "min.dim_min", "min.names_dim", "min.unary_out")
_register(ops("amax", "amin", "argmax", "argmin", *_OF_MAX, *_OF_MIN), _plain(), "n-m")
_register(ops("_foreach_max"), each(_plain()), "n-m each")
_register(ops("sum"), _sum(), "n-m", computes_in=dtype_of_result)
_register(ops("nansum"), _sum(per_input=1), "n comparisons, n-m", computes_in=dtype_of_result)
_register(ops("mean"), _sum(per_output=1), "n-m, m divisions", computes_in=dtype_of_result)


@register_flops(ops("prod"), computes_in=dtype_of_result)
def prod(self: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> int:
    """n-m products."""
    products = max(self.numel() - out.numel(), 0)
    each_product = per_element("mul", complex_numbers=out.is_complex())
    return products * each_product if is_inexact(out) else 0


@register_flops(ops("aminmax", "_aminmax"))
def aminmax(self: torch.Tensor, *_: Any, out: Any, **__: Any) -> int:
    """Minimum and maximum: 2·(n-m). Source: torch._decomp."""
    return 2 * fold(self, out)


@register_flops(ops("all", "any", "count_nonzero"))
def tested(self: torch.Tensor, *_: Any, out: Any, **__: Any) -> int:
    """Each number is compared with 0: n, if complex 2·n. Joining the boolean results is free."""
    compared = per_element("ne", complex_numbers=self.is_complex())
    return self.numel() * compared if is_inexact(self) else 0


@register_flops(ops("equal"))
def equal(self: torch.Tensor, other: torch.Tensor, *, out: Any, **_: Any) -> int:
    """n comparisons if the shapes agree, else none."""
    if not (torch.is_tensor(self) and torch.is_tensor(other)):
        return 0  # TorchScript compares constants of a graph
    if self.shape != other.shape or not is_inexact(self, other):
        return 0
    return self.numel() * per_element("eq", complex_numbers=self.is_complex())


@register_flops(ops("allclose"), by_name=True)
@tells_apart(0)
def allclose(
    *,
    self: torch.Tensor,
    other: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-8,
    equal_nan: bool = False,
    out: Any,
    **_: Any,
) -> int:
    """a = b, or |a-b| finite and at most atol + |rtol·b|, element by element.

    FLOPs: 1 + 2 + 3 (finite: equal to itself, absolute value, unequal infinity) + 1 + 3: 10·n;
    two more with ``equal_nan``. Of complex numbers 23·n, four more. Only whether a = b, 1·n, if
    both tolerances are 0. Integers are first compared as they are, which is free.
    Source: torch._refs.isclose.
    """
    n = broadcast_elements(self.shape, other.shape)

    def each(recipe: str) -> int:
        return n * recipe_cost(recipe, complex_numbers=self.is_complex())

    equality = each("eq isnan isnan" if equal_nan else "eq") if is_inexact(self) else 0
    if rtol == 0 and atol == 0:
        return equality
    return equality + each("mul abs sub abs") + 5 * n  # the bound's sum, finite 3, a comparison


def variance(n: int, *, complex_numbers: bool = False) -> int:
    """Σ|x - mean|² / count: mean n, subtract n, square n, sum n-m, divide m: 4·n.

    The mean is included, so var_mean costs no more. (Its reference calls var and mean, which
    computes the mean twice.) Complex: 2·n, 2·n, 3·n, n-m, m: 8·n.
    """
    return (8 if complex_numbers else 4) * n


def _spread(roots: bool = False) -> Callable[..., int]:
    def formula(self: torch.Tensor, *_: Any, out: Any, **__: Any) -> int:
        flops = variance(self.numel(), complex_numbers=self.is_complex())
        return flops + (next(tensors_in(out)).numel() if roots else 0)

    return formula


_register(ops("var", "var_mean"), _spread(), "4n")
_register(ops("std", "std_mean"), _spread(roots=True), "4n, m roots")


def vector_norm(n: int, m: int, order: float, *, complex_numbers: bool = False) -> int:
    """The p-norm of m vectors, n numbers in all.

    0: compare n, count n-m. ±inf: |x| n, max n-m. 1: |x| n, sum n-m.
    Even p on reals: power n, sum n-m, root m: 2·n. Else |x| first: 3·n.
    The norm of one element is its absolute value: n.
    Source: torch._refs.linalg.vector_norm, whose powers of 1 for p = 1 are the identity.
    """
    magnitude = n * per_element("abs", complex_numbers=complex_numbers)
    folded = max(n - m, 0)  # an empty tensor has nothing to sum
    if order == 0:
        return n * per_element("ne", complex_numbers=complex_numbers) + folded
    if n == m:
        return magnitude
    if math.isinf(order) or order == 1:
        return magnitude + folded
    return 2 * n if order % 2 == 0 and not complex_numbers else magnitude + 2 * n


@register_flops(ops("linalg_vector_norm", "norm", "native_norm"), computes_in=dtype_asked_for)
@depends_on_numbers
def norm(self: torch.Tensor, ord: Any = 2, *_: Any, out: torch.Tensor, **kwargs: Any) -> int:
    """The norm of n numbers over the given dimensions, to m results; an order of None is 2.

    FLOPs: for reals 2·n of an even order, 2·n - m of 0, 1 and ∞, else 3·n; n where n is m.
    A sparse tensor counts the elements that it stores.
    """
    order = kwargs.get("p", ord)
    return vector_norm(
        stored_elements(self),
        out.numel(),
        2 if order is None else order,
        complex_numbers=self.is_complex(),
    )


@depends_on_numbers
def _norm_of_list(self: torch.Tensor, ord: Any = 2, *_: Any, out: Any, **__: Any) -> int:
    return vector_norm(self.numel(), 1, ord, complex_numbers=self.is_complex())


_register(
    ops("_foreach_norm"),
    each(_norm_of_list),
    "vector_norm each",
    computes_in=dtype_asked_for,
)


@depends_on_numbers
def powsum(self: torch.Tensor, ord: Any = 2, *_: Any, out: torch.Tensor, **__: Any) -> int:
    """Σ|x|^p: a vector norm without its root."""
    n, m = self.numel(), out.numel()
    magnitude = 0 if ord % 2 == 0 and not self.is_complex() else n
    return magnitude * per_element("abs", complex_numbers=self.is_complex()) + 2 * n - m


_register(ops("linalg__powsum"), powsum, "power n, sum n-m", computes_in=dtype_asked_for)
_register(
    ops("_foreach_powsum"), each(powsum), "power n, sum n-m each", computes_in=dtype_asked_for
)


@register_flops(ops("dist"), computes_in=dtype_of_operands)
@depends_on_numbers
def dist(self: torch.Tensor, other: torch.Tensor, p: Any = 2, *, out: Any, **_: Any) -> int:
    """‖a - b‖: n subtractions and a norm. Source: torch._decomp."""
    n = broadcast_elements(self.shape, other.shape)
    complex_numbers = self.is_complex() or other.is_complex()
    difference = n * per_element("sub", complex_numbers=complex_numbers)
    return difference + vector_norm(n, 1, p, complex_numbers=complex_numbers)


@register_flops(ops("trace"))
def trace(self: torch.Tensor, *, out: torch.Tensor, **_: Any) -> int:
    """The sum of the k numbers on the diagonal: k-1."""
    k = min(self.shape)
    return max(k - 1, 0) * per_element("add", complex_numbers=self.is_complex()) * is_inexact(self)


def _scan(names: str, recipe: str, note: str) -> None:
    """Register scans: a row of length L takes L-1 steps, n-m in all."""

    def formula(*, self: torch.Tensor, dim: int, out: Any, **_: Any) -> int:
        results = tuple(tensors_in(out)) or (self,)  # helpers return nothing
        if not is_inexact(*results) or self.numel() == 0:
            return 0
        step = per_element(recipe, complex_numbers=any_complex(*results))
        return (self.numel() - rows(self, dim)) * step

    _register(ops(*names.split()), formula, note, by_name=True, computes_in=dtype_of_result)


_scan("cumsum", "add", "n-m")
_scan("cumprod", "mul", "n-m")
_scan("cummax cummin _cummax_helper _cummin_helper", "maximum", "n-m")
_scan("logcumsumexp _logcumsumexp", "logaddexp", "logaddexp per step")
