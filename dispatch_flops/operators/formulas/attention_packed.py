"""Attention kernels below ``scaled_dot_product_attention``, which also take packed sequences.

Letters as in ``_attention``; Tq and Tk are all queries and keys of a batch laid end to end. If
offsets are given, sequences are packed. Lengths that lie in the CPU's memory are used; of others
``_attention.packed`` bounds the scores. Without offsets operands have a batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.operators.formulas._attention import (
    FULL,
    PACKED_BOUND,
    SCALES_OF_8_BITS,
    Band,
    Scores,
    backward,
    backward_in_words,
    causal_band,
    forward,
    forward_in_words,
    heads_first,
    heads_third,
    packed,
    rectangle,
    total,
)
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_given
from dispatch_flops.profile.cost import OpCost, Split

Tensor = torch.Tensor


def _scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor | None,
    offsets_k: Tensor | None,
    max_q: int | None,
    max_k: int | None,
    band: Band,
    *,
    batched: Callable[[Tensor, Tensor, Tensor, Band], Scores] = heads_third,
    used_k: Tensor | None = None,
    paged: bool = False,
) -> Scores:
    """Return ``packed`` scores if there are offsets, else ``batched`` ones.

    offsets, offsets_k: where queries and keys of each sequence begin, and where the last one ends.
    max_q, max_k: the longest lengths; None: the whole packed length.
    used_k: how many keys of each sequence are used.
    """
    if not is_given(offsets):
        return batched(q, k, v, band)
    lengths_q = lengths_between(offsets)
    lengths_k = values_at_hand(used_k) if is_given(used_k) else lengths_between(offsets_k)
    if lengths_q is not None and lengths_k is not None and len(lengths_q) == len(lengths_k):
        heads, d = q.shape[-2:]
        return total(
            rectangle(1, heads, k.shape[-2], sq, sk, d, v.shape[-1], band)
            for sq, sk in zip(lengths_q, lengths_k, strict=True)
        )
    return packed(
        q,
        k,
        v,
        items=offsets.shape[0] - 1,
        longest_q=q.shape[1] if max_q is None else max_q,
        longest_k=k.shape[1] if max_k is None else max_k,
        band=band,
        paged=paged,
    )


def lengths_between(offsets: Tensor | None) -> list[int] | None:
    """Return the lengths of the sequences between offsets; None if those are not at hand."""
    values = values_at_hand(offsets)
    if values is None or values != sorted(values):
        return None
    return [end - start for start, end in pairwise(values)]


def values_at_hand(tensor: Tensor | None) -> list[int] | None:
    """Return the numbers of a tensor in the CPU's memory; no other device is waited for."""
    if type(tensor) is not Tensor or tensor.device.type != "cpu":
        return None
    with _torch.modes_disabled():  # other counters do not see this
        values: list[int] = tensor.tolist()
    return values


# -- flash ---------------------------------------------------------------------------------


def flash_band(is_causal: bool, left: int | None, right: int | None) -> Band:
    """Return the band of a flash kernel: aligned to the end, with -1 or None for "no limit"."""
    limit_left = None if left is None or left < 0 else left
    limit_right = 0 if is_causal else None if right is None or right < 0 else right
    if limit_left is None and limit_right is None:
        return FULL
    return Band(left=limit_left, right=limit_right, from_end=True)


_MASKED = "if masked or causal"
IN_FLASH = "if causal, in a window or with alibi"


