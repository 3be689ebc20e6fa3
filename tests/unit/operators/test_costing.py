"""Bytes and compute dtype of operator calls, derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dispatch_flops.analysis.operators import operator_rows
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
A, B, B_, BIAS = torch.ones(3, 5), torch.ones(3, 5), torch.ones(5, 7), torch.ones(7)
HALF = torch.ones(3, 5, dtype=torch.bfloat16)
X, W = torch.ones(2, 3, 8, 9), torch.ones(5, 3, 2, 4)
Q, K, V = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 7, 4), torch.ones(2, 3, 7, 4)

CASES: dict[str, tuple[Callable[[], Any], str, int, int]] = {
    # call, operator, bytes read, bytes written
    "add": (lambda: A + B, "aten.add.Tensor", 4 * 2 * 3 * 5, 4 * 3 * 5),
    "add in place": (lambda: A.clone().add_(A), "aten.add_.Tensor", 4 * 2 * 3 * 5, 4 * 3 * 5),
    "add of a number": (lambda: A + 1.0, "aten.add.Tensor", 4 * 3 * 5, 4 * 3 * 5),
    "add broadcast": (lambda: A + torch.ones(5), "aten.add.Tensor", 4 * (3 * 5 + 5), 4 * 3 * 5),
    "add bfloat16": (lambda: HALF + HALF.clone(), "aten.add.Tensor", 2 * 2 * 3 * 5, 2 * 3 * 5),
    "add into out": (
        lambda: torch.add(A, B, out=torch.empty(3, 5)),
        "aten.add.out",
        4 * 2 * 3 * 5,
        4 * 3 * 5,
    ),
    "mm": (lambda: A @ B_, "aten.mm.default", 4 * (3 * 5 + 5 * 7), 4 * 3 * 7),
    "addmm": (
        lambda: torch.addmm(BIAS, A, B_),
        "aten.addmm.default",
        4 * (7 + 3 * 5 + 5 * 7),
        4 * 3 * 7,
    ),
    "convolution": (
        lambda: F.conv2d(X, W),
        "aten.convolution.default",
        4 * (2 * 3 * 8 * 9 + 5 * 3 * 2 * 4),
        4 * 2 * 5 * 7 * 6,
    ),
    "sum": (lambda: A.sum(), "aten.sum.default", 4 * 3 * 5, 4),
    "cast": (lambda: A.to(torch.bfloat16), "aten._to_copy.default", 4 * 3 * 5, 2 * 3 * 5),
    "copy": (lambda: A.clone(), "aten.clone.default", 4 * 3 * 5, 4 * 3 * 5),
    "view": (lambda: A.view(15), "aten.view.default", 0, 0),
    "transpose": (lambda: A.t(), "aten.t.default", 0, 0),
    "bare allocation": (lambda: torch.empty(3, 5), "aten.empty.memory_format", 0, 0),
    "zeros": (lambda: torch.zeros(3, 5), "aten.zeros.default", 0, 4 * 3 * 5),
    "comparison": (lambda: A > B, "aten.gt.Tensor", 4 * 2 * 3 * 5, 3 * 5),
    # reads only the picked rows, and the indices of 8 bytes each
    "embedding": (
        lambda: F.embedding(torch.tensor([1, 2, 1, 0]), torch.ones(11, 5)),
        "aten.embedding.default",
        8 * 4 + 4 * 4 * 5,
        4 * 4 * 5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_of_operator_match_its_tensors(case: str) -> None:
    call, op, read, written = CASES[case]
    cost = profile_of(call).by_operator()[op].cost
    assert cost is not None
    assert (cost.bytes_read, cost.bytes_written) == (read, written)


def test_bytes_of_fused_attention_are_its_operands_and_results() -> None:
    op = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    cost = profile_of(lambda: F.scaled_dot_product_attention(Q, K, V)).by_operator()[op].cost
    assert cost is not None
    assert cost.bytes_read == 4 * (2 * 3 * 5 * 4 + 2 * (2 * 3 * 7 * 4))
    assert cost.bytes_written == 4 * (2 * 3 * 5 * 4 + 2 * 3 * 5)  # and the logarithms of the sums


def test_arithmetic_intensity_of_operators_and_modules_is_flops_per_byte() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU())
    x = torch.ones(3, 5)
    with torch.no_grad():
        profile = profile_of(lambda: model(x), model=model)
    flops = 2 * 3 * 5 * 7 + 3 * 7
    moved = 4 * (7 + 3 * 5 + 5 * 7 + 3 * 7)
    assert profile.node("0").total().arithmetic_intensity == flops / moved
    assert profile.node("1").total().arithmetic_intensity == 3 * 7 / (4 * 2 * 3 * 7)
    rows = {row.op: row for row in operator_rows(profile)}
    assert rows["aten.addmm.default"].cost.arithmetic_intensity == flops / moved
    assert rows["aten.t.default"].cost.arithmetic_intensity is None


def test_view_of_the_users_own_moves_no_bytes_whatever_its_formula_says() -> None:
    with torch.library._scoped_library("own_views", "DEF") as library:
        library.define("first(Tensor(a) x) -> Tensor(a)")
        library.impl("first", lambda x: x[0], "CPU")
        first = torch.ops.own_views.first
        total = profile_of(lambda: first(A), custom_mapping={first: lambda *_, **__: 3}).total()
    assert (total.flops, total.bytes_total) == (3, 0)


@pytest.mark.parametrize("picks", [(100, 0), (0, 100), (30, 70)])
def test_bytes_of_results_whose_size_is_data_are_those_of_each_call(picks: tuple[int, int]) -> None:
    """float32 per picked element, int64 per position, independent of earlier calls."""
    x = torch.ones(100)
    masks = [torch.arange(100) < n for n in picks]
    for pick, size in ((lambda m: x[m], 4), (torch.nonzero, 8), (x.masked_select, 4)):
        profile = profile_of(lambda: [pick(mask) for mask in masks])  # noqa: B023
        assert profile.total().bytes_written == sum(picks) * size


def test_bytes_of_packed_sequences_are_those_of_each_call() -> None:
    """The packed steps, and a batch size (int64) for each step of the longest sequence."""
    pad = torch.ones(4, 5)
    sizes = torch.tensor([5, 5, 5, 5]), torch.tensor([3, 2, 1, 1])
    profile = profile_of(
        lambda: [aten._pack_padded_sequence(pad.t(), lengths, False) for lengths in sizes]
    )
    steps, longest = 20 + 7, 5 + 3
    assert profile.total().bytes_written == steps * 4 + longest * 8


@pytest.mark.parametrize(
    ("draw", "read"),
    [
        (lambda: torch.empty(3, 5).normal_(), 0),
        (lambda: torch.empty(3, 5).uniform_(), 0),
        (lambda: torch.empty(3, 5).exponential_(), 0),
        (lambda: torch.empty(3, 5).bernoulli_(0.3), 0),
        (lambda: torch.rand_like(A), 0),
        (lambda: torch.randn(3, 5), 0),
        (lambda: torch.bernoulli(A), 4 * 15),
        (lambda: torch.empty(3, 5).bernoulli_(A), 4 * 15),
        (lambda: torch.normal(A, 1.0), 4 * 15),
        (lambda: torch.poisson(A), 4 * 15),
    ],
)
def test_bytes_of_random_numbers_are_results_written_and_parameters_read(
    draw: Callable[[], Any], read: int
) -> None:
    total = profile_of(draw).total()
    assert (total.bytes_read, total.bytes_written) == (read, 4 * 15)


# -- compute dtype ---------------------------------------------------------------------------

F32, BF16, F64 = torch.ones(3), torch.ones(3, dtype=torch.bfloat16), torch.ones(3).double()
INT, MASK = torch.arange(3), torch.tensor([True, False, True])
C64 = torch.ones(3, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: F32 + BF16, "float32"),
        (lambda: BF16 + F32, "float32"),
        (lambda: BF16.clone().add_(F32), "float32"),
        (lambda: F32[0] * BF16, "bfloat16"),
        (lambda: F64[0] * F32, "float32"),
        (lambda: F64[0] * INT, "float64"),
        (lambda: F64[0] * F32[0], "float64"),
        (lambda: C64[0] * F64, "complex128"),
        (lambda: C64 * F64[0], "complex64"),
        (lambda: INT * F32, "float32"),
        (lambda: INT / 2, "float32"),
        (lambda: INT + INT, "int64"),
        (lambda: torch.addcmul(BF16, F32, BF16), "float32"),
        (lambda: F32 > F64, "float64"),
        (lambda: INT > 0.5, "float32"),
        (lambda: INT > 1, "int64"),
        (lambda: F32 * 2.0, "float32"),
        (lambda: F32 * 2j, "complex64"),
        (lambda: F64 + 2j, "complex128"),
        (lambda: INT * 2j, "complex64"),
        (lambda: torch.polar(F32, F32), "float32"),
    ],
)
def test_compute_dtype_of_several_dtypes_is_the_promoted_one(
    call: Callable[[], object], dtype: str
) -> None:
    ops = list(profile_of(call).op_totals())
    (op,) = [op for op in ops if op.kind == "pointwise" or op.dtype == "int64"]
    assert op.dtype == dtype


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: F.mse_loss(BF16, F32), "float32"),
        (lambda: F.smooth_l1_loss(F32, F64), "float64"),
        (lambda: F.huber_loss(F32, F64), "float64"),
        (lambda: F.binary_cross_entropy_with_logits(BF16, F32), "float32"),
        (lambda: torch.dist(F32, F64), "float64"),
        (lambda: torch.addr(torch.ones(3, 3), F32, F64), "float64"),
        (lambda: torch.bucketize(F32, F64), "float64"),
        (lambda: torch.searchsorted(INT, F32), "float32"),
        (lambda: torch.isin(F32, F64), "float64"),
        (lambda: torch.isin(INT, 0.5), "float32"),
    ],
)
def test_compute_dtype_of_losses_and_searches_is_the_promoted_one(
    call: Callable[[], object], dtype: str
) -> None:
    (found,) = {op.dtype for op in profile_of(call).op_totals() if op.cost and op.cost.flops}
    assert found == dtype


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (lambda: F32.sum(dtype=torch.float64), "float64"),
        (lambda: F64.sum(dtype=torch.float32), "float32"),
        (lambda: BF16.mean(dtype=torch.float32), "float32"),
        (lambda: BF16.nansum(dtype=torch.float32), "float32"),
        (lambda: F32.prod(dtype=torch.float64), "float64"),
        (lambda: F32.cumsum(0, dtype=torch.float64), "float64"),
        (lambda: BF16.cumprod(0, dtype=torch.float32), "float32"),
        (lambda: torch.sum(F32, 0, out=torch.empty((), dtype=torch.float64)), "float64"),
        (lambda: torch.linalg.vector_norm(BF16, dtype=torch.float32), "float32"),
        (lambda: torch._foreach_norm([BF16], 2, torch.float32), "float32"),
        (lambda: aten._safe_softmax(BF16, 0, torch.float32), "float32"),
        (lambda: torch.linspace(F32[0], F32[1], 4, dtype=torch.float64), "float64"),
        (lambda: C64.cumsum(0), "complex64"),
        (lambda: F32.cummax(0), "float32"),
    ],
)
def test_compute_dtype_of_a_sum_is_the_one_that_its_terms_are_cast_to(
    call: Callable[[], object], dtype: str
) -> None:
    (found,) = {op.dtype for op in profile_of(call).op_totals() if op.cost and op.cost.flops}
    assert found == dtype


@pytest.mark.parametrize(
    "call",
    [
        lambda: F32.sum(dtype=torch.int64),
        lambda: F32.prod(dtype=torch.int64),
        lambda: F32.cumsum(0, dtype=torch.int64),
    ],
)
def test_sum_of_numbers_that_are_cast_to_integers_is_free(call: Callable[[], object]) -> None:
    assert profile_of(call).total().flops == 0


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning")
def test_compute_dtype_of_a_comparison_with_quantized_numbers_is_the_real_one() -> None:
    quantized = torch.quantize_per_tensor(F32, 0.5, 0, torch.qint8)
    (op,) = [op for op in profile_of(lambda: quantized == F32).op_totals() if op.dtype]
    assert op.dtype == "float32"
