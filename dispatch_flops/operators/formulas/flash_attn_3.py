"""Attention kernels of flash_attn 3, once it is loaded.

Letters as in ``_attention``. Queries are q[B,Sq,H,d], or packed q[Tq,H,d]. Keys k[B,Sk,Hkv,d] may
be packed, too, or a cache of which each sequence uses a part, or pages k[pages,size,Hkv,d]. The
library's functions call the C++ operators, or in newer releases operators of their own around them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dispatch_flops.errors import FormulaError
from dispatch_flops.operators.conventions import conventions
from dispatch_flops.operators.formulas._attention import (
    FULL,
    PACKED_BOUND,
    Band,
    Scores,
    backward_in_words,
    forward,
    forward_in_words,
    packed,
    rectangle,
    total,
)
from dispatch_flops.operators.formulas.attention_packed import (
    flash_band,
    lengths_between,
    values_at_hand,
)
from dispatch_flops.operators.formulas.flash_libraries import (
    SOFTCAP,
    SOFTCAP_BACKWARD_IN_WORDS,
    SOFTCAP_IN_WORDS,
    backward_of,
    moving,
)
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_given
from dispatch_flops.profile.cost import OpCost, Split, flops

Tensor = torch.Tensor

_ROTATION = 3  # per rotated element: of a pair 4 products, a sum and a difference
_MASKED = "if causal or in a window"


@register_flops(
    ["flash_attn_3::fwd", "flash_attn_3::_flash_attn_forward"],
    by_name=True,
    cacheable=False,
    note=f"{forward_in_words(_MASKED, dropout=False)} {SOFTCAP_IN_WORDS} 3 per element of q and of "
    f"new keys that is rotated. {PACKED_BOUND}",
)
@tells_apart(0)
def flash_attn_3_forward(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    out: Any,
    **named: Any,
) -> OpCost:
    """A second query q_v[..,H,dv] adds its product with v to the scores, as d+dv for d.

    Keys of a sequence are those that it uses, and new ones; with lengths on a device all that the
    cache holds, an upper bound. ``causal="half"`` does not cover ``attention_chunk``.
    Source: Dao-AILab/flash-attention, hopper/flash_api.cpp, hopper/seqlen.h.
    """
    if attention_chunk and conventions().causal == "half":
        raise FormulaError(
            'attention_chunk is not covered with causal="half"; register a formula for these calls '
            "with override=True"
        )
    second = named.get("q_v", named.get("qv"))
    is_causal = bool(named.get("is_causal", named.get("causal")))
    band = flash_band(is_causal, window_size_left, window_size_right)
    scores = _scores(q, k, v, band, second, k_new, page_table, seqused_k, named)
    extra = SOFTCAP * scores.pairs if softcap else 0
    if rotary_cos is not None:
        heads = sum(t.numel() // t.shape[-1] for t in (q, k_new) if t is not None)
        extra += _ROTATION * heads * 2 * rotary_cos.shape[-1]
    cost = forward(scores, masked=band != FULL, dropout=False) + flops(extra)
    if page_table is None and seqused_k is None and k_new is None:
        return cost
    keys = scores.keys // q.shape[-2] * k.shape[-2]
    held = k.shape[-1] * k.element_size() + v.shape[-1] * v.element_size()
    written = nbytes(out) + nbytes((k_new, v_new))
    return dataclasses.replace(
        cost, bytes_read=nbytes((q, second)) + keys * held, bytes_written=written
    )


def _scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    band: Band,
    second: Tensor | None,
    k_new: Tensor | None,
    page_table: Tensor | None,
    used_k: Tensor | None,
    named: dict[str, Any],
) -> Scores:
    """Return the scores of each sequence by its lengths, or their bound."""
    offsets_q = named.get("cu_seqlens_q")
    heads, kv_heads, dv = q.shape[-2], k.shape[-2], v.shape[-1]
    d = q.shape[-1] + (second.shape[-1] if second is not None else 0)
    items = q.shape[0] if offsets_q is None else offsets_q.shape[0] - 1
    capacity = k.shape[-3] if page_table is None else page_table.shape[1] * k.shape[1]
    queries = _lengths(named.get("seqused_q"), offsets_q, items, q.shape[-3])
    keys = _lengths(used_k, named.get("cu_seqlens_k"), items, capacity)
    padding = _lengths(named.get("leftpad_k"), None, items, 0)
    new = _new_lengths(k_new, named.get("cu_seqlens_k_new"), items)
    keys = _sums(_sums(keys, new), None if padding is None else [-length for length in padding])
    if queries is not None and keys is not None and len(queries) == len(keys):
        return total(
            rectangle(1, heads, kv_heads, sq, sk, d, dv, band)
            for sq, sk in zip(queries, keys, strict=True)
        )
    longest_k = capacity if k_new is not None else named.get("max_seqlen_k") or capacity
    if offsets_q is None:
        return rectangle(items, heads, kv_heads, q.shape[-3], longest_k, d, dv, band)
    is_cache = page_table is not None or is_given(used_k)
    bound = packed(
        q, k, v, items=items, longest_q=named.get("max_seqlen_q") or q.shape[-3],
        longest_k=longest_k, band=band, paged=is_cache,
    )  # fmt: skip
    return dataclasses.replace(bound, d=d)


def _lengths(
    used: Tensor | None, offsets: Tensor | None, items: int, otherwise: int
) -> list[int] | None:
    """Return the length of each sequence; None if it is on a device."""
    if is_given(used):
        return values_at_hand(used)
    return [otherwise] * items if offsets is None else lengths_between(offsets)


def _new_lengths(k_new: Tensor | None, offsets: Tensor | None, items: int) -> list[int] | None:
    return _lengths(None, offsets, items, 0 if k_new is None else k_new.shape[-3])


def _sums(lengths: list[int] | None, more: list[int] | None) -> list[int] | None:
    """Return the sums in pairs; None if some lengths are not known."""
    if lengths is None or more is None:
        return None
    return [a + b for a, b in zip(lengths, more, strict=True)]


@register_flops(
    ["flash_attn_3::bwd", "flash_attn_3::_flash_attn_backward"],
    by_name=True,
    cacheable=False,
    note=f"{backward_in_words(_MASKED, dropout=False)} {SOFTCAP_BACKWARD_IN_WORDS} {PACKED_BOUND}",
)
@tells_apart(0)
def flash_attn_3_backward(
    *,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    out: Any,
    **_: Any,
) -> Split:
    """The gradients are written into ``dq``, ``dk`` and ``dv``.

    Source: Dao-AILab/flash-attention, hopper/flash_api.cpp, hopper/flash_attn_interface.py.
    """
    split = backward_of(
        q, v, softcap, key=k, cum_seq_q=cu_seqlens_q, cum_seq_k=cu_seqlens_k,
        max_q=max_seqlen_q or 0, max_k=max_seqlen_k or 0, dropout_p=0.0, is_causal=is_causal,
        window_size_left=window_size_left, window_size_right=window_size_right, out=out,
    )  # fmt: skip
    read = nbytes((dout, q, k, v, softmax_lse)) + nbytes(dout)
    return moving(split, read, (dq, dk, dv, out))
