"""Where torch takes another way under a dispatch mode, with another peak of memory.

benchmarks/limits.md lists these (Memory).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.allocator import allocations
from tests.helpers.profiling import TORCH
from tests.helpers.untouched import EmptyMode

WIDTH = 40
Function = Callable[[torch.Tensor], torch.Tensor]

HIGHER_IN_BACKWARD: dict[str, Function] = {
    "prod": torch.prod,
    "prod of rows": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(0),
    "trace": torch.trace,
    "clamp": lambda x: x.clamp(-x, x + 1),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(
        x, torch.ones(WIDTH, WIDTH), pos_weight=torch.ones(WIDTH)
    ),
}
LOWER_IN_BACKWARD: dict[str, Function] = {
    "max": torch.max,
    "min": torch.min,
    "median": torch.median,
    "householder_product": lambda x: torch.linalg.householder_product(x, torch.ones(WIDTH)),
}
HIGHER: dict[str, Function] = {
    "svdvals": torch.linalg.svdvals,
    "eigvals": torch.linalg.eigvals,
    "eigvalsh": torch.linalg.eigvalsh,
    "matrix_rank": torch.linalg.matrix_rank,
    "cond": torch.linalg.cond,
    "norm 2": lambda x: torch.linalg.norm(x, 2),
    "norm -2": lambda x: torch.linalg.norm(x, -2),
    "norm nuc": lambda x: torch.linalg.norm(x, "nuc"),
}


def peaks(run: Callable[[], object]) -> tuple[int, int]:
    """Return the allocator's peak of a run without a mode, and of one under a mode."""

    def under_a_mode() -> None:
        with EmptyMode():
            run()

    run()  # what torch keeps from the first call on is there before
    plain, other = allocations(run), allocations(under_a_mode)
    return max(accumulate(plain, initial=0)), max(accumulate(other, initial=0))


def backward_of(function: Function) -> Callable[[], object]:
    x = torch.rand(WIDTH, WIDTH, requires_grad=True)

    def run() -> None:
        y = function(x)
        torch.autograd.grad(y, x, torch.ones_like(y))

    return run


@pytest.mark.parametrize("name", HIGHER_IN_BACKWARD)
def test_backward_pass_takes_more_memory_under_a_mode(name: str) -> None:
    if name == "cumprod" and TORCH < (2, 13):
        pytest.skip("before torch 2.13 it takes one per cent less")
    plain, other = peaks(backward_of(HIGHER_IN_BACKWARD[name]))
    assert plain < other <= 3 * plain + WIDTH * WIDTH


@pytest.mark.parametrize("name", LOWER_IN_BACKWARD)
def test_backward_pass_takes_less_memory_under_a_mode(name: str) -> None:
    plain, other = peaks(backward_of(LOWER_IN_BACKWARD[name]))
    assert plain * 5 / 6 <= other < plain


@pytest.mark.parametrize("name", HIGHER)
def test_vectors_are_computed_beside_values_under_a_mode(name: str) -> None:
    x = torch.rand(WIDTH, WIDTH)
    plain, other = peaks(lambda: HIGHER[name](x))
    assert plain < other


def test_sparse_gradient_is_cloned_under_a_mode() -> None:
    layer = nn.Embedding(50, 4, sparse=True)
    indices = torch.arange(400) % 50
    values, positions = 400 * 4 * 4, 400 * 8

    def run() -> None:
        layer.weight.grad = None
        layer(indices).square().sum().backward()

    def under_a_mode() -> None:
        with EmptyMode():
            run()

    run()
    assert positions not in allocations(run)  # the gradient's indices are those of the call
    cloned = allocations(under_a_mode)
    assert cloned.count(positions) == 1
    assert cloned.count(values) == allocations(run).count(values) + 1


def test_sparse_gradient_on_meta_has_no_elements() -> None:
    layer = nn.Embedding(50, 4, sparse=True, device="meta")
    layer(torch.zeros(400, dtype=torch.int64, device="meta")).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad._nnz() == 0
