"""Attention kernels below ``scaled_dot_product_attention``, which take packed sequences, too.

Letters as in ``_attention``; Tq, Tk are all queries and keys of a batch laid end to end. With
offsets given, sequences are packed and ``_attention.packed`` bounds their scores; without,
operands have a batch dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.cost import OpCost, Split
from dispatch_flops.formulas._attention import (
    FULL,
    Band,
    Scores,
    backward,
    causal_band,
    forward,
    heads_first,
    heads_third,
    packed,
)
from dispatch_flops.formulas._ops import overloads, packets
from dispatch_flops.formulas.attention import is_given
from dispatch_flops.registry import Formula, register_flops

Tensor = torch.Tensor


# -- flash ---------------------------------------------------------------------------------


def _flash_band(is_causal: bool, left: int | None, right: int | None) -> Band:
    """Flash attention aligns to the end and writes "no limit" as -1 or None."""
    limit_left = None if left is None or left < 0 else left
    limit_right = 0 if is_causal else None if right is None or right < 0 else right
    if limit_left is None and limit_right is None:
        return FULL
    return Band(left=limit_left, right=limit_right, from_end=True)


def _flash_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    max_q: int,
    max_k: int,
    band: Band,
    *,
    paged: bool = False,
) -> Scores:
    if not is_given(offsets):
        return heads_third(q, k, v, band)
    items = offsets.shape[0] - 1
    return packed(q, k, v, items=items, longest_q=max_q, longest_k=max_k, band=band, paged=paged)


@register_flops(overloads("_flash_attention_forward.default"))
def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    _return_debug_mask: bool = False,
    *,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[B,Sq,H,d], k[B,Sk,Hkv,d], v[B,Sk,Hkv,dv], or packed q[Tq,H,d], k[Tk,Hkv,d], v[Tk,Hkv,dv].

    MACs: pairs·(d+dv); packed: an upper bound. FLOPs: ``_attention.forward``'s.
    """
    band = _flash_band(is_causal, window_size_left, window_size_right)
    paged = block_table is not None
    scores = _flash_scores(q, k, v, cum_seq_q, max_q, max_k, band, paged=paged)
    return forward(scores, masked=band != FULL or is_given(alibi_slopes), dropout=dropout_p > 0)


@register_flops(overloads("_flash_attention_forward.quantized"))
def flash_forward_quantized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    out: Any,
    **options: Any,
) -> OpCost:
    """8-bit operands; their scales are merged into the softmax's: as ``flash_forward``."""
    return flash_forward(
        q, k, v, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, out=out, **options
    )


@register_flops(packets("_flash_attention_forward_no_dropout_inplace"))
def flash_forward_inplace(_output: Tensor, *args: Any, out: Any, **options: Any) -> OpCost:
    """As ``flash_forward``; the result is written into the first argument."""
    return flash_forward(*args, out=out, **options)


@register_flops(packets("_flash_attention_backward"))
def flash_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _output: Tensor,
    _logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    _cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    out: Any,
    **__: Any,
) -> Split:
    """MACs: 2·pairs·(d+dv), and pairs·d recomputed. FLOPs: ``_attention.backward``'s."""
    band = _flash_band(is_causal, window_size_left, window_size_right)
    offsets = cum_seq_q if q.dim() == 3 else None
    scores = _flash_scores(q, k, v, offsets, max_q, max_k, band)
    return backward(scores, masked=band != FULL, dropout=dropout_p > 0)


# -- memory-efficient ----------------------------------------------------------------------

_CAUSAL_FROM_TOP_LEFT = 1
_CAUSAL_FROM_BOTTOM_RIGHT = 2


def _efficient_band(mask_type: int, window_size: int | None) -> Band:
    """The window counts the query's own position, and applies to causal masks only."""
    if mask_type not in (_CAUSAL_FROM_TOP_LEFT, _CAUSAL_FROM_BOTTOM_RIGHT):
        return FULL
    left = window_size - 1 if window_size else None
    return Band(left=left, right=0, from_end=mask_type == _CAUSAL_FROM_BOTTOM_RIGHT)


def _efficient_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    max_q: int | None,
    max_k: int | None,
    band: Band,
) -> Scores:
    if not is_given(offsets):
        return heads_third(q, k, v, band)
    return packed(
        q,
        k,
        v,
        items=offsets.shape[0] - 1,
        longest_q=q.shape[1] if max_q is None else max_q,
        longest_k=k.shape[1] if max_k is None else max_k,
        band=band,
    )


