"""Attention kernels of the libraries flash_attn 2 and xformers, once they are loaded.

Letters as in ``_attention``; what torch has of the same kernels is in ``attention_packed``. Queries
are q[B,Sq,H,d], or with offsets packed q[Tq,H,d]; windows are aligned to the end.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dispatch_flops.operators.formulas._attention import (
    PACKED_BOUND,
    backward_in_words,
    forward_in_words,
)
from dispatch_flops.operators.formulas.attention_packed import (
    IN_FLASH,
    flash_backward,
    flash_forward,
)
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.profile.cost import OpCost, Split, flops

Tensor = torch.Tensor

# softcap·tanh(score / softcap): quotient, tanh, product. Backward: the product, tanh's derivative
# (square, difference, product), the quotient.
SOFTCAP, _SOFTCAP_BACKWARD = 3, 5
SOFTCAP_IN_WORDS = "A softcap: 3 per pair."
SOFTCAP_BACKWARD_IN_WORDS = "A softcap: 5 per pair, and 3 recomputed."
_IN_XFORMERS = "if causal or in a window"


def _pairs(cost: OpCost, q: Tensor, v: Tensor) -> int:
    """Return the scores of a forward, whose MACs are pairs·(d+dv)."""
    return cost.macs // (q.shape[-1] + v.shape[-1]) if cost.macs else 0


def _forward(q: Tensor, v: Tensor, softcap: float, **arguments: Any) -> OpCost:
    cost: OpCost = flash_forward(query=q, value=v, **arguments)
    return cost + flops(SOFTCAP * _pairs(cost, q, v) if softcap else 0)


def backward_of(q: Tensor, v: Tensor, softcap: float, **arguments: Any) -> Split:
    split: Split = flash_backward(query=q, value=v, **arguments)
    if not softcap:
        return split
    (again,) = split.shares
    pairs = again.cost.macs // q.shape[-1] if again.cost.macs else 0
    more = dataclasses.replace(again, cost=again.cost + flops(SOFTCAP * pairs))
    return Split(own=split.own + flops(_SOFTCAP_BACKWARD * pairs), shares=(more,))


def moving(split: Split, read: int, written: Any) -> Split:
    """Return the split with the bytes that a backward of these libraries moves."""
    own = dataclasses.replace(split.own, bytes_read=read, bytes_written=nbytes(written))
    return dataclasses.replace(split, own=own)


# -- flash_attn 2 ----------------------------------------------------------------------------


@register_flops(
    "flash_attn::_flash_attn_forward",
    by_name=True,
    note=f"{forward_in_words(IN_FLASH)} {SOFTCAP_IN_WORDS}",
)
@tells_apart(0)
def flash_attn_forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[B,Sq,H,d], k[B,Sk,Hkv,d], v[B,Sk,Hkv,d].

    Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
    """
    return _forward(
        q, v, softcap, key=k, cum_seq_q=None, max_q=0, max_k=0, dropout_p=float(dropout_p != 0),
        is_causal=causal, window_size_left=window_size_left, window_size_right=window_size_right,
        alibi_slopes=alibi_slopes, out=out,
    )  # fmt: skip


@register_flops(
    "flash_attn::_flash_attn_varlen_forward",
    by_name=True,
    cacheable=False,
    note=f"{forward_in_words(IN_FLASH)} {SOFTCAP_IN_WORDS} {PACKED_BOUND}",
)
@tells_apart(0)
def flash_attn_varlen_forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[Tq,H,d], k[Tk,Hkv,d], v[Tk,Hkv,d]; keys and values may be pages.

    Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
    """
    return _forward(
        q, v, softcap, key=k, cum_seq_q=cu_seqlens_q, cum_seq_k=cu_seqlens_k, max_q=max_seqlen_q,
        max_k=max_seqlen_k, dropout_p=dropout_p, is_causal=causal,
        window_size_left=window_size_left, window_size_right=window_size_right,
        alibi_slopes=alibi_slopes, seqused_k=seqused_k, block_table=block_table, out=out,
    )  # fmt: skip


@register_flops(
    ["flash_attn::_flash_attn_backward", "flash_attn::_flash_attn_varlen_backward"],
    by_name=True,
    cacheable=False,
    note=f"{backward_in_words(IN_FLASH)} {SOFTCAP_BACKWARD_IN_WORDS} {PACKED_BOUND}",
)
@tells_apart(0)
def flash_attn_backward(
    *,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
    dropout_p: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None = None,
    out: Any,
    **_: Any,
) -> Split:
    """The gradients are written into ``dq``, ``dk`` and ``dv``; the forward's result is read
    besides, as large as ``dout``.

    Source: Dao-AILab/flash-attention, flash_attn/flash_attn_interface.py.
    """
    split = backward_of(
        q, v, softcap, key=k, cum_seq_q=cu_seqlens_q, cum_seq_k=cu_seqlens_k, max_q=max_seqlen_q,
        max_k=max_seqlen_k, dropout_p=dropout_p, is_causal=causal,
        window_size_left=window_size_left, window_size_right=window_size_right,
        alibi_slopes=alibi_slopes, out=out,
    )  # fmt: skip
    read = nbytes((dout, q, k, v, softmax_lse)) + nbytes(dout)
    return moving(split, read, (dq, dk, dv, out))


# -- xformers --------------------------------------------------------------------------------


@register_flops(
    "xformers_flash::flash_fwd",
    by_name=True,
    cacheable=False,
    note=f"{forward_in_words(_IN_XFORMERS)} {PACKED_BOUND}",
)
@tells_apart(0)
def xformers_flash_forward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    block_tables: Tensor | None,
    out: Any,
    **_: Any,
) -> OpCost:
    """As ``flash_attn_forward``, or packed as ``flash_attn_varlen_forward``.

    Source: facebookresearch/xformers, xformers/ops/fmha/flash.py.
    """
    return _forward(
        query, value, 0.0, key=key, cum_seq_q=cu_seqlens_q, cum_seq_k=cu_seqlens_k,
        max_q=max_seqlen_q, max_k=max_seqlen_k, dropout_p=p, is_causal=is_causal,
        window_size_left=window_left, window_size_right=window_right, seqused_k=seqused_k,
        block_table=block_tables, out=out,
    )  # fmt: skip


@register_flops(
    "xformers_flash::flash_bwd",
    by_name=True,
    cacheable=False,
    note=f"{backward_in_words(_IN_XFORMERS)} {PACKED_BOUND}",
)
@tells_apart(0)
def xformers_flash_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    p: float,
    is_causal: bool,
    window_left: int,
    window_right: int,
    out: Any,
    **_: Any,
) -> Split:
    """Gradients of ``xformers_flash_forward``.

    Source: facebookresearch/xformers, xformers/ops/fmha/flash.py.
    """
    return backward_of(
        query, value, 0.0, key=key, cum_seq_q=cu_seqlens_q, cum_seq_k=cu_seqlens_k,
        max_q=max_seqlen_q, max_k=max_seqlen_k, dropout_p=p, is_causal=is_causal,
        window_size_left=window_left, window_size_right=window_right, out=out,
    )  # fmt: skip
