"""Bilinear forms and pairwise distances.

Letters: P rows of x1, R rows of x2, D features, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import contract
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost

# cdist's compute_mode; mode 0 (or none) uses a matrix product above this number of rows.
_ALWAYS_MATMUL = 1
_NEVER_MATMUL = 2
_MATMUL_ABOVE_ROWS = 25


@register_flops(ops("_trilinear"))
def trilinear(
    i1: torch.Tensor,
    i2: torch.Tensor,
    i3: torch.Tensor,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """Σ over sumdim of i1·i2·i3, each with dimensions of size 1 inserted at its expand list.

    It runs as two contractions: i1 with i2, summed over the dimensions that i3 lacks, then the
    result with i3. For bilinear, Σ_ij x1[b,i]·w[k,i,j]·x2[b,j]: B·K·I·J, then B·K·J.
    If unroll_dim is summed over, its slices are accumulated, without further MACs.

    MACs: the dimensions of both contractions. FLOPs: 2·MACs.
    Source: aten's sumproduct_pair, called twice by _trilinear.
    """
    first = _inserted(i1.shape, expand1)
    second = _inserted(i2.shape, expand2)
    third = _inserted(i3.shape, expand3)
    pair = [max(a, b) if a and b else 0 for a, b in zip(first, second, strict=True)]
    kept = [
        1 if dim in sumdim and dim in expand3 and dim != unroll_dim else size
        for dim, size in enumerate(pair)
    ]
    both = [max(a, b) if a and b else 0 for a, b in zip(kept, third, strict=True)]
    return contract(prod(pair) + prod(both), i1, i2, i3)


def _inserted(shape: Sequence[int], ones: Sequence[int]) -> list[int]:
    sizes = list(shape)
    for dim in sorted(ones):
        sizes.insert(dim, 1)
    return sizes


# -- between two sets ----------------------------------------------------------------------


@register_flops(ops("_euclidean_dist"))
def euclidean_dist(x1: torch.Tensor, x2: torch.Tensor, *, out: torch.Tensor, **_: Any) -> OpCost:
    """out[B,P,R] = sqrt(max(0, [-2·x1, |x1|², 1] @ [x2, 1, |x2|²].T)), with |x|² by pow and sum.

    MACs: B·P·R·(D+2). FLOPs: 2·MACs + (2·D-1) per row of both (pow, sum) + B·P·D (times -2)
    + 2·B·P·R (clamp, sqrt). Source: torch._decomp's _euclidean_dist.
    """
    features = x1.shape[-1]
    rows = prod(x1.shape[:-1]) + prod(x2.shape[:-1])
    norms = rows * (features + max(0, features - 1))
    extra = norms + x1.numel() + 2 * out.numel()
    return contract(out.numel() * (features + 2), extra_flops=extra)


@register_flops(ops("_cdist_forward"))
@depends_on_numbers
def cdist_forward(
    x1: torch.Tensor,
    x2: torch.Tensor,
    p: float,
    compute_mode: int | None = None,
    *,
    out: torch.Tensor,
    **_: Any,
) -> OpCost:
    """out[B,P,R] = ‖x1[b,p] - x2[b,r]‖_p.

    With p=2, by a matrix product if compute_mode asks for it or there are more than 25 rows: the
    cost of ``_euclidean_dist``. Otherwise element by element: no MACs, as ``aten._pdist_forward``.
    """
    crowded = max(x1.shape[-2], x2.shape[-2]) > _MATMUL_ABOVE_ROWS
    by_matmul = compute_mode == _ALWAYS_MATMUL or (crowded and compute_mode != _NEVER_MATMUL)
    if p == 2 and by_matmul and out.numel():
        return euclidean_dist(x1, x2, out=out)
    return OpCost(flops=_distances(out.numel(), x1.shape[-1], p))


@register_flops(ops("_cdist_backward"), by_name=True)
@depends_on_numbers
def cdist_backward(
    *, x1: torch.Tensor, p: float, cdist: torch.Tensor, out: torch.Tensor, **_: Any
) -> OpCost:
    """Gradient for x1[B,P,D]: the sum over r of each pair's contribution.

    FLOPs: per pair and feature 3 at p of 1 or 2, 6 at ∞, else 8; B·(R-1)·P·D sums. None at p=0,
    whose gradient is zero.
    """
    terms = cdist.numel() * x1.shape[-1]
    return OpCost(flops=_gradients(terms, terms - out.numel(), p))


# -- within one set ------------------------------------------------------------------------


@register_flops(ops("_pdist_forward"))
@depends_on_numbers
def pdist_forward(x: torch.Tensor, p: float = 2.0, *, out: torch.Tensor, **_: Any) -> OpCost:
    """out[P·(P-1)/2] = ‖x[i] - x[j]‖_p for i < j.

    FLOPs: 2 per pair and feature, 3 at a p other than 0, 1, 2 and ∞; per pair D-1 sums and, unless
    p is 0, 1 or ∞, a root.
    """
    return OpCost(flops=_distances(out.numel(), x.shape[-1], p))


@register_flops(ops("_pdist_backward"), by_name=True)
@depends_on_numbers
def pdist_backward(
    *, self: torch.Tensor, p: float, pdist: torch.Tensor, out: torch.Tensor, **_: Any
) -> OpCost:
    """Gradient for x[P,D]: each pair adds to one row and subtracts from the other.

    FLOPs: per pair and feature 3 at p of 1 or 2, 6 at ∞, else 8; P·(P-2)·D sums, as each row has
    P-1 contributions. None at p=0, whose gradient is zero.
    """
    terms = pdist.numel() * self.shape[-1]
    return OpCost(flops=_gradients(terms, 2 * terms - self.numel(), p))


def _distances(pairs: int, features: int, p: float) -> int:
    """FLOPs of ``pairs`` vector norms of differences of D features.

    Each feature: a difference, then at p=0 a comparison, at p=1 and ∞ abs, at p=2 a square, else
    abs and pow. Each pair: D-1 sums (or maxima), and a root unless p is 0, 1 or ∞.
    """
    per_feature = 2 if p in (0, 1, 2, math.inf) else 3
    root = 0 if p in (0, 1, math.inf) else 1
    return pairs * (features * per_feature + max(0, features - 1) + root)


def _gradients(terms: int, sums: int, p: float) -> int:
    """FLOPs of d‖x-y‖_p/dx times the incoming gradient, for each pair and feature, and of the sums.

    p=0: none, the gradient is zero. p=1: difference, sign, product. p=2: difference, product,
    quotient by the distance. p=∞: difference, sign, abs, comparison with the distance, two
    products. Else: difference, sign, abs, pow, two products, pow of the distance, quotient.
    """
    return terms * {1: 3, 2: 3, math.inf: 6}.get(p, 8) + max(0, sums) if p else 0
