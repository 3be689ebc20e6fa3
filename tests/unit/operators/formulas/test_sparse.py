"""Sparse tensors: only the stored elements count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops import OpCost
from tests.helpers.profiling import macs_and_flops, profile_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")

M, K, N = 4, 5, 3
aten = torch.ops.aten


def with_stored(stored: int, layout: torch.layout = torch.sparse_coo) -> torch.Tensor:
    dense = torch.zeros(M * K)
    dense[:stored] = torch.arange(1.0, stored + 1)
    return dense.view(M, K).to_sparse(layout=layout)


B = torch.ones(K, N)
S = 7


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_product_counts_stored_elements(layout: torch.layout) -> None:
    a = with_stored(S, layout)
    assert macs_and_flops(torch.sparse.mm, a, B) == (S * N, 2 * S * N)
    bias = torch.ones(M, N)
    assert macs_and_flops(torch.sparse.addmm, bias, a, B) == (S * N, 2 * S * N + M * N)
    scaled = macs_and_flops(lambda: torch.sparse.addmm(bias, a, B, beta=2, alpha=3))
    assert scaled == (S * N, 2 * S * N + 3 * M * N)


def test_sparse_product_of_same_shape_and_other_storage_is_not_cached() -> None:
    """The shape does not determine the cost, so it must not be cached."""
    one, other = with_stored(S), with_stored(2 * S)
    both = macs_and_flops(lambda: (torch.sparse.mm(one, B), torch.sparse.mm(other, B)))
    assert both == (3 * S * N, 2 * 3 * S * N)
    dense_name = macs_and_flops(lambda: (torch.mm(one, B), torch.mm(other, B)))
    assert dense_name == both


def test_sampled_product_counts_stored_elements() -> None:
    a, b = torch.ones(M, 11), torch.ones(11, K)
    sampled = macs_and_flops(torch.sparse.sampled_addmm, with_stored(S, torch.sparse_csr), a, b)
    assert sampled == (S * 11, 2 * S * 11 + S)


@pytest.mark.parametrize(
    ("reduce", "macs", "flops"),
    [("sum", S * N, 2 * S * N), ("mean", S * N, 2 * S * N + M * N), ("amax", 0, 2 * S * N)],
)
def test_reduced_product_counts_products_and_reduction(reduce: str, macs: int, flops: int) -> None:
    a = with_stored(S, torch.sparse_csr)
    assert macs_and_flops(lambda: torch.sparse.mm(a, B, reduce)) == (macs, flops)


@pytest.mark.parametrize(
    ("reduce", "macs", "flops"),
    [
        ("sum", 2 * S * N, 2 * 2 * S * N),
        ("mean", 2 * S * N, (2 + 1) * 2 * S * N),
        ("amax", 0, 2 * 2 * M * N),
    ],
)
def test_reduced_product_backward_counts_both_gradients(reduce: str, macs: int, flops: int) -> None:
    a = with_stored(S, torch.sparse_csr).requires_grad_()
    b = B.clone().requires_grad_()
    out = torch.sparse.mm(a, b, reduce)
    profile = profile_of(out.backward, torch.ones(M, N))
    cost = profile.by_operator()["aten._sparse_mm_reduce_impl_backward.default"].cost
    assert cost is not None
    assert (cost.macs, cost.flops) == (macs, flops)


def test_product_of_two_sparse_operands_is_bounded_by_the_rows_of_one() -> None:
    assert macs_and_flops(torch.sparse.mm, with_stored(S), B.to_sparse()) == (S * N, 2 * S * N)


def test_sparse_product_over_one_dimension_multiplies_stored_elements() -> None:
    a = with_stored(S, torch.sparse_csr)  # a full line of K, and 2 of the next
    assert macs_and_flops(aten._sparse_csr_prod, a, [1], True) == (0, S - 2)


def test_coalesce_adds_duplicate_elements() -> None:
    indices = torch.tensor([[0, 0, 0, 1, 1, 2]])
    doubled = torch.sparse_coo_tensor(indices, torch.ones(6, 7), (4, 7))
    assert macs_and_flops(doubled.coalesce) == (0, (6 - 3) * 7)


def test_sparse_sum_over_one_dimension_adds_stored_elements() -> None:
    a = with_stored(S)  # a full line of K, and 2 of the next
    assert macs_and_flops(torch.sparse.sum, a, 0) == (0, S - K)


def test_sparse_softmax_is_five_per_stored_element() -> None:
    assert macs_and_flops(torch.sparse.softmax, with_stored(S), 1) == (0, 5 * S)
    assert macs_and_flops(torch.sparse.log_softmax, with_stored(S), 1) == (0, 5 * S)


def test_sparse_softmax_backward_is_four_per_stored_element() -> None:
    a = with_stored(S)
    grad = a.clone()
    assert macs_and_flops(aten._sparse_softmax_backward_data, grad, a, 1, a) == (0, 4 * S)
    assert macs_and_flops(aten._sparse_log_softmax_backward_data, grad, a, 1, a) == (0, 4 * S)


def test_sparse_bias_is_added_once_per_stored_element() -> None:
    """Each of the 5 stored bias elements is added; alpha scales each of S·N products."""
    bias = torch.zeros(M, N)
    bias.view(-1)[:5] = 1
    bias = bias.to_sparse()
    a = with_stored(S)
    assert macs_and_flops(lambda: torch.sspaddmm(bias, a, B)) == (S * N, 2 * S * N + 5)
    scaled = macs_and_flops(lambda: torch.sspaddmm(bias, a, B, beta=3, alpha=2))
    assert scaled == (S * N, 2 * S * N + 5 + 5 + S * N)


def test_sparse_conversions_are_free() -> None:
    dense = torch.eye(5)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        assert macs_and_flops(lambda layout=layout: dense.to_sparse(layout=layout).to_dense()) == (
            0,
            0,
        )
    assert macs_and_flops(lambda: dense.sparse_mask(dense.to_sparse())) == (0, 0)


@pytest.mark.parametrize("name", ["relu", "abs", "sqrt", "neg"])
def test_sparse_pointwise_counts_stored_elements(name: str) -> None:
    assert macs_and_flops(getattr(torch, name), with_stored(S)) == (0, S)


def test_semi_structured_products_count_half() -> None:
    """Only the formulas are called: the operators need a GPU."""
    from dispatch_flops.operators.registry import lookup

    compressed, meta = torch.empty(M, 8, device="meta"), torch.empty(M, 1, device="meta")
    b, out = torch.empty(16, N, device="meta"), torch.empty(M, N, device="meta")
    half = M * N * 16 // 2

    def formula(op: Any, *args: Any, result: torch.Tensor = out, **kwargs: Any) -> tuple[int, int]:
        rule = lookup(op.default)
        assert rule is not None
        found: Any = rule.answer(op, args, kwargs, result)
        return found.macs, found.flops

    assert formula(aten._sparse_semi_structured_mm, compressed, meta, b) == (half, 2 * half)
    added = formula(aten._sparse_semi_structured_addmm, out, compressed, meta, b)
    assert added == (half, 2 * half + M * N)
    assert formula(aten._cslt_sparse_mm, meta, b) == (half, 2 * half)
    x, result = torch.empty(7, 16, device="meta"), torch.empty(7, M, device="meta")
    linear = formula(
        aten._sparse_semi_structured_linear,
        x,
        compressed,
        meta,
        bias=torch.empty(M, device="meta"),
        activation="relu",
        result=result,
    )
    assert linear == (7 * M * 8, 2 * 7 * M * 8 + 2 * 7 * M)


ROWS, WIDTH, TABLE_ROWS = 2, 7, 1000
INDEX_BYTES, VALUE_BYTES = ROWS * 8, ROWS * WIDTH * 4


def rows_of_a_table() -> torch.Tensor:
    values = torch.ones(ROWS, WIDTH)
    return torch.sparse_coo_tensor([[1, 3]], values, (TABLE_ROWS, WIDTH), check_invariants=True)


@pytest.mark.parametrize("method", ["add_", "sub_"])
@pytest.mark.parametrize("alpha", [1, -0.1])
def test_sparse_addend_touches_what_it_stores(method: str, alpha: float) -> None:
    """The step of SGD on an embedding's sparse gradient."""
    table, rows = torch.ones(TABLE_ROWS, WIDTH), rows_of_a_table()
    assert profile_of(lambda: getattr(table, method)(rows, alpha=alpha)).total() == OpCost(
        flops=ROWS * WIDTH * (1 if alpha == 1 else 2),
        bytes_read=INDEX_BYTES + 2 * VALUE_BYTES,
        bytes_written=VALUE_BYTES,
    )


def test_sparse_addend_out_of_place_copies_the_rest() -> None:
    table = torch.ones(TABLE_ROWS, WIDTH)
    assert profile_of(torch.add, table, rows_of_a_table()).total() == OpCost(
        flops=ROWS * WIDTH,
        bytes_read=table.nbytes + INDEX_BYTES + VALUE_BYTES,
        bytes_written=table.nbytes,
    )


def test_sparse_mask_reads_what_it_selects() -> None:
    table, rows = torch.ones(TABLE_ROWS, WIDTH), rows_of_a_table().coalesce()
    assert profile_of(table.sparse_mask, rows).total() == OpCost(
        bytes_read=INDEX_BYTES + 2 * VALUE_BYTES, bytes_written=INDEX_BYTES + VALUE_BYTES
    )
