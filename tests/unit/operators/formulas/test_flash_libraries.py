"""Attention of flash_attn and xformers, by operators of their schemas, against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dispatch_flops.errors import UncountedWarning
from dispatch_flops.profile.cost import OpCost
from tests.helpers.profiling import profile_of
from tests.helpers.stand_ins import stand_in

B, H, HKV, SQ, SK, D = 2, 6, 3, 5, 7, 8
PAIRS, ROWS = B * H * SQ * SK, B * H * SQ
SCALING = (B * H * SQ + B * H * SK) * D
# Aligned at the last key, query i of 5 sees 3 + i of 7 keys.
CAUSAL_PAIRS = B * H * (3 + 4 + 5 + 6 + 7)


def q_k_v() -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(B, SQ, H, D), torch.ones(B, SK, HKV, D), torch.ones(B, SK, HKV, D)


def packed(*lengths: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v and their offsets for sequences of these (queries, keys)."""
    queries, keys = (sum(side) for side in zip(*lengths, strict=True))
    offsets = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True)]
    shapes = ((queries, H, D), (keys, HKV, D), (keys, HKV, D))
    return (*(torch.ones(shape) for shape in shapes), *offsets)


def forward_flops(pairs: int, rows: int, scaling: int, *, masked: int, dropout: int = 0) -> int:
    """Products; the scale; per pair 6 for the softmax less 2 per row, a mask, 2 for dropout."""
    return 2 * pairs * 2 * D + scaling + pairs * (6 + masked + 2 * dropout) - 2 * rows


def total_of(op: Any, *args: Any, **options: Any) -> OpCost:
    return profile_of(op, *args, **options).total()


FORWARD = (
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, "
    "bool causal, SymInt window_size_left, SymInt window_size_right, float softcap, "
    "Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)


def flash(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty(ROWS), torch.empty(0), torch.empty(2)


@pytest.mark.parametrize("causal", ["full", "half"])
def test_flash_attn_forward_counts_as_attention(causal: str) -> None:
    with stand_in("flash_attn", FORWARD, flash) as op:
        plain = total_of(op, *q_k_v(), 0.0, 1.0, False, -1, -1, 0.0, None, False, causal=causal)
        masked = total_of(op, *q_k_v(), 0.1, 1.0, True, -1, -1, 0.0, None, False, causal=causal)
    assert (plain.macs, plain.flops) == (
        PAIRS * 2 * D,
        forward_flops(PAIRS, ROWS, SCALING, masked=0),
    )
    pairs = PAIRS if causal == "full" else CAUSAL_PAIRS
    assert masked.macs == pairs * 2 * D
    assert masked.flops == forward_flops(pairs, ROWS, SCALING, masked=1, dropout=1)


def test_flash_attn_forward_with_a_softcap_costs_three_more_per_pair() -> None:
    with stand_in("flash_attn", FORWARD, flash) as op:
        capped = total_of(op, *q_k_v(), 0.0, 1.0, False, -1, -1, 30.0, None, False)
    assert capped.flops == forward_flops(PAIRS, ROWS, SCALING, masked=0) + 3 * PAIRS


VARLEN = (
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, "
    "float softmax_scale, bool causal, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "float softcap=0., Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False, SymInt num_splits=0) -> (Tensor, Tensor, Tensor, Tensor)"
)


def test_flash_attn_varlen_forward_counts_each_sequence_by_its_lengths() -> None:
    q, k, v, offsets_q, offsets_k = packed((5, 7), (3, 11))
    with stand_in("flash_attn", VARLEN, flash) as op:
        cost = total_of(op, q, k, v, offsets_q, offsets_k, 5, 11, 0.0, 1.0, False)
    assert cost.macs == H * (5 * 7 + 3 * 11) * 2 * D


BACKWARD = (
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor softmax_lse, Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, float dropout_p, "
    "float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None) -> Tensor"
)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("slopes", [None, torch.ones(H)])
def test_flash_attn_backward_counts_gradients_and_recomputed_scores(
    softcap: float, slopes: Tensor | None
) -> None:
    q, k, v = q_k_v()
    lse = torch.ones(B, H, SQ)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    options = (0.0, 1.0, False, -1, -1, softcap, slopes, False)
    args = (q.clone(), q, k, v, q.clone(), lse, *grads, *options)
    with stand_in("flash_attn", BACKWARD, lambda dout, *_, **__: torch.empty(B, H, 128)) as op:
        profile = profile_of(op, *args)
    own, again = profile.total("forward"), profile.total("recompute")
    assert (own.macs, again.macs) == (4 * PAIRS * D, PAIRS * D)
    # Softmax 4 per pair less 1 per row; the keys that heads share, summed; a softcap. Slopes are
    # added to the recomputed scores.
    repeats = B * (H - HKV) * SK * 2 * D
    capped, biased = softcap > 0, slopes is not None
    assert own.flops == 2 * own.macs + 4 * PAIRS - ROWS + SCALING + repeats + 5 * PAIRS * capped
    assert again.flops == 2 * again.macs + SCALING + (2 + 3 * capped + biased) * PAIRS
    assert own.bytes_read == 4 * (3 * q.numel() + 2 * k.numel() + lse.numel())
    assert own.bytes_written == 4 * (q.numel() + 2 * k.numel() + B * H * 128)


FLASH_3 = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)


