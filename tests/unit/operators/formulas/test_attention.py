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
from dispatch_flops.operators.registry import lookup
from dispatch_flops.profile.cost import OpCost, Split
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
Tensor = torch.Tensor
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

B, H, KV, SQ, SK, D = 2, 6, 3, 5, 7, 8
PAIRS = B * H * SQ * SK


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def formula(op: Any, *args: Any, **kwargs: Any) -> OpCost | Split:
    rule = lookup(getattr(op, "default", op))
    assert rule is not None
    answer = rule.answer(op, args, kwargs, None)
    assert not isinstance(answer, int)
    return answer


def numbers(cost: OpCost) -> tuple[int, int]:
    return cost.macs, cost.flops


def forward_flops(
    *, mask: bool = False, dropout: bool = False, pairs: int = PAIRS, d: int = D, dv: int = D
) -> int:
    """FLOPs: q and k scaled, mask, _safe_softmax (6 per score less 2 per row), dropout."""
    scaling = B * H * (SQ + SK) * d
    softmax = 6 * pairs - 2 * B * H * SQ
    return 2 * pairs * (d + dv) + scaling + pairs * mask + softmax + 2 * pairs * dropout


# -- against the unfused path --------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "boolean mask": {"attn_mask": torch.ones(SQ, SK, dtype=torch.bool)},
    "float mask": {"attn_mask": torch.zeros(B, 1, SQ, SK)},
    "scaled": {"scale": 0.3},
}


def operands(kv_heads: int = H, sk: int = SK, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.ones(B, H, SQ, D, **options),
        torch.ones(B, kv_heads, sk, D, **options),
        torch.ones(B, kv_heads, sk, D, **options),
    )


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


def test_attention_matches_an_exact_count() -> None:
    for device in ("cpu", "meta"):
        q = torch.ones(1, 12, 64, 64, device=device)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode():
                cost = profile_of(F.scaled_dot_product_attention, q, q, q).total()
            assert cost.macs == 6_291_456


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


LSE, SEED, OFFSETS = meta(B, H, SQ), meta(), meta(B + 1)
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


# -- low-level kernels, with a batch or packed ---------------------------------------------


def test_low_level_kernel_with_a_batch_counts_as_sdpa() -> None:
    q, k = meta(B, SQ, H, D), meta(B, SK, H, D)
    expected = (2 * PAIRS * D, forward_flops())
    flash = profile_of(
        lambda: aten._flash_attention_forward(q, k, k, None, None, SQ, SK, 0.0, False, False)
    )
    efficient = profile_of(
        lambda: aten._efficient_attention_forward(
            q, k, k, None, None, None, None, None, 0.0, 0, False
        )
    )
    cudnn = formula(
        aten._cudnn_attention_forward,
        *(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), None, None, None, SQ, SK, True),
    )
    assert isinstance(cudnn, OpCost)
    assert numbers(flash.total()) == numbers(efficient.total()) == numbers(cudnn) == expected


@pytest.mark.parametrize("longest", [(5, 7), (3, 13)])
def test_packed_attention_is_bounded_by_the_longest_sequence(longest: tuple[int, int]) -> None:
    """11 queries and 13 keys in 3 sequences."""
    offsets = meta(4, dtype=torch.int32)
    q, k = meta(11, H, D), meta(13, H, D)
    pairs = H * min(11 * longest[1], longest[0] * 13)
    flash = formula(
        aten._flash_attention_forward, q, k, k, offsets, offsets, *longest, 0.0, False, False
    )
    efficient = formula(
        aten._efficient_attention_forward,
        *(q[None], k[None], k[None], None, offsets, offsets, *longest, 0.0, 0),
    )
    cudnn = formula(aten._cudnn_attention_forward, q, k, k, None, offsets, offsets, *longest, True)
    for cost in (flash, efficient, cudnn):
        assert isinstance(cost, OpCost)
        assert cost.macs == pairs * 2 * D
        assert cost.flops == 2 * cost.macs + H * (11 + 13) * D + 6 * pairs - 2 * H * 11


def test_packed_attention_backward_counts_gradients_and_recomputation() -> None:
    offsets = meta(4, dtype=torch.int32)
    q, k, seed = meta(11, H, D), meta(13, H, D), meta()
    flash = formula(
        aten._flash_attention_backward,
        *(q, q, k, k, q, meta(H, 11), offsets, offsets, 5, 7, 0.0, False, seed, seed),
    )
    efficient = formula(
        aten._efficient_attention_backward,
        *(q[None], q[None], k[None], k[None], None, q[None], offsets, offsets, 5, 7),
        *(meta(1, H, 11), 0.0, seed, seed, 0, False),
    )
    assert isinstance(flash, Split)
    assert flash == efficient
    assert flash.own.macs == 4 * H * min(11 * 7, 5 * 13) * D


