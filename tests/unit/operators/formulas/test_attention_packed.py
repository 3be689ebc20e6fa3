"""Attention kernels below SDPA: packed sequences, windows, lengths on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops.operators.conventions import Conventions, using
from dispatch_flops.operators.tensors import is_given
from dispatch_flops.profile.cost import OpCost, Split
from tests.helpers.attention import (
    KV,
    PAIRS,
    SK,
    SQ,
    B,
    D,
    H,
    formula,
    forward_flops,
    meta,
)
from tests.helpers.profiling import numbers, profile_of

aten = torch.ops.aten
Tensor = torch.Tensor


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


SEED = meta()


def flash(q: Tensor, k: Tensor, ends: Any, sq: int, sk: int) -> tuple[Any, Any]:
    """Return what a causal pass forward costs, and the one backward."""
    if is_given(ends[0]):
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    rest = (*ends, sq, sk, 0.0, True)
    return (
        formula(aten._flash_attention_forward, q, k, k, *rest, False),
        formula(aten._flash_attention_backward, q, q, k, k, q, SEED, *rest, SEED, SEED),
    )


def efficient(q: Tensor, k: Tensor, ends: Any, sq: int, sk: int) -> tuple[Any, Any]:
    if is_given(ends[0]):
        q, k = q.flatten(0, 1)[None], k.flatten(0, 1)[None]
    gradients = (q, q, k, k, None, q, *ends, sq, sk, SEED, 0.0, SEED, SEED, 1, False)
    return (
        formula(aten._efficient_attention_forward, q, k, k, None, *ends, sq, sk, 0.0, 1),
        formula(aten._efficient_attention_backward, *gradients),
    )


def cudnn(q: Tensor, k: Tensor, ends: Any, sq: int, sk: int) -> tuple[Any, Any]:
    if is_given(ends[0]):
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    else:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    gradients = (q, q, k, k, q, SEED, SEED, SEED, None, *ends, sq, sk, 0.0, True)
    return (
        formula(aten._cudnn_attention_forward, q, k, k, None, *ends, sq, sk, True, 0.0, True),
        formula(aten._cudnn_attention_backward, *gradients),
    )


@pytest.mark.parametrize("kernel", [flash, efficient, cudnn])
@pytest.mark.parametrize("causal", ["full", "half"])
@pytest.mark.parametrize(("sq", "sk"), [(3, 5), (5, 3)])
def test_packed_sequences_of_equal_lengths_cost_as_a_batch_of_them(
    kernel: Any, causal: Any, sq: int, sk: int
) -> None:
    """Also where their lengths are on a device, which is not read: the bound is exact."""
    q, k = meta(B, sq, H, D), meta(B, sk, KV, D)
    ends = offsets_of(*[sq] * B), offsets_of(*[sk] * B)
    on_device = ends[0].to("meta"), ends[1].to("meta")
    with using(Conventions(causal=causal)):
        batch = kernel(q, k, (None, None), sq, sk)
        assert kernel(q, k, ends, sq, sk) == kernel(q, k, on_device, sq, sk) == batch
    assert recomputed(batch[1]) == again(batch[0].macs // (2 * D), sq, sk)


def recomputed(split: Split) -> tuple[int, int]:
    (share,) = split.shares
    return numbers(share.cost)


def again(pairs: int, sq: int, sk: int) -> tuple[int, int]:
    """Return what scores cost that are computed again: products, scaling, mask, exponential."""
    return pairs * D, 2 * pairs * D + B * H * (sq + sk) * D + pairs * (1 + 2)


def test_bias_of_a_low_level_kernel_is_added_and_its_gradient_summed_over_the_batch() -> None:
    q, k, bias = meta(B, SQ, H, D), meta(B, SK, H, D), meta(1, 1, SQ, SK)
    with_grad, without = (
        formula(
            aten._efficient_attention_backward,
            *(q, q, k, k, bias, q, None, None, SQ, SK, SEED, 0.0, SEED, SEED, 0, wanted),
        )
        for wanted in (True, False)
    )
    assert isinstance(with_grad, Split)
    assert isinstance(without, Split)
    assert with_grad.own.flops - without.own.flops == PAIRS - SQ * SK
    assert recomputed(with_grad) == recomputed(without) == again(PAIRS, SQ, SK)


def test_packed_attention_on_a_device_rounds_its_triangle_up() -> None:
    """3 queries of up to 2: a triangle has 3 pairs, and one and a half of them at most 5."""
    q, ends = meta(3, H, D), meta(3, dtype=torch.int32)
    with using(Conventions(causal="half")):
        cost, _ = flash(q[None], q[None], (ends, ends), 2, 2)
    assert cost.macs == 2 * 5 * H * D


def test_packed_attention_on_a_device_is_an_upper_bound_also_for_decoded_tokens() -> None:
    """One prompt of 5 queries and 6 of one, with 7 keys each: one query sees all keys.

    The prompt has 3 to 7 keys a query, and the rows of a triangle of 5 x 7 have 5 in the mean.
    """
    queries = [5, 1, 1, 1, 1, 1, 1]
    q, k = meta(1, sum(queries), H, D), meta(1, 7 * 7, H, D)
    ends = offsets_of(*queries), offsets_of(*[7] * 7)
    on_device = ends[0].to("meta"), ends[1].to("meta")
    with using(Conventions(causal="half")):
        exact, bound = (flash(q, k, given, 5, 7)[0] for given in (ends, on_device))
    assert exact.macs == 2 * H * D * (3 + 4 + 5 + 6 + 7 + 6 * 7)
    assert bound.macs == 2 * H * D * sum(queries) * 7


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