FLASH_3_FUNCTION = (
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, Tensor? k_new=None, Tensor? v_new=None, "
    "Tensor? qv=None, Tensor? out_=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, "
    "Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, float? softmax_scale=None, "
    "bool causal=False, SymInt window_size_left=-1, SymInt window_size_right=-1, "
    "SymInt attention_chunk=0, float softcap=0., bool rotary_interleaved=True, "
    "Tensor? scheduler_metadata=None, SymInt num_splits=1, bool? pack_gqa=None, "
    "SymInt sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor)"
)


@pytest.mark.parametrize(
    ("schema", "causal", "second_query"),
    [(FLASH_3, "is_causal", "q_v"), (FLASH_3_FUNCTION, "causal", "qv")],
)
def test_flash_attn_3_forward_counts_as_attention(
    schema: str, causal: str, second_query: str
) -> None:
    with stand_in("flash_attn_3", schema, flash) as op:
        cost = profile_of(lambda: op(*q_k_v(), **{causal: True}), causal="half").total()
        chunked = profile_of(lambda: op(*q_k_v(), attention_chunk=2)).total()
        with pytest.warns(UncountedWarning, match="attention_chunk is not covered"):
            profile_of(lambda: op(*q_k_v(), attention_chunk=2), causal="half")
        twice = profile_of(lambda: op(*q_k_v(), **{second_query: q_k_v()[0]})).total()
    assert cost.macs == CAUSAL_PAIRS * 2 * D
    assert cost.flops == forward_flops(CAUSAL_PAIRS, ROWS, SCALING, masked=1)
    assert chunked.macs == PAIRS * 2 * D
    # The scores are q·k + q_v·v: products over 2·D, and twice as much is scaled.
    assert twice.macs == PAIRS * 3 * D
    assert twice.flops == forward_flops(PAIRS, ROWS, 2 * SCALING, masked=0) + 2 * PAIRS * D


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


CAPACITY, PAGE = 64, 16
USED = (10, 23)


def cached(op: Any, queries: int = 1, **options: Any) -> OpCost:
    """Return the cost of a call with ``queries`` each for B sequences and a cache of keys."""
    cache = torch.ones(B, CAPACITY, HKV, D)
    return profile_of(lambda: op(torch.ones(B, queries, H, D), cache, cache, **options)).total()


def test_flash_attn_3_counts_of_a_cache_the_keys_that_are_used() -> None:
    with stand_in("flash_attn_3", FLASH_3, flash) as op:
        used = cached(op, seqused_k=ints(*USED))
        padded = cached(op, seqused_k=ints(*USED), leftpad_k=ints(4, 0))
        unknown = cached(op, seqused_k=torch.empty(B, dtype=torch.int32, device="meta"))
    assert used.macs == H * sum(USED) * 2 * D
    assert padded.macs == H * (sum(USED) - 4) * 2 * D
    assert unknown.macs == B * H * CAPACITY * 2 * D  # an upper bound
    assert used.bytes_read == 4 * (B * H * D + 2 * sum(USED) * HKV * D)


