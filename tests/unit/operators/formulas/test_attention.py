"""Attention: every kernel against the unfused path, and both against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dispatch_flops.operators.conventions import Conventions, using
from dispatch_flops.operators.formulas._attention import Band
from dispatch_flops.profile.cost import OpCost, Split
from tests.helpers.attention import (
    KV,
    LSE,
    PAIRS,
    SK,
    SQ,
    B,
    D,
    H,
    formula,
    forward_flops,
    meta,
    operands,
)
from tests.helpers.profiling import numbers, profile_of

aten = torch.ops.aten
Tensor = torch.Tensor
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


# -- against the unfused path --------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "boolean mask": {"attn_mask": torch.ones(SQ, SK, dtype=torch.bool)},
    "float mask": {"attn_mask": torch.zeros(B, 1, SQ, SK)},
    "scaled": {"scale": 0.3},
}


def phases(fn: Callable[[], Tensor]) -> dict[str, tuple[int, int]]:
    """MACs and FLOPs of ``fn`` and of its backward, by phase; the gradient of a sum is free."""
    profile = profile_of(lambda: (out := fn()).backward(torch.ones_like(out)))
    return {p: numbers(profile.total(p)) for p in ("forward", "backward", "recompute")}  # type: ignore[arg-type]


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kv_heads", [H, KV])
def test_attention_fused_and_unfused_cost_the_same(options: dict[str, Any], kv_heads: int) -> None:
    def run() -> Tensor:
        q, k, v = operands(kv_heads, requires_grad=True)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != H, **options)

    fused = phases(run)
    with sdpa_kernel(SDPBackend.MATH):
        unfused = phases(run)
    mask = "attn_mask" in options
    assert fused["forward"] == unfused["forward"]
    assert fused["forward"] == (2 * PAIRS * D, forward_flops(mask=mask))
    assert fused["backward"] == unfused["backward"]
    assert fused["backward"][0] == 4 * PAIRS * D
    assert unfused["recompute"] == (0, 0)
    scaling = B * H * (SQ + SK) * D
    assert fused["recompute"] == (PAIRS * D, 2 * PAIRS * D + scaling + PAIRS * (2 + mask))


def test_attention_if_causal_adds_a_mask() -> None:
    def run() -> Tensor:
        q, k, v = operands(sk=SQ, requires_grad=True)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    fused = phases(run)
    with sdpa_kernel(SDPBackend.MATH):
        unfused = phases(run)
    assert (fused["forward"], fused["backward"]) == (unfused["forward"], unfused["backward"])
    assert fused["forward"][0] == 2 * B * H * SQ * SQ * D


# -- kernels of backends, called with shapes only ------------------------------------------

Q, K, V = meta(B, H, SQ, D), meta(B, KV, SK, D), meta(B, KV, SK, D)
BIAS = meta(1, 1, SQ, SK)
HEADS_FIRST = {
    "flash": lambda q, k, v, m: aten._scaled_dot_product_flash_attention(q, k, v),
    "efficient": lambda q, k, v, m: aten._scaled_dot_product_efficient_attention(q, k, v, m, True),
    "cudnn": lambda q, k, v, m: aten._scaled_dot_product_cudnn_attention(q, k, v, m, True),
    "overrideable": lambda q, k, v, m: aten._scaled_dot_product_fused_attention_overrideable(
        q, k, v, m
    ),
    "cpu": lambda q, k, v, m: aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=m
    ),
}


@pytest.mark.parametrize("kernel", HEADS_FIRST.values(), ids=HEADS_FIRST)
def test_every_attention_kernel_counts_the_same(kernel: Callable[..., Any]) -> None:
    cost = profile_of(kernel, Q, meta(B, H, SK, D), meta(B, H, SK, D), None).total()
    assert numbers(cost) == (2 * PAIRS * D, forward_flops())


DROPPED = {
    "flash": (aten._scaled_dot_product_flash_attention, (0.5, True)),
    "efficient": (aten._scaled_dot_product_efficient_attention, (None, True, 0.5, True)),
    "cudnn": (aten._scaled_dot_product_cudnn_attention, (None, True, 0.5, True)),
    "overrideable": (aten._scaled_dot_product_fused_attention_overrideable, (None, 0.5, True)),
    "cpu": (aten._scaled_dot_product_flash_attention_for_cpu, (0.5, True)),
}


@pytest.mark.parametrize(("op", "rest"), DROPPED.values(), ids=DROPPED)
def test_attention_kernel_with_all_options_matches_closed_form(op: Any, rest: Any) -> None:
    dv = 3
    cost = formula(op, Q, K, meta(B, KV, SK, dv), *rest)
    assert isinstance(cost, OpCost)
    assert cost.macs == PAIRS * (D + dv)
    assert cost.flops == forward_flops(mask=True, dropout=True, dv=dv)
    with using(Conventions(causal="half")):
        cost = formula(op, Q, K, meta(B, KV, SK, dv), *rest)
    assert isinstance(cost, OpCost)
    assert cost.macs == B * H * (1 + 2 + 3 + 4 + 5) * (D + dv)


SEED, OFFSETS = meta(), meta(B + 1)
OUT = meta(B, H, SQ, D)
BACKWARD = {
    "flash": (
        aten._scaled_dot_product_flash_attention_backward,
        (OUT, LSE, OFFSETS, OFFSETS, SQ, SK, 0.0, False, SEED, SEED),
        (),
    ),
    "efficient": (
        aten._scaled_dot_product_efficient_attention_backward,
        (OUT, LSE, SEED, SEED, 0.0, [True, True, True, False]),
        (None,),
    ),
    "cudnn": (
        aten._scaled_dot_product_cudnn_attention_backward,
        (OUT, LSE, SEED, SEED, None, None, None, SQ, SK, 0.0, False),
        (),
    ),
    "overrideable": (
        aten._scaled_dot_product_fused_attention_overrideable_backward,
        ([True, True, True, False], OUT, LSE, OFFSETS, OFFSETS, SQ, SK, 0.0, False, SEED, SEED),
        (None,),
    ),
    "cpu": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
        (OUT, LSE, 0.0, False),
        (),
    ),
}


@pytest.mark.parametrize(("op", "rest", "bias"), BACKWARD.values(), ids=BACKWARD)
def test_every_attention_backward_counts_the_same(op: Any, rest: Any, bias: Any) -> None:
    split = formula(op, OUT, Q, K, V, *bias, *rest)
    assert isinstance(split, Split)
    (again,) = split.shares
    assert again.phase == "recompute"
    scaling = B * H * (SQ + SK) * D
    softmax = 4 * PAIRS - B * H * SQ
    shared = B * (H - KV) * SK * (D + D)
    assert split.own.macs == 2 * PAIRS * (D + D)
    assert split.own.flops == 2 * split.own.macs + softmax + scaling + shared
    assert numbers(again.cost) == (PAIRS * D, 2 * PAIRS * D + scaling + 2 * PAIRS)


def test_attention_bias_gradient_sums_over_broadcast_dimensions() -> None:
    op = aten._scaled_dot_product_efficient_attention_backward
    with_grad, without = (
        formula(op, OUT, Q, K, V, BIAS, OUT, LSE, SEED, SEED, 0.0, [True, True, True, wanted])
        for wanted in (True, False)
    )
    assert isinstance(with_grad, Split)
    assert isinstance(without, Split)
    assert with_grad.own.flops - without.own.flops == PAIRS - SQ * SK


@pytest.mark.parametrize("from_end", [False, True])
@pytest.mark.parametrize("left", [None, 0, 1, 3])
@pytest.mark.parametrize("right", [None, 0, 2])
def test_band_counts_what_a_mask_keeps(left: int | None, right: int | None, from_end: bool) -> None:
    for sq in range(6):
        for sk in range(6):
            shift = sk - sq if from_end else 0
            rows = [
                sum(
                    (right is None or j <= i + shift + right)
                    and (left is None or j >= i + shift - left)
                    for j in range(sk)
                )
                for i in range(sq)
            ]
            expected = (sum(rows), sum(n > 0 for n in rows))
            assert (
                Band(left=left, right=right, from_end=from_end).pairs_and_rows(sq, sk) == expected
            )


@pytest.mark.parametrize("causal", ["full", "half"])
def test_causal_option_of_the_counter_reaches_the_formula(causal: str) -> None:
    q = torch.ones(1, 1, 5, D)
    fn = lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)  # noqa: E731
    pairs = {"full": 25, "half": 15}[causal]
    assert profile_of(fn, causal=causal).total().macs == pairs * 2 * D


# -- nested --------------------------------------------------------------------------------


@NESTED
def test_strided_nested_attention_counts_real_lengths() -> None:
    lengths = ((2, 3), (4, 5))
    q = torch.nested.nested_tensor([torch.ones(H, sq, D) for sq, _ in lengths])
    k = torch.nested.nested_tensor([torch.ones(H, sk, D) for _, sk in lengths])
    cost = formula(aten._scaled_dot_product_flash_attention, q, k, k)
    assert isinstance(cost, OpCost)
    assert cost.macs == H * (2 * 3 + 4 * 5) * 2 * D


@NESTED
def test_jagged_attention_counts_real_lengths() -> None:
    lengths = (2, 3, 5)
    q = torch.nested.nested_tensor(
        [torch.ones(n, H, D) for n in lengths], layout=torch.jagged
    ).transpose(1, 2)
    with torch.no_grad():
        cost = profile_of(lambda: F.scaled_dot_product_attention(q, q, q)).total()
    assert cost.macs == H * sum(n * n for n in lengths) * 2 * D
