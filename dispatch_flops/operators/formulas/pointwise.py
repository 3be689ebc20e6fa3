"""Pointwise operators: FLOPs per output element, as a table.

An operator that core ATen keeps whole costs 1 per element on floating-point data: sums,
products, comparisons, minimum and maximum, rounding, elementary and special functions.
An operator that ``torch._decomp.core_aten_decompositions`` decomposes costs the primitives of
its decomposition: its recipe. Every step counts once per element of the result, even if its
operand is broadcast later. Integer and boolean data cost nothing. Complex data cost the real
operations of the textbook formula, with every operand converted to complex.

Activations are in activation.py, losses in loss.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import (
    COMPLEX_ADD,
    COMPLEX_MUL,
    any_complex,
    dtype_of_literal,
)
from dispatch_flops.operators.formulas._foreach import each
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import ComputesIn, Rule, add_rules
from dispatch_flops.operators.tensors import is_inexact, is_sparse, stored_elements, tensors_in

#: 1 FLOP per output element on floating-point data.
_ELEMENTARY = """
    add sub rsub mul div neg reciprocal pow sqrt rsqrt fmod remainder hypot
    abs sign signbit copysign ceil floor round trunc nextafter frexp
    eq ne lt le gt ge isnan isinf isneginf isposinf
    maximum minimum fmax fmin clamp_min clamp_max relu
    logical_and logical_or logical_xor logical_not
    exp exp2 expm1 log log2 log10 log1p sigmoid
    sin cos tan sinh cosh tanh asin acos atan asinh acosh atanh atan2 angle
    erf erfc erfinv lgamma digamma polygamma igamma igammac i0 deg2rad rad2deg
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
    special_i0e special_i1 special_i1e
    special_laguerre_polynomial_l special_legendre_polynomial_p
    special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1
    special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
    special_spherical_bessel_j0 special_zeta