def test_causal_half_counts_windows_and_both_alignments() -> None:
    q, k = meta(1, 4, 1, D), meta(1, 6, 1, D)

    def pairs(op: Any, *args: Any, **kwargs: Any) -> int:
        with using(Conventions(causal="half")):
            cost = formula(op, q, k, k, *args, **kwargs)
        assert isinstance(cost, OpCost)
        return cost.macs // (2 * D)

    flash = (None, None, 4, 6, 0.0)
    assert pairs(aten._flash_attention_forward, *flash, True, False) == 3 + 4 + 5 + 6
    window = {"window_size_left": 1, "window_size_right": 0}
    assert pairs(aten._flash_attention_forward, *flash, True, False, **window) == 4 * 2
    assert pairs(aten._flash_attention_forward, *flash, False, False, **window) == 4 * 2
    efficient = (None, None, None, None, None, 0.0)
    assert pairs(aten._efficient_attention_forward, *efficient, 0) == 4 * 6
    assert pairs(aten._efficient_attention_forward, *efficient, 1) == 1 + 2 + 3 + 4
    assert pairs(aten._efficient_attention_forward, *efficient, 2) == 3 + 4 + 5 + 6
    assert pairs(aten._efficient_attention_forward, *efficient, 1, window_size=2) == 1 + 2 + 2 + 2


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


def test_varlen_attention_counts_as_packed() -> None:
    from torch.nn.attention import varlen  # noqa: F401

    ops = torch.ops.torch_attn
    q, k = meta(11, H, D), meta(13, KV, D)
    offsets = meta(4, dtype=torch.int32)
    forward = formula(ops._varlen_attn, q, k, k, offsets, offsets, 5, 7)
    assert isinstance(forward, OpCost)
    assert forward.macs == H * min(11 * 7, 5 * 13) * 2 * D
    if hasattr(ops, "_varlen_attn_out"):  # torch 2.11 has none
        assert formula(ops._varlen_attn_out, q, q, k, k, offsets, offsets, 5, 7) == forward
    backward = formula(
        ops._varlen_attn_backward,
        *(q, q, k, k, q, q, offsets, offsets, 5, 7, False, meta(), None, [-1, -1]),
    )
    assert isinstance(backward, Split)
    assert backward.own.macs == 2 * forward.macs


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


# -- flex ----------------------------------------------------------------------------------


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


def offsets_of(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def test_packed_attention_uses_lengths_that_are_on_the_cpu() -> None:
    from torch.nn.attention import varlen  # noqa: F401

    q = meta(128 + 64, 8, 64)
    offsets = offsets_of(128, 64)
    macs = 2 * 8 * 64 * (128**2 + 64**2)
    assert macs == 20_971_520
    ops = torch.ops.torch_attn
    forward = formula(ops._varlen_attn, q, q, q, offsets, offsets, 128, 128)
    assert isinstance(forward, OpCost)
    assert forward.macs == macs
    backward = formula(
        ops._varlen_attn_backward,
        *(q, q, q, q, q, q, offsets, offsets, 128, 128, False, meta(), None, [-1, -1]),
    )
    assert isinstance(backward, Split)
    assert (backward.own.macs, backward.shares[0].cost.macs) == (2 * macs, macs // 2)
    on_device = formula(ops._varlen_attn, q, q, q, offsets.to("meta"), offsets, 128, 128)
    assert isinstance(on_device, OpCost)
    assert on_device.macs == 2 * 8 * 64 * 192 * 128


def test_packed_kernels_use_lengths_of_queries_and_keys() -> None:
    q, k = meta(3 + 5, H, D), meta(11 + 7, KV, D)
    offsets = offsets_of(3, 5), offsets_of(11, 7)
    macs = H * (3 * 11 + 5 * 7) * 2 * D
    flash = formula(aten._flash_attention_forward, q, k, k, *offsets, 5, 11, 0.0, False, False)
    efficient = formula(
        aten._efficient_attention_forward,
        *(q[None], k[None], k[None], None, *offsets, 5, 11, 0.0, 0),
    )
    cudnn = formula(aten._cudnn_attention_forward, q, k, k, None, *offsets, 5, 11, True)
    assert flash == efficient == cudnn
    assert isinstance(flash, OpCost)
    assert flash.macs == macs
    used = torch.tensor([2, 7], dtype=torch.int32)
    flash = formula(
        aten._flash_attention_forward, q, k, k, *offsets, 5, 11, 0.0, False, False, seqused_k=used
    )
    assert isinstance(flash, OpCost)
    assert flash.macs == H * (3 * 2 + 5 * 7) * 2 * D
    with using(Conventions(causal="half")):
        causal = formula(
            aten._flash_attention_forward, q, q, q, offsets[0], offsets[0], 5, 5, 0.0, True, False
        )
    assert isinstance(causal, OpCost)
    assert causal.macs == H * (1 + 2 + 3 + 1 + 2 + 3 + 4 + 5) * 2 * D


def test_packed_lengths_are_read_at_every_call() -> None:
    q = meta(12, H, D)

    def run(*lengths: int) -> None:
        offsets = offsets_of(*lengths)
        aten._flash_attention_forward(q, q, q, offsets, offsets, 12, 12, 0.0, False, False)

    def both() -> None:
        run(5, 7)
        run(1, 11)

    pairs = 5 * 5 + 7 * 7 + 1 * 1 + 11 * 11
    assert profile_of(both).total().macs == H * pairs * 2 * D