@register_flops(
    ops("_flash_attention_forward"),
    by_name=True,
    cacheable=False,
    note=f"{forward_in_words(IN_FLASH)} {PACKED_BOUND} {SCALES_OF_8_BITS}",
)
@register_flops(
    ops("_flash_attention_forward_no_dropout_inplace"),
    by_name=True,
    cacheable=False,
    note=f"{forward_in_words(IN_FLASH, dropout=False)} {PACKED_BOUND}",
)
@tells_apart(0)
def flash_forward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None = None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[B,Sq,H,d], k[B,Sk,Hkv,d], v[B,Sk,Hkv,dv]; packed q[Tq,H,d], k[Tk,Hkv,d], v[Tk,Hkv,dv]."""
    band = flash_band(is_causal, window_size_left, window_size_right)
    paged = block_table is not None
    scores = _scores(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, band, used_k=seqused_k, paged=paged
    )
    return forward(scores, masked=band != FULL or is_given(alibi_slopes), dropout=dropout_p > 0)


@register_flops(
    ops("_flash_attention_backward"),
    by_name=True,
    cacheable=False,
    note=f"{backward_in_words('if causal or in a window')} {PACKED_BOUND}",
)
@tells_apart(0)
def flash_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None = None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    alibi_slopes: Tensor | None = None,
    out: Any,
    **_: Any,
) -> Split:
    """Gradients of ``flash_forward``."""
    band = flash_band(is_causal, window_size_left, window_size_right)
    offsets = cum_seq_q if query.dim() == 3 else None
    scores = _scores(query, key, value, offsets, cum_seq_k, max_q, max_k, band)
    return backward(scores, masked=band != FULL or is_given(alibi_slopes), dropout=dropout_p > 0)


# -- memory-efficient ----------------------------------------------------------------------

_CAUSAL_FROM_TOP_LEFT = 1
_CAUSAL_FROM_BOTTOM_RIGHT = 2


def _efficient_band(mask_type: int, window_size: int | None) -> Band:
    """Return the band of an efficient kernel, whose window includes the query's own position.

    Windows apply only to causal masks.
    """
    if mask_type not in (_CAUSAL_FROM_TOP_LEFT, _CAUSAL_FROM_BOTTOM_RIGHT):
        return FULL
    left = window_size - 1 if window_size else None
    return Band(left=left, right=0, from_end=mask_type == _CAUSAL_FROM_BOTTOM_RIGHT)


@register_flops(
    ops("_efficient_attention_forward"),
    by_name=True,
    cacheable=False,
    note=f"{forward_in_words(_MASKED)} {PACKED_BOUND}",
)
@tells_apart(0)
def efficient_forward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[B,Sq,H,d], k[B,Sk,Hkv,d], v[B,Sk,Hkv,dv]; packed: B is 1 and offsets are given."""
    band = _efficient_band(custom_mask_type, window_size)
    scores = _scores(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        band,
        used_k=seqlen_k,
    )
    return forward(scores, masked=band != FULL or is_given(bias), dropout=dropout_p > 0)


@register_flops(
    ops("_efficient_attention_backward"),
    by_name=True,
    cacheable=False,
    note=f"{backward_in_words(_MASKED, bias=True)} {PACKED_BOUND}",
)
@tells_apart(0)
def efficient_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    custom_mask_type: int,
    bias_requires_grad: bool,
    window_size: int | None = None,
    out: Any,
    **_: Any,
) -> Split:
    """Gradients of ``efficient_forward``, and of the bias if it is needed."""
    band = _efficient_band(custom_mask_type, window_size)
    return backward(
        _scores(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, band),
        masked=band != FULL or is_given(bias),
        dropout=dropout_p > 0,
        bias_grad=bias.numel() if bias_requires_grad and bias is not None else None,
    )


# -- cuDNN: packed like flash; with a batch dimension, unlike flash, heads come first ---------


@register_flops(
    ops("_cudnn_attention_forward"),
    by_name=True,
    cacheable=False,
    note=f"{forward_in_words(_MASKED)} {PACKED_BOUND}",
)
@tells_apart(0)
def cudnn_forward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None = None,
    max_q: int,
    max_k: int,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[B,H,Sq,d], k[B,Hkv,Sk,d], v[B,Hkv,Sk,dv]; packed q[Tq,H,d], k[Tk,Hkv,d], v[Tk,Hkv,dv]."""
    band = causal_band(is_causal)
    scores = _scores(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, band, batched=heads_first
    )
    return forward(scores, masked=is_causal or is_given(attn_bias), dropout=dropout_p > 0)


@register_flops(
    ops("_cudnn_attention_backward"),
    by_name=True,
    cacheable=False,
    note=f"{backward_in_words(_MASKED)} {PACKED_BOUND}",
)
@tells_apart(0)
def cudnn_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None = None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    out: Any,
    **_: Any,
) -> Split:
    """Gradients of ``cudnn_forward``."""
    offsets = cum_seq_q if query.dim() == 3 else None
    band = causal_band(is_causal)
    scores = _scores(query, key, value, offsets, cum_seq_k, max_q, max_k, band, batched=heads_first)
    return backward(scores, masked=is_causal or is_given(attn_bias), dropout=dropout_p > 0)


# -- torch.nn.attention.varlen: an opaque op around the above ------------------------------
# By name: the library comes with torch.nn.attention.varlen, whose import takes most of a second.

_NO_WINDOW = (-1, -1)


def _as_flash(
    *,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None = None,
    window_size: Sequence[int] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the arguments of the flash kernel, which takes others under the same names."""
    left, right = window_size or _NO_WINDOW
    window = {"window_size_left": left, "window_size_right": right}
    return {"cum_seq_q": cu_seq_q, "cum_seq_k": cu_seq_k, "dropout_p": 0.0, **window, **others}


@register_flops(
    ["torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out"], by_name=True, cacheable=False
)
def varlen_forward(*, is_causal: bool = False, **arguments: Any) -> OpCost:
    """As ``aten._flash_attention_forward``, packed, without dropout."""
    return flash_forward(is_causal=is_causal, **_as_flash(**arguments))


@register_flops("torch_attn::_varlen_attn_backward", by_name=True, cacheable=False)
def varlen_backward(**arguments: Any) -> Split:
    """As ``aten._flash_attention_backward``, packed, without dropout."""
    return flash_backward(**_as_flash(**arguments))
