"""Matrix products under the counter cost what their definitions cost, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.profiling import profile_of
from tests.oracles import contractions as define
from tests.oracles.comparing import check, examples, flag, macs_of, size, size_or_zero, tensor
from tests.oracles.counting import count

Grads = tuple[bool, bool, bool]
grads = st.tuples(flag, flag, flag)
numeric = st.sampled_from([torch.float64, torch.float32, torch.complex128])


@examples(20)
@given(size_or_zero, size_or_zero, size_or_zero, numeric, grads)
def test_mm_costs_its_definition(m: int, n: int, k: int, dtype: torch.dtype, need: Grads) -> None:
    a = tensor(m, k, dtype=dtype, grad=need[0])
    b = tensor(k, n, dtype=dtype, grad=need[1], seed=1)
    check(lambda: torch.mm(a, b), count(define.mm, a, b))


@examples(20)
@given(size_or_zero, size_or_zero, size, size_or_zero, grads)
def test_bmm_costs_its_definition(batch: int, m: int, n: int, k: int, need: Grads) -> None:
    a, b = tensor(batch, m, k, grad=need[0]), tensor(batch, k, n, grad=need[1], seed=1)
    check(lambda: torch.bmm(a, b), count(define.bmm, a, b))


@st.composite
def broadcast_batches(draw: Any) -> tuple[list[int], list[int]]:
    """Two batch shapes that broadcast, of any ranks up to 2."""
    full = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    return tuple(  # type: ignore[return-value]
        [n if draw(flag) else 1 for n in full[draw(st.integers(0, len(full))) :]] for _ in "ab"
    )


@examples(40)
@given(broadcast_batches(), size, size, size_or_zero, grads)
def test_matmul_with_broadcasting_costs_its_definition(
    batch: Any, m: int, n: int, k: int, need: Grads
) -> None:
    a = tensor(*batch[0], m, k, grad=need[0])
    b = tensor(*batch[1], k, n, grad=need[1], seed=1)
    check(lambda: a @ b, count(define.matmul, a, b))


@examples(20)
@given(st.lists(size, max_size=2), size, size, grads)
def test_matmul_with_a_vector_costs_its_definition(
    batch: list[int], m: int, k: int, need: Grads
) -> None:
    """Each row times the vector is a dot product. A vector on the right is ``mv``, whose matrix
    gradient is an outer product: multiplications without MACs."""
    a, x = tensor(*batch, m, k, grad=need[0]), tensor(k, grad=need[1], seed=1)
    expected = count(define.matmul, a, x)
    check(lambda: a @ x, expected, backward=expected.macs * need[1])


@examples(15)
@given(size, size, grads)
def test_vector_times_matrix_costs_its_definition(n: int, k: int, need: Grads) -> None:
    x, b = tensor(k, grad=need[0]), tensor(k, n, grad=need[1], seed=1)
    check(lambda: x @ b, count(define.matmul, x, b))


@examples(15)
@given(size_or_zero, grads)
def test_dot_costs_its_definition(k: int, need: Grads) -> None:
    """Each gradient is the other factor times one number, not a contraction."""
    a, b = tensor(k, grad=need[0]), tensor(k, grad=need[1], seed=1)
    for call in (torch.dot, torch.inner, torch.matmul):
        check(lambda call=call: call(a, b), count(define.dot_product, a, b), backward=0)


@examples(15)
@given(size_or_zero, size_or_zero, grads)
def test_mv_and_addmv_cost_their_definitions(m: int, k: int, need: Grads) -> None:
    a, x = tensor(m, k, grad=need[0]), tensor(k, grad=need[1], seed=1)
    c = tensor(m, grad=need[2], seed=2)
    check(lambda: torch.mv(a, x), count(define.mv, a, x), backward=m * k * need[1])
    check(lambda: torch.addmv(c, a, x), count(define.addmv, c, a, x), backward=m * k * need[1])


@examples(15)
@given(size_or_zero, size, grads)
def test_outer_product_has_no_macs(m: int, n: int, need: Grads) -> None:
    """Their gradients do: da = g b and db = g^T a are matrix-vector products, where torch
    computes them so."""
    a, b = tensor(m, grad=need[0]), tensor(n, grad=need[1], seed=1)
    c = tensor(m, n, grad=need[2], seed=2)
    check(lambda: torch.outer(a, b), count(define.outer, a, b), backward=0)
    contracted = m * n * (need[0] + need[1])
    check(lambda: torch.addr(c, a, b), count(define.addr, c, a, b), backward=contracted)


@examples(15)
@given(size_or_zero, size, size_or_zero, grads)
def test_addmm_costs_its_definition(m: int, n: int, k: int, need: Grads) -> None:
    a, b = tensor(m, k, grad=need[0]), tensor(k, n, grad=need[1], seed=1)
    for c in (tensor(m, n, grad=need[2]), tensor(n, grad=need[2]), tensor(1, 1, grad=need[2])):
        check(lambda c=c: torch.addmm(c, a, b), count(define.addmm, c, a, b))


@examples(15)
@given(size_or_zero, size, size, size_or_zero, grads)
def test_baddbmm_and_addbmm_cost_their_definitions(
    batch: int, m: int, n: int, k: int, need: Grads
) -> None:
    a, b = tensor(batch, m, k, grad=need[0]), tensor(batch, k, n, grad=need[1], seed=1)
    c, d = tensor(batch, m, n, grad=need[2]), tensor(m, n, grad=need[2])
    check(lambda: torch.baddbmm(c, a, b), count(define.baddbmm, c, a, b))
    check(lambda: torch.addbmm(d, a, b), count(define.addbmm, d, a, b))


@pytest.mark.parametrize("alpha,beta", [(0.5, 2.0), (1.0, 0.0), (0.0, 1.0)])
def test_addmm_with_scaling_has_the_same_macs(alpha: float, beta: float) -> None:
    c, a, b = tensor(2, 5), tensor(2, 3), tensor(3, 5)
    assert macs_of(lambda: torch.addmm(c, a, b, alpha=alpha, beta=beta)) == (2 * 3 * 5, 0)


@examples(20)
@given(st.lists(size_or_zero, max_size=3), size, size, flag, grads)
def test_linear_costs_its_definition(
    batch: list[int], n: int, k: int, biased: bool, need: Grads
) -> None:
    x, w = tensor(*batch, k, grad=need[0]), tensor(n, k, grad=need[1], seed=1)
    bias = tensor(n, grad=need[2], seed=2) if biased else None
    check(lambda: F.linear(x, w, bias), count(define.linear, x, w, bias))


def test_linear_with_a_weight_vector_costs_its_definition() -> None:
    x, w = tensor(2, 3, 5), tensor(5, seed=1)
    check(lambda: F.linear(x, w), count(define.matmul, x, w))


@examples(15)
@given(size, size, size, size)
def test_bilinear_costs_its_definition(rows: int, outs: int, left: int, right: int) -> None:
    x, w, z = tensor(rows, left), tensor(outs, left, right, seed=1), tensor(rows, right, seed=2)
    check(lambda: F.bilinear(x, z, w), count(define.bilinear, x, w, z))


@examples(15)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), size, size)
def test_grouped_mm_costs_its_definition(rows: list[int], n: int, k: int) -> None:
    """Each row is multiplied only by its own group's matrix."""
    n, k = 8 * n, 8 * k  # the kernel needs rows of 16 bytes
    ends = torch.tensor(rows).cumsum(0).to(torch.int32)
    x = tensor(sum(rows), k, dtype=torch.bfloat16)
    w = tensor(len(rows), k, n, dtype=torch.bfloat16, seed=1)
    expected = sum(r * n * k for r in rows)
    assert macs_of(lambda: F.grouped_mm(x, w, offs=ends)) == (expected, 0)