@register_flops(packets("_efficient_attention_forward"))
def efficient_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    _compute_log_sumexp: bool = False,
    *,
    window_size: int | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[B,Sq,H,d], k[B,Sk,Hkv,d], v[B,Sk,Hkv,dv]; packed: B is 1 and offsets are given.

    MACs: pairs·(d+dv); packed: an upper bound. FLOPs: ``_attention.forward``'s.
    """
    band = _efficient_band(custom_mask_type, window_size)
    scores = _efficient_scores(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, band)
    return forward(scores, masked=band != FULL or is_given(bias), dropout=dropout_p > 0)


@register_flops(packets("_efficient_attention_backward"))
def efficient_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    _output: Tensor,
    cu_seqlens_q: Tensor | None,
    _cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    _logsumexp: Tensor,
    dropout_p: float,
    _philox_seed: Tensor,
    _philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    window_size: int | None = None,
    out: Any,
    **_: Any,
) -> Split:
    """MACs: 2·pairs·(d+dv), and pairs·d recomputed. FLOPs: ``_attention.backward``'s."""
    band = _efficient_band(custom_mask_type, window_size)
    return backward(
        _efficient_scores(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, band),
        masked=band != FULL or is_given(bias),
        dropout=dropout_p > 0,
        bias_grad=bias.numel() if bias_requires_grad and bias is not None else None,
    )


# -- cuDNN ---------------------------------------------------------------------------------


def _cudnn_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
) -> Scores:
    """Packed like flash; with a batch dimension, unlike flash, heads come first."""
    band = causal_band(is_causal)
    if not is_given(offsets):
        return heads_first(q, k, v, band)
    items = offsets.shape[0] - 1
    return packed(q, k, v, items=items, longest_q=max_q, longest_k=max_k, band=band)


@register_flops(packets("_cudnn_attention_forward"))
def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    _compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """q[B,H,Sq,d], k[B,Hkv,Sk,d], v[B,Hkv,Sk,dv], or packed q[Tq,H,d], k[Tk,Hkv,d], v[Tk,Hkv,dv].

    MACs: pairs·(d+dv); packed: an upper bound. FLOPs: ``_attention.forward``'s.
    """
    scores = _cudnn_scores(q, k, v, cum_seq_q, max_q, max_k, is_causal)
    return forward(scores, masked=is_causal or is_given(attn_bias), dropout=dropout_p > 0)


@register_flops(packets("_cudnn_attention_backward"))
def cudnn_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _output: Tensor,
    _logsumexp: Tensor,
    _philox_seed: Tensor,
    _philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    _cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> Split:
    """MACs: 2·pairs·(d+dv), and pairs·d recomputed. FLOPs: ``_attention.backward``'s."""
    offsets = cum_seq_q if q.dim() == 3 else None
    scores = _cudnn_scores(q, k, v, offsets, max_q, max_k, is_causal)
    return backward(scores, masked=is_causal or is_given(attn_bias), dropout=dropout_p > 0)


# -- torch.nn.attention.varlen: an opaque op around the above ------------------------------


def varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    _scale: float | None = None,
    window_size: list[int] | None = None,
    _enable_gqa: bool = False,
    _seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    _num_splits: int | None = None,
    *,
    out: Any,
    **options: Any,
) -> OpCost:
    """As ``flash_forward``, packed, without dropout."""
    left, right = options.get("window_size", window_size) or (-1, -1)
    return flash_forward(
        q,
        k,
        v,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,
        is_causal,
        window_size_left=left,
        window_size_right=right,
        block_table=block_table,
        out=out,
    )


def varlen_forward_out(_output: Tensor, *args: Any, out: Any, **options: Any) -> OpCost:
    """As ``varlen_forward``; the result is written into the first argument."""
    return varlen_forward(*args, out=out, **options)


def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    _scale: float | None = None,
    window_size: list[int] | None = None,
    *,
    out: Any,
    **_: Any,
) -> Split:
    """As ``flash_backward``, packed, without dropout."""
    left, right = window_size or (-1, -1)
    return flash_backward(
        grad,
        q,
        k,
        v,
        output,
        lse,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        0.0,
        is_causal,
        window_size_left=left,
        window_size_right=right,
        out=out,
    )


VARLEN: dict[str, Formula] = {
    "_varlen_attn": varlen_forward,
    "_varlen_attn_out": varlen_forward_out,
    "_varlen_attn_backward": varlen_backward,
}
# By name: the library comes with torch.nn.attention.varlen, which takes most of a second.
for _name, _formula in VARLEN.items():
    register_flops(f"torch_attn::{_name}")(_formula)
