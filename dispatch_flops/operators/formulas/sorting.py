"""Sorting, selecting and searching: comparisons of floating-point numbers.

How many comparisons an algorithm takes depends on the data. Counted is the number that
suffices to keep the k best of a row of L in order by binary insertion. For a whole row that
is B(L) = L·⌈log2 L⌉ - 2^⌈log2 L⌉ + 1, the worst case of binary insertion and of
merge sort; for k = 1 it is L-1, as for a maximum.
Source: Knuth, The Art of Computer Programming, vol. 3, section 5.3.1. Integers cost nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import dtype_of_operands
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_inexact


def log2_ceil(count: int) -> int:
    """⌈log2 count⌉."""
    return max(count - 1, 0).bit_length()


def comparisons(length: int, keep: int | None = None) -> int:
    """Return how many comparisons suffice to order the ``keep`` best of ``length`` (None: all).

    Insertion i searches min(i, k) sorted elements: Σ ⌈log2(min(i, k) + 1)⌉, i < L.
    """
    k = min(length if keep is None else keep, length)
    if k <= 0:
        return 0
    sorting = k * log2_ceil(k) - (1 << log2_ceil(k)) + 1
    return sorting + (length - k) * log2_ceil(k + 1)


def _rows(self: torch.Tensor, dim: int) -> tuple[int, int]:
    """Number and length of the rows along ``dim``."""
    if self.dim() == 0:
        return 1, 1
    length = self.shape[dim]
    return (self.numel() // length if length else 0), length


@register_flops(ops("sort"), by_name=True)
def sort(*, self: torch.Tensor, dim: int = -1, out: Any, **_: Any) -> int:
    """m rows of L: m·B(L), B(L) = L·⌈log2 L⌉ - 2^⌈log2 L⌉ + 1."""
    m, length = _rows(self, dim)
    return m * comparisons(length) if is_inexact(self) else 0


@register_flops(ops("topk"))
def topk(self: torch.Tensor, k: int, dim: int = -1, *_: Any, out: Any, **__: Any) -> int:
    """The k best of m rows of L: m·(B(k) + (L-k)·⌈log2(k+1)⌉), B as for ``aten.sort``."""
    m, length = _rows(self, dim)
    return m * comparisons(length, k) if is_inexact(self) else 0


@register_flops(ops("kthvalue"))
def kthvalue(self: torch.Tensor, k: int, dim: int = -1, *_: Any, out: Any, **__: Any) -> int:
    """As ``aten.topk`` for the k best or the L-k+1 worst of m rows, whichever are fewer."""
    m, length = _rows(self, dim)
    return m * comparisons(length, min(k, length - k + 1)) if is_inexact(self) else 0


@register_flops(ops("median", "nanmedian"))
def median(self: torch.Tensor, dim: int | None = None, *_: Any, out: Any, **__: Any) -> int:
    """The lower middle of each row, or of all numbers without a dimension: as ``aten.topk`` for
    the ⌈L/2⌉ best.
    """
    if not is_inexact(self):
        return 0
    if dim is None:
        return comparisons(self.numel(), math.ceil(self.numel() / 2))
    m, length = _rows(self, dim)
    return m * comparisons(length, math.ceil(length / 2))


@register_flops(ops("mode"))
def mode(self: torch.Tensor, dim: int = -1, *_: Any, out: Any, **__: Any) -> int:
    """Each row is sorted, then neighbours are compared: m·(B(L) + L-1)."""
    m, length = _rows(self, dim)
    return m * (comparisons(length) + max(length - 1, 0)) if is_inexact(self) else 0


@register_flops(ops("_unique", "_unique2"))
def unique(self: torch.Tensor, *_: Any, out: Any, **__: Any) -> int:
    """All n numbers are sorted, then neighbours are compared: B(n) + n-1."""
    n = self.numel()
    return comparisons(n) + max(n - 1, 0) if is_inexact(self) else 0


@register_flops(ops("unique_consecutive"), by_name=True)
def unique_consecutive(*, self: torch.Tensor, dim: int | None = None, out: Any, **_: Any) -> int:
    """Neighbours compared: n-1; along a dimension L-1 slices, n - n/L."""
    n = self.numel()
    return max(n - (n // self.shape[dim] if dim is not None and n else 1), 0) * is_inexact(self)


@register_flops(ops("unique_dim", "unique_dim_consecutive"))
def unique_dim(self: torch.Tensor, dim: int, *_: Any, out: Any, **__: Any) -> int:
    """L slices of n/L numbers sorted in dictionary order, neighbours compared: at most
    (B(L) + L-1)·n/L, as a comparison of two slices ends at the first difference.
    """
    m, length = _rows(self, dim)
    return m * (comparisons(length) + max(length - 1, 0)) if is_inexact(self) else 0


def _searches(boundaries: torch.Tensor, numbers: Any, out: torch.Tensor) -> int:
    length = boundaries.shape[-1] if boundaries.dim() else 1
    return out.numel() * log2_ceil(length + 1) if is_inexact(boundaries, numbers) else 0


@register_flops(ops("searchsorted"), computes_in=dtype_of_operands)
def searchsorted(
    sorted_sequence: torch.Tensor, self: Any, *_: Any, out: torch.Tensor, **__: Any
) -> int:
    """Binary search among L boundaries: ⌈log2(L+1)⌉ comparisons per number."""
    return _searches(sorted_sequence, self, out)


@register_flops(ops("bucketize"), computes_in=dtype_of_operands)
def bucketize(self: Any, boundaries: torch.Tensor, *_: Any, out: torch.Tensor, **__: Any) -> int:
    """``searchsorted`` with its arguments swapped."""
    return _searches(boundaries, self, out)


@register_flops(ops("isin"), computes_in=dtype_of_operands)
def isin(
    elements: Any,
    test_elements: Any,
    *,
    assume_unique: bool = False,
    invert: bool = False,
    out: torch.Tensor,
    **_: Any,
) -> int:
    """n numbers looked up among t.

    Few (t < 10·n^0.145): each with each, n·t. Many: the t are sorted, each of the n is
    searched and compared once; if known to be unique, all n+t are sorted and neighbours
    compared. Source: torch._decomp, aten's isin.
    """
    if not is_inexact(elements, test_elements):
        return 0
    n = elements.numel() if isinstance(elements, torch.Tensor) else 1
    t = test_elements.numel() if isinstance(test_elements, torch.Tensor) else 1
    if t < 10 * n**0.145:
        return n * t
    if assume_unique:
        return comparisons(n + t) + n + t - 1
    return comparisons(t) + n * log2_ceil(t + 1) + n