def test_grouped_mm_backward_costs_its_definition() -> None:
    x = tensor(8, 16, dtype=torch.bfloat16, grad=True)
    w = tensor(2, 16, 24, dtype=torch.bfloat16, grad=True)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    macs = macs_of(lambda: F.grouped_mm(x, w, offs=ends) * tensor(8, 24, dtype=torch.bfloat16))
    assert macs == (8 * 16 * 24, 2 * 8 * 16 * 24)


def test_grouped_mm_with_an_empty_group_costs_its_definition() -> None:
    x = tensor(5, 8, dtype=torch.float32)
    w = tensor(3, 8, 16, dtype=torch.float32, seed=1)
    expected = count(define.grouped_mm, x, w, [1, 1, 5])
    check(lambda: F.grouped_mm(x, w, offs=torch.tensor([1, 1, 5], dtype=torch.int32)), expected)
    assert expected.macs == 5 * 8 * 16


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@examples(20)
@given(size, size, size, st.sampled_from(["coo", "csr"]))
def test_sparse_mm_counts_stored_entries(m: int, n: int, k: int, layout: str) -> None:
    dense, b = tensor(m, k), tensor(k, n, seed=1)
    coo = dense.to_sparse()
    a = coo if layout == "coo" else dense.to_sparse_csr()
    places = [tuple(place) for place in coo.indices().T.tolist()]
    expected = count(define.sparse_mm, places, coo.values(), m, b)
    assert expected.macs == int((dense != 0).sum()) * n
    check(lambda: torch.sparse.mm(a, b), expected)
    check(lambda: a @ b, expected)


