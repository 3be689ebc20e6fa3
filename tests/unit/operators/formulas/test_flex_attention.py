"""Flex attention: the rectangle, the blocks of its mask, and recomputed scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dispatch_flops import FlopCounterMode, counting_backend
from dispatch_flops.operators.conventions import Conventions, using
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
    meta,
    operands,
)
from tests.helpers.profiling import numbers, profile_of

aten = torch.ops.aten
Tensor = torch.Tensor


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_counts_the_rectangle() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = operands(KV)
    with torch.no_grad():
        cost = profile_of(lambda: flex_attention(q, k, v, enable_gqa=True)).total()
    assert cost.macs == 2 * PAIRS * D
    assert cost.flops == 2 * cost.macs + PAIRS + 6 * PAIRS - 2 * B * H * SQ + 4 * B * H * SQ


def test_flex_attention_with_causal_half_counts_the_mask_blocks() -> None:
    """Each query block names at most 2 partial and 1 full blocks of 128 keys."""
    q, k = meta(1, 1, 512, D), meta(1, 1, 1024, D)
    blocks = [None] * 17
    blocks[2], blocks[3] = meta(1, 1, 4), meta(1, 1, 4, 2)
    blocks[4], blocks[5] = meta(1, 1, 4), meta(1, 1, 4, 1)
    blocks[-3:] = [128, 128, None]
    flex = torch.ops.higher_order.flex_attention
    full = formula(flex, q, k, k, None, tuple(blocks), 1.0, {})
    with using(Conventions(causal="half")):
        half = formula(flex, q, k, k, None, tuple(blocks), 1.0, {})
    assert isinstance(full, OpCost)
    assert isinstance(half, OpCost)
    assert full.macs == 512 * 1024 * 2 * D
    assert half.macs == 512 * 3 * 128 * 2 * D


def test_flex_attention_backward_recomputes_the_scores() -> None:
    flex = torch.ops.higher_order.flex_attention_backward
    blocks = (None,) * 15 + (128, None)
    q, k = meta(B, H, SQ, D), meta(1, KV, SK, D)
    split = formula(flex, q, k, k, q, LSE, q, None, None, None, blocks, 1.0, {})
    assert isinstance(split, Split)
    shared = (B * H - KV) * SK * 2 * D
    assert split.own.macs == 4 * PAIRS * D
    assert split.own.flops == 8 * PAIRS * D + 3 * PAIRS + B * H * SQ * (2 * D - 1) + shared
    assert numbers(split.shares[0].cost) == (PAIRS * D, 2 * PAIRS * D + 3 * PAIRS)
    with_lse = formula(flex, q, k, k, q, LSE, q, LSE, None, None, blocks, 1.0, {})
    assert isinstance(with_lse, Split)
    assert with_lse.own.flops - split.own.flops == PAIRS


BIAS = torch.ones(H, SK)

# FLOPs of each per score: integer arithmetic, comparisons of indices and selections are free.
SCORE_MODS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "affine": (lambda score, b, h, q, k: score * 2 + 1, 2),
    "bias": (lambda score, b, h, q, k: score + BIAS[h, k], 1),
    "softcap": (lambda score, b, h, q, k: 20 * torch.tanh(score / 20), 3),
    "causal": (lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")), 0),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", SCORE_MODS)
def test_flex_attention_counts_score_mod_per_pair(name: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    score_mod, per_pair = SCORE_MODS[name]
    q, k, v = operands(KV)

    def attend(score_mod: Any) -> Tensor:
        out: Tensor = flex_attention(q, k, v, score_mod=score_mod, enable_gqa=True)
        return out

    backend = counting_backend("aot_eager", strict=True)
    with torch.no_grad():
        plain, changed = (profile_of(attend, mod).total() for mod in (None, score_mod))
        torch.compile(attend, backend=backend)(score_mod)
    assert changed.flops - plain.flops == per_pair * PAIRS
    assert backend.total().flops == changed.flops


def test_score_mod_is_counted_once_in_nested_counters() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = operands(KV)
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        FlopCounterMode(display=False) as outer,
        FlopCounterMode(display=False) as inner,
    ):
        warnings.simplefilter("ignore", UserWarning)
        flex_attention(q, k, v, score_mod=SCORE_MODS["affine"][0], enable_gqa=True)
    assert outer.get_total_flops() == inner.get_total_flops()


def test_flex_attention_backward_recomputes_score_mod_and_counts_its_gradient() -> None:
    flex = torch.ops.higher_order.flex_attention_backward
    blocks = (None,) * 15 + (128, None)
    q, k = meta(B, H, SQ, D), meta(1, KV, SK, D)

    def forward(score: Tensor, b: Any, h: Any, q: Any, k: Any, bias: Tensor) -> Tensor:
        return torch.tanh(score + bias[h, k])

    def joint(
        score: Tensor, b: Any, h: Any, q: Any, k: Any, grad: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        return (grad * torch.tanh(score + bias[h, k]) * 3,)

    def split(*functions: Any) -> Split:
        buffers = ((meta(H, SK),), ())
        found = formula(flex, q, k, k, q, LSE, q, None, *functions, blocks, 1.0, {}, *buffers)
        assert isinstance(found, Split)
        return found

    plain, changed = split(None, None), split(forward, joint)
    assert changed.own.flops - plain.own.flops == 4 * PAIRS
    assert changed.shares[0].cost.flops - plain.shares[0].cost.flops == 2 * PAIRS
