"""Building blocks for formulas of users' kernels agree with what torch's own kernels cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dispatch_flops import Split, attention_cost, conventions, matmul_cost
from dispatch_flops.errors import FormulaError
from tests.helpers.profiling import numbers, profile_of

B, H, HKV, SQ, SK, D, DV = 2, 6, 3, 5, 7, 8, 4
M, K, N = 3, 5, 11


@torch.library.custom_op("dispatch_flops_test::own_kernel", mutates_args=())
def own_kernel(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return q.new_zeros(*q.shape[:-1], v.shape[-1])


def of_own_kernel(formula: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return profile_of(own_kernel, *args, custom_mapping={own_kernel: formula}, **options)


def operands(sk: int = SK, dv: int = D) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(B, H, SQ, D), torch.ones(B, HKV, sk, D), torch.ones(B, HKV, sk, dv)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("causal", ["full", "half"])
def test_attention_cost_in_a_formula_is_that_of_torchs_attention(
    causal: str, is_causal: bool
) -> None:
    q, k, v = operands(sk=SQ)
    own = of_own_kernel(
        lambda q, k, v, causal, *, out, **_: attention_cost(q, k, v, causal=causal),
        q, k, v, is_causal, causal=causal,
    )  # fmt: skip
    theirs = profile_of(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True),
        causal=causal,
    )
    (attention,) = [op for op in theirs.op_totals() if "attention" in op.op]
    assert attention.cost is not None
    assert numbers(own.total()) == numbers(attention.cost)


def test_attention_cost_of_another_layout_and_value_size_follows_the_shapes() -> None:
    q, k, v = (t.transpose(1, 2) for t in operands(dv=DV))
    cost = attention_cost(q, k, v, layout="BSHD", is_masked=True, has_dropout=True)
    pairs, rows = B * H * SQ * SK, B * H * SQ
    assert cost.macs == pairs * (D + DV)
    scaling = (B * H * SQ + B * H * SK) * D
    assert cost.flops == 2 * cost.macs + scaling + (6 + 1 + 2) * pairs - 2 * rows


def test_attention_cost_of_the_backward_splits_off_the_recomputed_scores() -> None:
    q, k, v = operands()
    split = attention_cost(q, k, v, is_backward=True)
    assert isinstance(split, Split)
    pairs = B * H * SQ * SK
    assert split.own.macs == 4 * pairs * D
    assert [(share.phase, share.cost.macs) for share in split.shares] == [("recompute", pairs * D)]


def test_attention_cost_of_an_unknown_layout_raises() -> None:
    with pytest.raises(FormulaError, match='choose "BHSD" or "BSHD"'):
        attention_cost(*operands(), layout="SBHD")  # type: ignore[call-overload]


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], int]] = {
    "matrices": ((M, K), (K, N), M * K * N),
    "matrix and vector": ((M, K), (K,), M * K),
    "vectors": ((K,), (K,), K),
    "broadcast": ((2, 1, M, K), (7, K, N), 2 * 7 * M * K * N),
}


@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("of", [tuple, torch.ones])
def test_matmul_cost_of_tensors_or_shapes_is_that_of_matmul(case: str, of: Any) -> None:
    left, right, macs = SHAPES[case]
    cost = matmul_cost(of(left), of(right))
    assert numbers(cost) == (macs, 2 * macs)
    assert numbers(profile_of(torch.matmul, torch.ones(left), torch.ones(right)).total()) == (
        macs,
        2 * macs,
    )


def test_matmul_cost_with_a_bias_is_that_of_addmm() -> None:
    x, w, bias = torch.ones(M, K), torch.ones(K, N), torch.ones(N)
    cost = matmul_cost(x, w, bias=bias)
    assert numbers(cost) == numbers(profile_of(torch.addmm, bias, x, w).total())
    assert cost.flops == 2 * M * K * N + M * N


def test_matmul_cost_of_complex_operands_is_four_times_as_many_macs() -> None:
    x, w = torch.ones(M, K, dtype=torch.complex64), torch.ones(K, N)
    assert matmul_cost(x, w).macs == 4 * M * K * N


@pytest.mark.parametrize("operand", [torch.ones(SQ, D), SQ])
def test_attention_cost_of_operands_without_heads_raises(operand: Any) -> None:
    with pytest.raises(FormulaError, match="pass .B, H, S, D."):
        attention_cost(operand, operand, operand)


@pytest.mark.parametrize("name", ["causal", "is_masked", "has_dropout"])
@pytest.mark.parametrize("value", [0.1, 2, None, torch.ones(SQ, SK)])
def test_attention_cost_of_a_flag_that_is_not_a_bool_raises(name: str, value: Any) -> None:
    q = torch.ones(B, H, SQ, D)
    with pytest.raises(FormulaError, match=f"{name} is of type .*; pass True or False"):
        attention_cost(q, q, q, **{name: value})


def test_matmul_cost_of_numbers_raises() -> None:
    with pytest.raises(FormulaError, match="3 is not a tensor or a shape"):
        matmul_cost(3, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("shapes", [((M, K), (N, K)), ((), (K,)), ((M, K), (N,))])
def test_matmul_cost_of_shapes_that_do_not_match_raises(shapes: Any) -> None:
    with pytest.raises(FormulaError, match="is not a product"):
        matmul_cost(*shapes)


def test_conventions_in_a_formula_are_those_of_its_counter() -> None:
    seen = []

    def formula(*_: Any, out: Any, **__: Any) -> int:
        seen.append((conventions().causal, conventions().flops))
        return 1

    of_own_kernel(formula, *operands(), False, causal="half", flops="contractions")
    assert seen == [("half", "contractions")]
    assert conventions().causal == "full"