def test_integer_products_count_as_macs() -> None:
    a = tensor(32, 16, dtype=torch.int8)
    b = tensor(16, 24, dtype=torch.int8)
    assert macs_of(lambda: torch._int_mm(a, b)) == (32 * 16 * 24, 0)
    assert macs_of(lambda: a.long() @ b.long()) == (32 * 16 * 24, 0)


def test_function_transforms_of_a_product_cost_their_products() -> None:
    """vmap adds a batch; forward-mode differentiates each factor in turn; grad is a backward."""
    a, b = tensor(2, 3), tensor(3, 5, seed=1)
    n = 2 * 3 * 5
    batched = torch.stack([a, a, a, a]), torch.stack([b, b, b, b])
    assert macs_of(lambda: torch.vmap(torch.mm)(*batched)) == (4 * n, 0)
    assert macs_of(lambda: torch.func.jvp(torch.mm, (a, b), (a, b))) == (n + 2 * n, 0)
    assert macs_of(lambda: torch.func.grad(lambda x: (x @ b).sum())(a)) == (n, n)


def test_double_backward_of_a_product_costs_its_products() -> None:
    """g = (2 a b) b^T: its two factors, then the two of a b, after g itself."""
    a, b = tensor(2, 3, grad=True), tensor(3, 5, grad=True, seed=1)

    def step() -> None:
        loss = (a @ b).square().sum()
        (g,) = torch.autograd.grad(loss, a, create_graph=True)
        g.square().sum().backward()

    profile = profile_of(step)
    n = 2 * 3 * 5
    assert profile.total("forward").macs == n
    assert profile.total("backward").macs == n + 2 * n + 2 * n


def test_multi_dot_and_tensordot_cost_their_products() -> None:
    a, b, c = tensor(2, 11), tensor(11, 3, seed=1), tensor(3, 7, seed=2)
    # (a b) c is cheaper than a (b c)
    assert macs_of(lambda: torch.linalg.multi_dot([a, b, c]))[0] == 2 * 11 * 3 + 2 * 3 * 7
    x, y = tensor(2, 3, 5), tensor(5, 3, 7, seed=1)
    assert macs_of(lambda: torch.tensordot(x, y, dims=([1, 2], [1, 0])))[0] == 2 * 7 * 3 * 5
