"""Copies that matrix products make of their factors, against the events of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode
from tests.helpers.allocator import peak_bytes
from tests.unit.memory.test_kernel_allocations import assert_equals_the_allocators

ROWS, INNER, COLUMNS = 53, 37, 29
LAYOUTS: dict[str, Callable[..., torch.Tensor]] = {
    "contiguous": lambda n, m, t: torch.randn(n, m).to(t),
    "transposed": lambda n, m, t: torch.randn(m, n).to(t).t(),
    "expanded": lambda n, m, t: torch.randn(1, 1).to(t).expand(n, m),
    "repeated row": lambda n, m, t: torch.randn(1, m).to(t).expand(n, m),
    "every other column": lambda n, m, t: torch.randn(n, 2 * m).to(t)[:, ::2],
    "slice of columns": lambda n, m, t: torch.randn(n, m + 3).to(t)[:, :m],
    "slice of a transpose": lambda n, m, t: torch.randn(m, n + 5).to(t).t()[:n],
}
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.int64, torch.bfloat16]


def factors(first: str, second: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return LAYOUTS[first](ROWS, INNER, dtype), LAYOUTS[second](INNER, COLUMNS, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_mm_of_any_strides_takes_what_the_allocator_says(
    first: str, second: str, dtype: torch.dtype
) -> None:
    a, b = factors(first, second, dtype)
    assert_equals_the_allocators(lambda: torch.mm(a, b), a, b)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addmm_and_mv_of_any_strides_take_what_the_allocator_says(layout: str) -> None:
    a, b = factors(layout, layout, torch.float32)
    bias, vector = torch.randn(COLUMNS), torch.randn(INNER)
    assert_equals_the_allocators(lambda: torch.addmm(bias, a, b), bias, a, b)
    assert_equals_the_allocators(lambda: torch.mv(a, vector), a, vector)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_bmm_of_any_strides_takes_what_the_allocator_says(
    first: str, second: str, size: int
) -> None:
    a, b = (t.expand(size, *t.shape) for t in factors(first, second, torch.float32))
    assert_equals_the_allocators(lambda: torch.bmm(a, b), a, b)
    small, thin = a[:, :3, :4], b[:, :4, :5]
    assert_equals_the_allocators(lambda: torch.bmm(small, thin), small, thin)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_mm_of_a_conjugated_factor_takes_what_the_allocator_says(
    is_transposed: bool, first: bool
) -> None:
    a, b = (torch.randn(ROWS, ROWS, dtype=torch.complex64) for _ in range(2))
    conjugated = a.t().conj() if is_transposed else a.conj()
    pair = (conjugated, b) if first else (b, conjugated)
    assert_equals_the_allocators(lambda: torch.mm(*pair), a, b)


def test_step_whose_gradient_is_expanded_peaks_at_the_allocators_bytes() -> None:
    def step_of() -> tuple[nn.Module, torch.Tensor, Callable[[], Any]]:
        model = nn.Sequential(nn.Linear(37, 53), nn.GELU(), nn.Linear(53, 29))
        x = torch.randn(83, 37)
        return model, x, lambda: model(x).sum().backward()

    model, x, step = step_of()
    truth = peak_bytes(step, [*model.parameters(), x])
    model, x, step = step_of()
    with FlopCounterMode(model, display=False, memory=True) as counter:
        step()
    memory = counter.profile.memory
    assert memory is not None
    assert memory.peak_bytes == truth
    at_peak = {(use.role, use.fqn): use.bytes for use in memory.at_peak}
    assert at_peak["workspace", "2"] == 83 * 29 * 4  # the gradient of the sum, made contiguous


SPARSE = {
    "COO": lambda a: a.to_sparse(),
    "CSR": lambda a: a.to_sparse_csr(),
    "CSC": lambda a: a.to_sparse_csc(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", SPARSE)
@pytest.mark.parametrize("kind", ["mm", "mm of two", "addmm", "mv"])
def test_products_of_sparse_matrices_take_what_the_allocator_says(kind: str, layout: str) -> None:
    """No kernel makes a dense copy of them."""
    a = SPARSE[layout](torch.eye(INNER))
    b, c, vector = torch.randn(INNER, COLUMNS), torch.randn(INNER, COLUMNS), torch.randn(INNER)
    if kind == "mm":
        assert_equals_the_allocators(lambda: torch.mm(a, b), parts_of(a), b)
    elif kind == "mm of two":
        assert_equals_the_allocators(lambda: torch.mm(a, a), parts_of(a))
    elif kind == "addmm":
        assert_equals_the_allocators(lambda: torch.addmm(c, a, b), parts_of(a), b, c)
    else:
        assert_equals_the_allocators(lambda: torch.mv(a, vector), parts_of(a), vector)


def test_batched_product_of_a_sparse_matrix_takes_what_the_allocator_says() -> None:
    a = torch.eye(INNER).expand(3, INNER, INNER).to_sparse()
    b = torch.randn(3, INNER, COLUMNS)
    assert_equals_the_allocators(lambda: torch.bmm(a, b), parts_of(a), b)


def test_transpose_of_a_sparse_matrix_has_indices_of_its_own() -> None:
    a = torch.eye(INNER).to_sparse()

    def run() -> None:
        kept = a.t()
        torch.ones(1009)
        del kept

    assert_equals_the_allocators(run, parts_of(a))


def parts_of(matrix: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a sparse matrix consists of."""
    if matrix.layout is torch.sparse_coo:
        return [matrix._indices(), matrix._values()]
    if matrix.layout is torch.sparse_csr:
        return [matrix.crow_indices(), matrix.col_indices(), matrix.values()]
    return [matrix.ccol_indices(), matrix.row_indices(), matrix.values()]