def test_flash_attn_3_adds_new_keys_to_those_of_the_cache_and_rotates_them() -> None:
    new, queries, rotated = torch.ones(B, 3, HKV, D), 3, 4
    with stand_in("flash_attn_3", FLASH_3, flash) as op:
        cost = cached(op, queries, k_new=new, v_new=new, seqused_k=ints(*USED),
                      rotary_cos=torch.ones(CAPACITY, rotated // 2))  # fmt: skip
    keys = sum(USED) + B * 3
    pairs, rows = H * queries * keys, B * H * queries
    assert cost.macs == pairs * 2 * D
    scaling = (B * H * queries + H * keys) * D
    rotation = 3 * B * (queries * H + 3 * HKV) * rotated
    assert cost.flops == forward_flops(pairs, rows, scaling, masked=0) + rotation


def test_flash_attn_3_counts_of_pages_the_keys_that_are_used() -> None:
    pages, table = torch.ones(9, PAGE, HKV, D), torch.zeros(B, 4, dtype=torch.int32)
    q, offsets = torch.ones(3 + 4, H, D), ints(0, 3, 3 + 4)
    device = torch.empty(B, dtype=torch.int32, device="meta")
    with stand_in("flash_attn_3", FLASH_3, flash) as op:

        def macs(used: Tensor) -> int:
            options = {"cu_seqlens_q": offsets, "max_seqlen_q": 4, "page_table": table}
            return profile_of(lambda: op(q, pages, pages, seqused_k=used, **options)).total().macs

        known, unknown = macs(ints(*USED)), macs(device)
    assert known == H * (3 * USED[0] + 4 * USED[1]) * 2 * D
    assert unknown == H * (3 + 4) * 4 * PAGE * 2 * D  # all that the table has, an upper bound


@pytest.mark.parametrize("is_used_given", [False, True])
def test_flash_attn_varlen_forward_counts_of_pages_the_keys_that_are_used(
    is_used_given: bool,
) -> None:
    pages, table = torch.ones(9, PAGE, HKV, D), torch.zeros(B, 4, dtype=torch.int32)
    q, offsets = torch.ones(3 + 4, H, D), ints(0, 3, 3 + 4)
    offsets_k = ints(0, 33, 66) if is_used_given else ints(0, USED[0], sum(USED))
    used = {"seqused_k": ints(*USED)} if is_used_given else {}
    with stand_in("flash_attn", VARLEN, flash) as op:
        call = (q, pages, pages, offsets, offsets_k, 4, 33, 0.0, 1.0, False)
        cost = profile_of(lambda: op(*call, block_table=table, **used)).total()
    assert cost.macs == H * (3 * USED[0] + 4 * USED[1]) * 2 * D


FLASH_3_BACKWARD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(dq!)? dq = None, Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, float softcap = 0.0, bool deterministic = False, "
    "int sm_margin = 0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
FLASH_3_FUNCTION_BACKWARD = (
    "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor softmax_lse, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? sequed_q=None, Tensor? sequed_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None, Tensor(a12!)? dq=None, Tensor(a13!)? dk=None, "
    "Tensor(a14!)? dv=None, float? softmax_scale=None, bool is_causal=False, "
    "SymInt window_size_left=-1, SymInt window_size_right=-1, float softcap=0., "
    "bool deterministic=False, SymInt sm_margin=0) -> Tensor"
)


@pytest.mark.parametrize(
    ("schema", "results"), [(FLASH_3_BACKWARD, 5), (FLASH_3_FUNCTION_BACKWARD, 1)]
)
def test_flash_attn_3_backward_counts_gradients_and_recomputed_scores(
    schema: str, results: int
) -> None:
    q, k, v = q_k_v()
    grads = {
        name: torch.empty_like(t) for name, t in zip(("dq", "dk", "dv"), (q, k, v), strict=True)
    }

    def kernel(*_: Any, **__: Any) -> Any:
        made = tuple(torch.empty(B, H, 128) for _ in range(results))
        return made if results > 1 else made[0]

    with stand_in("flash_attn_3", schema, kernel) as op:
        lse = torch.ones(B, H, SQ)
        profile = profile_of(lambda: op(q.clone(), q, k, v, q.clone(), lse, **grads))
    row = next(t for t in profile.op_totals() if t.op.startswith("flash_attn_3") and t.calls)
    assert row.cost is not None
    assert (row.cost.macs, profile.total("recompute").macs) == (4 * PAIRS * D, PAIRS * D)
    assert row.cost.bytes_read == 4 * (3 * q.numel() + 2 * k.numel() + lse.numel())
    assert row.cost.bytes_written == 4 * (q.numel() + 2 * k.numel() + results * B * H * 128)


XFORMERS = (
    "flash_fwd(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, "
    "float softmax_scale, bool is_causal, SymInt window_left, SymInt window_right, "
    "bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)"
)
XFORMERS_BACKWARD = (
    "flash_bwd(bool grads_share_storage, Tensor grad, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor lse, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, SymInt window_left, "
    "SymInt window_right, Tensor rng_state) -> (Tensor, Tensor, Tensor)"
)


def test_xformers_flash_counts_as_attention() -> None:
    q, k, v, offsets_q, offsets_k = packed((5, 7), (3, 11))
    pairs = H * (5 * 7 + 3 * 11)
    dense = (*q_k_v(), None, None, None, SQ, SK, 0.0, 1.0, False, -1, -1, False, None)
    sequences = (q, k, v, offsets_q, offsets_k, None, 5, 11, 0.0, 1.0, True, -1, -1, False, None)
    with stand_in("xformers_flash", XFORMERS, lambda q, *_: flash(q)[:3]) as op:
        cost, of_sequences = total_of(op, *dense), total_of(op, *sequences)
    assert (cost.macs, cost.flops) == (
        PAIRS * 2 * D,
        forward_flops(PAIRS, ROWS, SCALING, masked=0),
    )
    scaling = H * (5 + 3 + 7 + 11) * D
    assert of_sequences.flops == forward_flops(pairs, H * (5 + 3), scaling, masked=1)


def test_xformers_flash_backward_counts_gradients_and_recomputed_scores() -> None:
    q, k, v, offsets_q, offsets_k = packed((5, 7), (3, 11))
    pairs = H * (5 * 7 + 3 * 11)
    args = (False, q, q, k, v, q, torch.ones(1), offsets_q, offsets_k, 5, 11, 0.0, 1.0, False,
            -1, -1, torch.ones(2))  # fmt: skip
    grads = [torch.empty_like(t) for t in (q, k, v)]
    with stand_in("xformers_flash", XFORMERS_BACKWARD, lambda *_: tuple(grads)) as op:
        profile = profile_of(op, *args)
    assert profile.total("forward").macs == 4 * pairs * D
    assert profile.total("recompute").macs == pairs * D
