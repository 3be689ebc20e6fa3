"""Matrix products: MACs and FLOPs as products of coprime sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dispatch_flops.operators.formulas._arithmetic import cost_of
from dispatch_flops.operators.formulas.matmul import inner_products
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
M, K, N, B = 3, 5, 7, 2
MNK = M * N * K


NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
SPARSE = pytest.mark.filterwarnings("ignore:Sparse")


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def counted(fn: Callable[[], Any]) -> tuple[int, int]:
    total = profile_of(fn).total()
    return total.macs, total.flops


PRODUCTS = {
    "mm": (lambda: rand(M, K) @ rand(K, N), MNK, 2 * MNK),
    "bmm": (lambda: torch.bmm(rand(B, M, K), rand(B, K, N)), B * MNK, 2 * B * MNK),
    "mv": (lambda: rand(4, 8) @ rand(8), 4 * 8, 2 * 4 * 8),
    "dot": (lambda: rand(8) @ rand(8), 8, 2 * 8),
    "vdot": (lambda: torch.vdot(rand(8), rand(8)), 8, 2 * 8),
    "vector @ matrix": (lambda: rand(K) @ rand(K, N), K * N, 2 * K * N),
    "broadcast": (lambda: rand(M, K) @ rand(B, K, N), B * MNK, 2 * B * MNK),
    "einsum": (
        lambda: torch.einsum("bmk,bkn->bmn", rand(B, M, K), rand(B, K, N)),
        B * MNK,
        2 * B * MNK,
    ),
    "tensordot": (lambda: torch.tensordot(rand(M, K), rand(K, N), 1), MNK, 2 * MNK),
    "inner": (lambda: torch.inner(rand(M, K), rand(N, K)), MNK, 2 * MNK),
    "outer": (lambda: torch.outer(rand(M), rand(N)), 0, M * N),
    "addr": (lambda: torch.addr(rand(M, N), rand(M), rand(N)), 0, 2 * M * N),
    "addr, beta 0, alpha 2": (
        lambda: torch.addr(rand(M, N), rand(M), rand(N), beta=0, alpha=2),
        0,
        2 * M * N,
    ),
    "empty contraction": (lambda: rand(M, 0) @ rand(0, N), 0, 0),
    "no rows": (lambda: rand(0, K) @ rand(K, N), 0, 0),
    "int8": (
        lambda: torch._int_mm(rand(17, 8, dtype=torch.int8), rand(8, 16, dtype=torch.int8)),
        17 * 16 * 8,
        2 * 17 * 16 * 8,
    ),
    "int64": (
        lambda: rand(M, K, dtype=torch.int64) @ rand(K, N, dtype=torch.int64),
        MNK,
        2 * MNK,
    ),
    "complex": (
        lambda: rand(M, K, dtype=torch.complex64) @ rand(K, N, dtype=torch.complex64),
        4 * MNK,
        8 * MNK,
    ),
    "out=": (lambda: torch.mm(rand(M, K), rand(K, N), out=torch.empty(M, N)), MNK, 2 * MNK),
}


@pytest.mark.parametrize(("fn", "macs", "flops"), PRODUCTS.values(), ids=PRODUCTS)
def test_product_counts_match_products_of_sizes(
    fn: Callable[[], Any], macs: int, flops: int
) -> None:
    assert counted(fn) == (macs, flops)


@pytest.mark.parametrize("name", [n for n in PRODUCTS if n not in ("int8",)])
def test_product_on_meta_counts_as_on_cpu(name: str) -> None:
    fn, macs, flops = PRODUCTS[name]

    def on_meta() -> None:
        with torch.device("meta"):
            fn()

    assert counted(on_meta) == (macs, flops)


# operands, output elements, bias elements
WITH_BIAS = {
    torch.addmm: ((N,), (M, K), (K, N), M * N, MNK),
    torch.baddbmm: ((B, M, N), (B, M, K), (B, K, N), B * M * N, B * MNK),
    torch.addbmm: ((M, N), (B, M, K), (B, K, N), M * N, B * MNK),
    torch.addmv: ((M,), (M, K), (K,), M, M * K),
}


@pytest.mark.parametrize("op", WITH_BIAS)
@pytest.mark.parametrize("beta", [0, 1, 3])
@pytest.mark.parametrize("alpha", [1, 2])
def test_bias_with_alpha_and_beta_is_scaled_and_added(
    op: Callable[..., Any], beta: int, alpha: int
) -> None:
    bias, a, b, elements, macs = WITH_BIAS[op]
    bias_elements = torch.Size(bias).numel()
    flops = 2 * macs
    flops += elements if alpha != 1 else 0
    flops += elements if beta != 0 else 0
    flops += bias_elements if beta not in (0, 1) else 0
    fn = lambda: op(rand(*bias), rand(*a), rand(*b), beta=beta, alpha=alpha)  # noqa: E731
    assert counted(fn) == (macs, flops)


def test_bias_of_complex_or_integer_products_follows_the_dtype() -> None:
    c, i = torch.complex64, torch.int64
    fn = lambda dtype: counted(  # noqa: E731
        lambda: torch.addmm(rand(N, dtype=dtype), rand(M, K, dtype=dtype), rand(K, N, dtype=dtype))
    )
    assert fn(c) == (4 * MNK, 8 * MNK + 2 * M * N)
    assert fn(i) == (MNK, 2 * MNK)


def test_in_place_product_counts_as_functional() -> None:
    assert counted(lambda: rand(M, N).addmm_(rand(M, K), rand(K, N))) == (MNK, 2 * MNK + M * N)


@pytest.mark.parametrize(("use_gelu", "activation"), [(False, 1), (True, 5)])
def test_addmm_activation_adds_the_activation(use_gelu: bool, activation: int) -> None:
    """relu is a comparison; gelu, 0.5·x·(1 + erf(x·√½)), is three products, a sum and erf."""
    fn = lambda: torch._addmm_activation(  # noqa: E731
        rand(N), rand(M, K), rand(K, N), use_gelu=use_gelu
    )
    assert counted(fn) == (MNK, 2 * MNK + M * N + activation * M * N)


def test_foreach_mm_sums_its_pairs() -> None:
    if not hasattr(aten, "_foreach_mm"):
        pytest.skip("this torch has no _foreach_mm")
    fn = lambda: aten._foreach_mm([rand(M, K), rand(2, 3)], [rand(K, N), rand(3, 4)])  # noqa: E731
    assert counted(fn) == (MNK + 2 * 3 * 4, 2 * (MNK + 2 * 3 * 4))


def test_product_backward_is_two_products() -> None:
    a, b = rand(M, K).requires_grad_(), rand(K, N).requires_grad_()
    profile = profile_of(lambda: torch.mm(a, b).backward(rand(M, N)))
    assert profile.total("forward").macs == MNK
    assert profile.total("backward").macs == 2 * MNK


def test_product_backward_with_a_frozen_factor_is_one_product() -> None:
    a, b = rand(M, K).requires_grad_(), rand(K, N)
    profile = profile_of(lambda: torch.mm(a, b).backward(rand(M, N)))
    assert profile.total("backward").macs == MNK


# -- linear --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8,), (2, 3, 8), (0, 8)])
def test_linear_with_any_leading_shape_counts_all_tokens(shape: tuple[int, ...]) -> None:
    tokens = torch.Size(shape[:-1]).numel()
    linear = torch.nn.Linear(8, 5)
    with torch.inference_mode():
        assert counted(lambda: linear(rand(*shape))) == (tokens * 40, tokens * (80 + 5))


@NESTED
def test_linear_on_strided_nested_tensors_counts_real_lengths() -> None:
    linear = torch.nn.Linear(K, N)
    lengths = (2, 3)
    x = torch.nested.nested_tensor([rand(n, K) for n in lengths])
    tokens = sum(lengths)
    assert counted(lambda: linear(x)) == (tokens * K * N, tokens * N * (2 * K + 1))


def test_linear_backward_follows_its_mask() -> None:
    x, grad, weight = rand(M, K), rand(M, N), rand(N, K)
    for mask in itertools.product((True, False), repeat=3):
        cost = cost_of(aten.linear_backward, x, grad, weight, mask, out=None)
        assert cost.macs == (mask[0] + mask[1]) * MNK
        assert cost.flops == 2 * cost.macs + mask[2] * (M - 1) * N


@NESTED
def test_matmul_of_strided_nested_tensors_sums_its_items() -> None:
    a = torch.nested.nested_tensor([rand(2, 3, K), rand(2, 4, K)])
    b = torch.nested.nested_tensor([rand(2, K, 5), rand(2, K, 6)])
    macs = 2 * 3 * K * 5 + 2 * 4 * K * 6
    assert counted(lambda: torch.matmul(a, b)) == (macs, 2 * macs)


def test_matmul_backward_follows_its_mask() -> None:
    a, b, grad = rand(M, K), rand(K, N), rand(M, N)
    for mask in itertools.product((True, False), repeat=2):
        cost = cost_of(aten.matmul_backward, grad, a, b, mask, out=None)
        assert (cost.macs, cost.flops) == (sum(mask) * MNK, 2 * sum(mask) * MNK)


def test_onednn_linear_with_an_activation_counts_both() -> None:
    fn = lambda: torch.ops.mkldnn._linear_pointwise(  # noqa: E731
        rand(M, K), rand(N, K), rand(N), "relu", [], ""
    )
    assert counted(fn) == (MNK, 2 * MNK + M * N + M * N)
    fn = lambda: torch.ops.mkldnn._linear_pointwise(  # noqa: E731
        rand(M, K), rand(M, N), rand(N, K), None, "add"
    )
    assert counted(fn) == (MNK, 2 * MNK + M * N)


# -- stored sparsely -----------------------------------------------------------------------


def diagonal(n: int) -> torch.Tensor:
    return torch.eye(n)


@SPARSE
@pytest.mark.parametrize(
    ("sparse", "stored"),
    [
        (lambda: diagonal(6).to_sparse(), 6),
        (lambda: diagonal(6).to_sparse_csr(), 6),
        (lambda: diagonal(6).to_sparse_csc(), 6),
        (lambda: diagonal(6).to_sparse_bsr((2, 3)), 4 * 2 * 3),
        (lambda: diagonal(6).to_sparse_bsc((2, 3)), 4 * 2 * 3),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc"],
)
def test_product_with_a_sparse_operand_counts_stored_elements(
    sparse: Callable[[], torch.Tensor], stored: int
) -> None:
    """The diagonal of a 6 x 6 crosses 4 of its 2 x 3 blocks."""
    s = sparse()
    assert inner_products(s, rand(6, 7)) == stored * 7
    assert inner_products(rand(5, 6), s) == stored * 5
    assert inner_products(s, rand(6)) == stored
    assert inner_products(s, rand(2, 6, 7)) == stored * 7 * 2
    assert inner_products(rand(2, 5, 6), s) == stored * 5 * 2


@SPARSE
def test_product_of_two_sparse_operands_is_bounded_by_the_smaller_side() -> None:
    a = diagonal(6).to_sparse_csr()
    b = rand(6, 7).to_sparse_csr()
    assert inner_products(a, b) == min(6 * 7, 42 * 6)


# -- grouped, scaled, quantised ------------------------------------------------------------


GROUPED = {
    "2d-3d": ((16, 24), (2, 24, 8), 16 * 24 * 8),
    "3d-3d": ((2, 3, 16), (2, 16, 8), 2 * 3 * 16 * 8),
    "2d-2d": ((8, 16), (16, 24), 8 * 16 * 24),
    "3d-2d": ((2, 8, 24), (24, 16), 8 * 24 * 16),
}


@pytest.mark.parametrize(("a", "b", "macs"), GROUPED.values(), ids=GROUPED)
def test_grouped_mm_counts_each_row_once(a: tuple[int, ...], b: tuple[int, ...], macs: int) -> None:
    ends = None if len(a) == len(b) == 3 else torch.tensor([8, 16], dtype=torch.int32)
    left = rand(*a, dtype=torch.bfloat16)
    right = rand(*b, dtype=torch.bfloat16).transpose(-2, -1).contiguous().transpose(-2, -1)
    assert counted(lambda: torch._grouped_mm(left, right, offs=ends)) == (macs, 2 * macs)


def test_scaled_mm_scales_the_result_twice() -> None:
    a = rand(16, 32).to(torch.float8_e4m3fn)
    one = torch.ones(())
    fn = lambda: torch._scaled_mm(a, a.t(), one, one)  # noqa: E731
    assert counted(fn) == (16 * 16 * 32, 2 * 16 * 16 * 32 + 2 * 16 * 16)


def test_int8_weights_are_scaled_per_column() -> None:
    x, w = rand(3, 32, dtype=torch.bfloat16), rand(8, 32, dtype=torch.int8)
    fn = lambda: aten._weight_int8pack_mm(x, w, rand(8, dtype=torch.bfloat16))  # noqa: E731
    assert counted(fn) == (3 * 32 * 8, 2 * 3 * 32 * 8 + 3 * 8)


# -- bilinear forms and distances ----------------------------------------------------------


def test_bilinear_is_two_contractions() -> None:
    """Σ_i x1[b,i]·w[k,i,j], then Σ_j with x2[b,j]; forward, and the three of the backward."""
    b, i, j, k = 2, 3, 5, 7
    bilinear = torch.nn.Bilinear(i, j, k)
    forward = b * k * i * j + b * k * j
    assert counted(lambda: bilinear(rand(b, i), rand(b, j))) == (forward, 2 * forward + b * k)


def test_trilinear_in_every_role_is_two_contractions() -> None:
    """A contraction over the unrolled dimension runs slice by slice, so it counts in both."""
    b, i, j, k = 2, 3, 5, 7
    grad, x1, w, x2 = rand(b, k), rand(b, i), rand(k, i, j), rand(b, j)
    # d/dx1[b,i] = Σ_kj grad[b,k]·w[k,i,j]·x2[b,j]: k is unrolled
    cost = profile_of(lambda: torch._trilinear(grad, w, x2, [2, 3], [0], [1, 2], [1, 3])).total()
    assert cost.macs == 2 * (b * k * i * j)
    # d/dw[k,i,j] = Σ_b x1[b,i]·grad[b,k]·x2[b,j]
    cost = profile_of(lambda: torch._trilinear(x1, grad, x2, [1, 3], [2, 3], [1, 2], [0])).total()
    assert cost.macs == b * k * i + b * k * i * j


def test_cdist_by_matrix_product_costs_its_decomposition() -> None:
    from torch._decomp import decomposition_table

    x1, x2 = rand(2, 30, 5), rand(2, 27, 5)
    reference = decomposition_table[aten._euclidean_dist.default]
    assert counted(lambda: torch.cdist(x1, x2)) == counted(lambda: reference(x1, x2))
    assert counted(lambda: torch.cdist(x1, x2))[0] == 2 * 30 * 27 * (5 + 2)


@pytest.mark.parametrize(
    ("p", "per_feature", "root"), [(0.0, 2, 0), (1.0, 2, 0), (2.0, 2, 1), (3.0, 3, 1)]
)
def test_cdist_by_elements_counts_each_feature(p: float, per_feature: int, root: int) -> None:
    pairs, d = 3 * 4, 5
    flops = pairs * (d * per_feature + (d - 1) + root)
    assert counted(lambda: torch.cdist(rand(3, d), rand(4, d), p=p)) == (0, flops)


def test_pdist_counts_each_pair_once() -> None:
    pairs, d = 4 * 3 // 2, 5
    assert counted(lambda: torch.pdist(rand(4, d))) == (0, pairs * (2 * d + (d - 1) + 1))


@pytest.mark.parametrize(
    ("p", "per_feature"), [(0.0, 0), (1.0, 3), (2.0, 3), (3.0, 8), (float("inf"), 6)]
)
def test_gradient_of_distances_sums_over_pairs(p: float, per_feature: int) -> None:
    """That of the number of unequal features, p=0, is zero."""
    rows, others, d = 3, 4, 5
    sums = (others - 1) * rows * d
    x1, x2, grad = rand(rows, d), rand(others, d), rand(rows, others)
    fn = lambda: aten._cdist_backward(grad, x1, x2, p, grad)  # noqa: E731
    assert counted(fn) == (0, rows * others * d * per_feature + (sums if p else 0))
    pairs, sums = rows * (rows - 1) // 2, (rows - 2) * rows * d
    fn = lambda: aten._pdist_backward(rand(pairs), x1, p, rand(pairs))  # noqa: E731
    assert counted(fn) == (0, pairs * d * per_feature + (sums if p else 0))


@pytest.mark.parametrize(
    ("mode", "few", "many"),
    [
        ("use_mm_for_euclid_dist", 3 * (5 + 2), 3 * (5 + 2)),
        ("use_mm_for_euclid_dist_if_necessary", 0, 3 * (5 + 2)),
        ("donot_use_mm_for_euclid_dist", 0, 0),
    ],
)
def test_many_distances_come_by_products_unless_the_mode_says_otherwise(
    mode: str, few: int, many: int
) -> None:
    """More than 25 rows on either side are many."""
    x = rand(3, 5)
    assert counted(lambda: torch.cdist(rand(25, 5), x, compute_mode=mode))[0] == 25 * few
    assert counted(lambda: torch.cdist(rand(26, 5), x, compute_mode=mode))[0] == 26 * many
    assert counted(lambda: torch.cdist(x, rand(26, 5), compute_mode=mode))[0] == 26 * many


def test_two_products_that_inductor_adds_cost_both_and_the_sum() -> None:
    import torch._inductor.kernel.mm_plus_mm  # defines the operator

    x = torch.empty(M, K, device="meta"), torch.empty(K, N, device="meta")
    y = torch.empty(M, B, device="meta"), torch.empty(B, N, device="meta")
    found = cost_of(torch.ops.inductor._mm_plus_mm.default, *x, *y, out=None)
    macs = M * N * (K + B)
    assert (found.macs, found.flops) == (macs, 2 * macs + M * N)


def test_complex_scale_of_a_product_is_six_per_element() -> None:
    a, b, bias = (rand(*s, dtype=torch.complex64) for s in ((M, K), (K, N), (M, N)))
    flops = 8 * MNK + M * N * (6 + 2 + 6)
    assert counted(lambda: torch.addmm(bias, a, b, alpha=2, beta=3)) == (4 * MNK, flops)