"""
ELEMENTARY = frozenset(_ELEMENTARY.split())
_COMPARISONS = frozenset("eq ne lt le gt ge".split())

#: Real operations per complex element, z = a+bi. An elementary function of a real is 1.
COMPLEX = {
    "add": COMPLEX_ADD,  # re, im
    "sub": COMPLEX_ADD,
    "rsub": COMPLEX_ADD,
    "neg": 2,
    "conj_physical": 1,  # the sign of im
    "mul": COMPLEX_MUL,  # 4 products, 2 sums
    "div": 11,  # z·conj(w): 6; |w|² : 3; 2 quotients
    "reciprocal": 6,  # |z|²: 3; sign of im: 1; 2 quotients
    "abs": 4,  # a², b², sum, root
    "angle": 1,  # atan2
    "sgn": 7,  # |z|: 4; compare with 0; 2 quotients
    "eq": 2,
    "ne": 2,
    "isnan": 2,
    "isinf": 2,
    "exp": 5,  # e^a, cos b, sin b, 2 products
    "exp2": 7,  # exp of z·ln 2
    "expm1": 6,  # exp, minus 1
    "log": 6,  # |z|: 4; its log; atan2
    "log2": 8,  # log, 2 products with 1/ln 2
    "log10": 8,
    "log1p": 7,  # 1 + z, log
    "sqrt": 11,  # |z|: 4; |z|+a, |z|-a, 2 halvings, 2 roots, the sign of b
    "rsqrt": 17,  # sqrt, reciprocal
    "pow": 17,  # exp(w·log z): 5 + 6 + 6
    "sigmoid": 14,  # 1 / (1 + exp(-z)): 2 + 5 + 1 + 6
    "sin": 6,  # sin a·cosh b, cos a·sinh b: 4 functions, 2 products
    "cos": 7,  # cos a·cosh b, -sin a·sinh b
    "tan": 24,  # sin, cos, div
    "sinh": 6,  # sinh a·cos b, cosh a·sin b
    "cosh": 6,
    "tanh": 23,  # sinh, cosh, div
    "asin": 29,  # -i·log(iz + sqrt(1-z²)): 6 + 2 + 11 + 3 + 6 + 1
    "acos": 31,  # π/2 - asin z
    "atan": 20,  # i/2·(log(1-iz) - log(1+iz)): 2 + 1 + 12 + 2 + 3
    "asinh": 26,  # log(z + sqrt(z²+1)): 6 + 1 + 11 + 2 + 6
    "acosh": 38,  # log(z + sqrt(z+1)·sqrt(z-1)): 2 + 22 + 6 + 2 + 6
    "atanh": 19,  # (log(1+z) - log(1-z)) / 2: 1 + 2 + 12 + 2 + 2
    "polar": 4,  # cos, sin, 2 products
}

#: Decompositions into primitives of the two tables above, each once per element.
RECIPES = {
    "addcmul": "mul mul add",
    "addcdiv": "mul div add",
    "floor_divide": "div floor",
    "frac": "trunc sub",
    "heaviside": "eq lt isnan",
    "ldexp": "pow mul",
    "logaddexp": "ge abs ne eq eq sub exp log1p add",
    "logaddexp2": "ge isinf eq sub exp2 log1p mul add",
    "logit": "lt gt sub div log",
    "logit_backward": "ge le sub mul div",
    "nan_to_num": "isnan isneginf isposinf",
    "sgn": "sign",  # real; complex above
    "sigmoid_backward": "sub mul mul",
    "sinc": "mul eq sin div",
    "special_entr": "isnan gt neg log mul eq",
    "special_log_ndtr": "mul lt neg special_erfcx div log mul sub erfc neg div log1p",
    "special_xlog1py": "eq log1p mul isnan",
    "tanh_backward": "mul sub mul",
    "xlogy": "eq log mul isnan",
}


def per_element(name: str, *, complex_numbers: bool = False) -> int:
    """Return the FLOPs per output element of an operator of the tables."""
    if complex_numbers and name in COMPLEX:
        return COMPLEX[name]
    if name in RECIPES:
        return recipe_cost(RECIPES[name], complex_numbers=complex_numbers)
    if name not in ELEMENTARY:
        return 0  # conj_physical of reals: the identity
    return 1


def recipe_cost(recipe: str, *, complex_numbers: bool = False) -> int:
    """Return the FLOPs per element of primitives named in a string, each done once."""
    return sum(per_element(name, complex_numbers=complex_numbers) for name in recipe.split())


def elementwise(recipe: str, args: Any, out: Any) -> int:
    """Return the FLOPs of a recipe done on every element of the (first) result.

    A sparse result counts the elements that it stores. The work counts if an argument or a result
    is floating-point: a comparison of such numbers has a boolean result, and a quotient of
    integers a floating-point one.
    """
    result = next(tensors_in(out))
    tensors = (*tensors_in(args), *tensors_in(out))
    if not is_inexact(*tensors):
        return 0
    complex_numbers = any(tensor.is_complex() for tensor in tensors)
    return stored_elements(result) * recipe_cost(recipe, complex_numbers=complex_numbers)


def broadcast_elements(*shapes: Iterable[int]) -> int:
    """Return the number of elements of the shape that ``shapes`` broadcast to."""
    return math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def plain(recipe: str) -> Callable[..., int]:
    """Return the formula of an operator whose cost per element depends only on the dtype."""

    def formula(*args: Any, out: Any, **kwargs: Any) -> int:
        return elementwise(recipe, (args, kwargs), out)

    return formula


@tells_apart(1)
def add(self: Any, other: Any, alpha: Any = 1, *, out: Any, **_: Any) -> int:
    """self ± alpha·other: one more product per element if alpha is not 1.

    A sparse addend of a dense tensor counts the elements that it stores.
    """
    is_sparse_addend = isinstance(other, torch.Tensor) and is_sparse(other)
    changed = other if is_sparse_addend and not is_sparse(next(tensors_in(out))) else out
    return elementwise("add" if alpha == 1 else "mul add", (self, other), changed)


@tells_apart(1)
def add_relu(self: Any, other: Any, alpha: Any = 1, *, out: Any, **_: Any) -> int:
    """A sum, and its maximum with 0."""
    return add(self, other, alpha, out=out) + elementwise("relu", (self, other), out)


def comparison(recipe: str) -> Callable[..., int]:
    """Return the formula of a comparison: whole numbers are compared with 0.5 as reals."""

    def formula(self: Any, other: Any, *, out: Any, **_: Any) -> int:
        if not is_inexact(self, other):
            return 0
        complex_numbers = isinstance(other, complex) or any_complex(*tensors_in((self, other)))
        return stored_elements(out) * per_element(recipe, complex_numbers=complex_numbers)

    return formula


def clamp(self: Any, min: Any = None, max: Any = None, *, out: Any, **_: Any) -> int:
    """A maximum for the lower bound, a minimum for the upper one: 1 per bound given."""
    bounds = [name for name, given in (("maximum", min), ("minimum", max)) if given is not None]
    return elementwise(" ".join(bounds), (self, min, max), out)


def div(self: Any, other: Any, *, rounding_mode: Any = None, out: Any, **_: Any) -> int:
    """A quotient, and its rounding if there is a rounding mode."""
    return elementwise("div" if rounding_mode is None else "div floor", (self, other), out)


def lerp(self: Any, end: Any, weight: Any, *, out: Any, **_: Any) -> int:
    """start + weight·(end - start): 3 per element.

    A tensor of weights is compared with 1/2 element by element, to start from the nearer
    end: |w|, w >= 1/2 and w - 1 are 3 more. For a scalar weight these are not tensor work,
    though the reference does them on a tensor of one element.
    """
    extra = "abs ge sub " if isinstance(weight, torch.Tensor) else ""
    return elementwise(f"{extra}sub mul add", (self, end, weight), out)


@tells_apart(0.5, 2)
def power(self: Any, exponent: Any, *, out: Any, **_: Any) -> int:
    """1 per real element. Complex: a product for a square, sqrt for a root, else exp(w·log z)."""
    short = {2: "mul", 0.5: "sqrt"}
    recipe = short.get(exponent, "pow") if isinstance(exponent, (int, float)) else "pow"
    return elementwise(recipe, (self, exponent), out)


def rounded(self: Any, *, decimals: int = 0, out: Any, **_: Any) -> int:
    """A rounding; with decimals, a product before and one after."""
    return elementwise("round" if decimals == 0 else "mul round mul", self, out)


def mvlgamma(self: Any, p: int, *, out: Any, **_: Any) -> int:
    """log π·p(p-1)/4 + Σ_p lgamma(x + (1-j)/2), n elements.

    Per element p sums with the offsets, p lgamma, p-1 sums, 1 sum with the constant: 3p.
    The p offsets are p products once. Source: torch._refs.special.multigammaln.
    """
    return (3 * p * out.numel() + p) if is_inexact(self, out) else 0


def native_dropout_backward(grad_output: Any, mask: Any, scale: Any, *, out: Any, **_: Any) -> int:
    """grad·(mask·scale): 2 per element."""
    return elementwise("mul mul", grad_output, out)


def register_table(table: dict[str, str]) -> None:
    """Register ``{operator: recipe}``, and ``_foreach_`` forms where torch has them."""
    for name, recipe in table.items():
        register_rule(name, plain(recipe), RECIPES.get(recipe, recipe))


def register_rule(
    name: str, formula: Callable[..., int], note: str, computes_in: ComputesIn | None = None
) -> None:
    """Register one formula for an operator and for its ``_foreach_`` form, if torch has them."""
    rule = Rule(kind="pointwise", formula=formula, note=note, computes_in=computes_in)
    add_rules(ops(name), rule)
    in_lists = Rule(kind="pointwise", formula=each(formula), note=note)
    add_rules(ops(f"_foreach_{name}"), in_lists)


_WITH_ARGUMENTS: dict[str, tuple[Callable[..., int], str]] = {
    "add": (add, "add, and mul if alpha != 1"),
    "sub": (add, "sub, and mul if alpha != 1"),
    "rsub": (add, "sub, and mul if alpha != 1"),
    "_add_relu": (add_relu, "add relu, and mul if alpha != 1"),
    "clamp": (clamp, "1 per bound"),
    "div": (div, "div, and a rounding"),
    "lerp": (lerp, "sub mul add; abs ge sub more for a tensor of weights"),
    "pow": (power, "pow"),
    "round": (rounded, "round; mul round mul with decimals"),
    "mvlgamma": (mvlgamma, "3p"),
    "native_dropout_backward": (native_dropout_backward, "mul mul"),
}

register_table(
    {
        name: name
        for name in sorted(ELEMENTARY | RECIPES.keys() | COMPLEX.keys())
        if name not in _WITH_ARGUMENTS.keys() | _COMPARISONS
    }
)
for _name in _COMPARISONS:
    register_rule(_name, comparison(_name), _name, computes_in=dtype_of_literal)
register_rule("_conj_physical", plain("conj_physical"), "conj_physical")
for _name, (_formula, _note) in _WITH_ARGUMENTS.items():
    register_rule(_name, _formula, _note)
