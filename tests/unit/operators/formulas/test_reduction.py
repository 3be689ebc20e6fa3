"""Reductions, scans, softmax, sorting and searching: closed forms and independent counts."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any

import pytest
import torch

from dispatch_flops.operators.formulas.sorting import comparisons
from tests.helpers.profiling import profile_of

N, M = 3 * 5 * 7, 3 * 7  # reduced over the middle dimension


def real(*shape: int) -> torch.Tensor:
    return torch.rand(shape or (3, 5, 7))


def flops(fn: Any, *args: Any) -> int:
    return profile_of(fn, *args, strict=True).total().flops


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x.sum(), N - 1),
        (lambda x: x.sum(1), N - M),
        (lambda x: x.sum((0, 2)), N - 5),
        (lambda x: x.nansum(1), N + N - M),
        (lambda x: x.mean(1), N - M + M),
        (lambda x: x.mean(), N),
        (lambda x: x.prod(1), N - M),
        (lambda x: x.amax(1), N - M),
        (lambda x: x.max(), N - 1),
        (lambda x: x.max(1), N - M),
        (lambda x: x.min(1), N - M),
        (lambda x: x.argmax(1), N - M),
        (lambda x: x.aminmax(dim=1), 2 * (N - M)),
        (lambda x: x.any(1), N),
        (lambda x: x.all(), N),
        (lambda x: torch.count_nonzero(x), N),
        (lambda x: x.var(1), 4 * N),
        (lambda x: x.std(1), 4 * N + M),
        (lambda x: torch.var_mean(x, 1), 4 * N),
        (lambda x: torch.std_mean(x, 1), 4 * N + M),
        (lambda x: x.norm(), 2 * N),
        (lambda x: torch.linalg.vector_norm(x, 1, dim=1), N + N - M),
        (lambda x: torch.linalg.vector_norm(x, 3, dim=1), N + 2 * N),
        (lambda x: torch.linalg.vector_norm(x, math.inf, dim=1), N + N - M),
        (lambda x: torch.linalg.vector_norm(x, 0, dim=1), N + N - M),
        (lambda x: torch.dist(x, x), N + 2 * N),
        (lambda x: torch.cumsum(x, 1), N - M),
        (lambda x: torch.cumprod(x, 2), N - 15),
        (lambda x: torch.cummax(x, 1), N - M),
        (lambda x: torch.logcumsumexp(x, 1), 9 * (N - M)),
        (lambda x: torch.trace(x[0]), 5 - 1),
        (lambda x: torch.equal(x, x), N),
        (lambda x: torch.allclose(x, x), 10 * N),
        (lambda x: torch.allclose(x, x, equal_nan=True), (10 + 2) * N),
        (lambda x: torch.allclose(x, x, rtol=0, atol=0), N),
        (lambda x: torch.allclose(x, x, rtol=0), 10 * N),
        (lambda x: torch.allclose(x.long(), x.long()), (10 - 1) * N),
        (lambda x: torch.softmax(x, 1), 5 * N - 2 * M),
        (lambda x: torch.log_softmax(x, 1), 5 * N - M),
        (lambda x: torch.logsumexp(x, 1), 4 * N + 2 * M),
        (lambda x: x.long().sum(), 0),
        (lambda x: x.bool().any(), 0),
        (lambda x: x.long().sum(dtype=torch.float32), N - 1),
        (lambda x: x.long().cumsum(1), 0),
        (lambda x: torch._foreach_norm([x, x[0]]), 2 * N + 2 * 5 * 7),
        (lambda x: torch._foreach_max([x, x[0]]), N - 1 + 5 * 7 - 1),
    ],
)
def test_reduction_matches_closed_form(fn: Any, expected: int) -> None:
    assert flops(fn, real()) == expected


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda z: z.sum(1), 2 * (N - M)),
        (lambda z: z.mean(1), 2 * (N - M) + 2 * M),
        (lambda z: z.prod(1), 6 * (N - M)),
        (lambda z: z.var(1), 8 * N),
        (lambda z: torch.cumsum(z, 1), 2 * (N - M)),
        (lambda z: z.real.sum(1, dtype=z.dtype), 2 * (N - M)),
        (lambda z: z.real.mean(1, dtype=z.dtype), 2 * (N - M) + 2 * M),
        (lambda z: z.real.cumprod(1, dtype=z.dtype), 6 * (N - M)),
        (lambda z: z.any(1), 2 * N),
        (lambda z: z.count_nonzero(1), 2 * N),
        # maxima of the real parts; a difference 2, exp 5; sums 2; log 6 and a sum 2
        (lambda z: z.logsumexp(1), N - M + 2 * M + (2 + 5) * N + 2 * (N - M) + (6 + 2) * M),
        (lambda z: torch.linalg.vector_norm(z, dim=1), 4 * N + 2 * N),
    ],
)
def test_reduction_of_complex_numbers_matches_closed_form(fn: Any, expected: int) -> None:
    assert flops(fn, torch.complex(real(), real())) == expected


@pytest.mark.parametrize("equal_nan", [False, True])
@pytest.mark.parametrize("tolerance", [0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_allclose_costs_what_isclose_does(
    dtype: torch.dtype, tolerance: float, equal_nan: bool
) -> None:
    x, options = real().to(dtype), {"rtol": tolerance, "atol": tolerance, "equal_nan": equal_nan}
    assert flops(lambda: torch.allclose(x, x, **options)) == flops(
        lambda: torch.isclose(x, x, **options)
    )


def test_norm_of_a_sparse_tensor_counts_stored_elements() -> None:
    """3 of 100 numbers: 2·3."""
    sparse = torch.eye(10)[:3].to_sparse()
    assert flops(lambda: torch.norm(sparse)) == 2 * 3


@pytest.mark.parametrize("empty", [torch.empty(0), torch.empty(3, 0)])
def test_reduction_of_an_empty_tensor_is_free(empty: torch.Tensor) -> None:
    assert flops(lambda x: x.sum(), empty) == 0
    assert flops(lambda x: x.prod(), empty) == 0
    assert flops(lambda x: x.cumsum(0), empty) == 0


def test_softmax_backward_matches_closed_form() -> None:
    """Forward 5n - 2m, loss n + n-1 (product, sum); backward: product n, then 4n - m."""
    x, w = real().requires_grad_(), real()
    profile = profile_of(lambda: (torch.softmax(x, 1) * w).sum().backward(), strict=True)
    assert profile.total("forward").flops == 5 * N - 2 * M + N + N - 1
    assert profile.total("backward").flops == N + 4 * N - M


# -- sorting --------------------------------------------------------------------------------


def worst_insertions(length: int, keep: int) -> int:
    """Comparisons of binary insertion into the ``keep`` best, by the depth of its search tree."""
    total = 0
    for index in range(1, length):
        places = min(index, keep) + 1
        depth = 0
        while 2**depth < places:
            depth += 1
        total += depth
    return total


@pytest.mark.parametrize("length", range(1, 40))
def test_comparisons_match_binary_insertion(length: int) -> None:
    assert comparisons(length) == worst_insertions(length, length)
    for keep in range(1, length + 1):
        assert comparisons(length, keep) == worst_insertions(length, keep)


@pytest.mark.parametrize("length", range(1, 7))
def test_comparisons_bound_every_order_of_the_data(length: int) -> None:
    """Every permutation is sorted with numbers that count their comparisons."""

    class Counting(int):
        compared = 0

        def __lt__(self, other: int) -> bool:
            Counting.compared += 1
            return int(self) < int(other)

    worst = 0
    for order in itertools.permutations(range(length)):
        Counting.compared = 0
        ordered: list[Counting] = []
        for number in order:
            bisect.insort(ordered, Counting(number))
        worst = max(worst, Counting.compared)
    assert worst == comparisons(length)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x.sort(1), M * (5 * 3 - 8 + 1)),
        (lambda x: x.sort(dim=1, stable=True), M * (5 * 3 - 8 + 1)),
        (lambda x: x.argsort(2), 15 * (7 * 3 - 8 + 1)),
        (lambda x: x.topk(1, 1), M * (5 - 1)),
        (lambda x: x.topk(2, 2), 15 * (1 + 5 * 2)),
        (lambda x: x.kthvalue(7, 2), 15 * (7 - 1)),
        (lambda x: x.median(2), 15 * (5 + 3 * 3)),
        (lambda x: x.mode(1), M * (8 + 4)),
        (lambda x: x.flatten()[:5].unique(), 8 + 4),
        (lambda x: x.flatten()[:5].unique_consecutive(), 4),
        (lambda x: x.unique_consecutive(dim=0), 3 * 5 * 7 - 5 * 7),
        (lambda x: x[0].unique(dim=0), 7 * (8 + 4)),
        (lambda x: x[0].long().unique(dim=0), 0),
        (lambda x: torch.searchsorted(torch.arange(6.0), x), 3 * N),
        (lambda x: torch.bucketize(x, torch.arange(6.0)), 3 * N),
        (lambda x: torch.isin(x, torch.arange(6.0)), 6 * N),
        (lambda x: x.long().sort(1), 0),
        (lambda x: torch.searchsorted(torch.arange(6), x.long()), 0),
        (lambda x: torch.searchsorted(torch.arange(6), x), 3 * N),
        (lambda x: torch.searchsorted(torch.arange(6), 2.5), 3),
        (lambda x: torch.bucketize(x.long(), torch.arange(6.0)), 3 * N),
    ],
)
def test_sorting_matches_closed_form(fn: Any, expected: int) -> None:
    assert flops(fn, real()) == expected


def test_median_without_a_dimension_sorts_all_numbers() -> None:
    """n = 105: the best 53 by insertion, B(53) = 53·6 - 64 + 1, then 52 among 53: 6 each."""
    assert flops(torch.median, real()) == (53 * 6 - 64 + 1) + 52 * 6


@pytest.mark.parametrize("count", [5, 11])
def test_isin_among_many_sorts_them(count: int) -> None:
    """2 numbers: each with each below 10·2^0.145 = 11.06 candidates, else sort and search."""
    assert flops(torch.isin, real(2), real(count)) == 2 * count
    assert flops(torch.isin, real(2), real(13)) == (13 * 4 - 16 + 1) + 2 * 4 + 2


@pytest.mark.parametrize("order", [0, 1, 2, 3, float("inf")])
def test_norm_of_an_empty_tensor_is_free(order: float) -> None:
    if order == float("inf"):
        x, dim = torch.ones(0, 5), 1  # no maximum of nothing, so there are no rows
    else:
        x, dim = torch.ones(0, 5), 0  # five norms of no numbers each
    assert profile_of(lambda: torch.linalg.vector_norm(x, order, dim)).total().flops == 0
