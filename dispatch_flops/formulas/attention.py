"""Fused scaled dot-product attention: every backend's forward and backward.

All cost the same; ``_attention`` derives how much. Letters as there. Arguments named ``_*`` are
part of a schema and bear on no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch

from dispatch_flops.cost import OpCost, Split
from dispatch_flops.formulas._attention import (
    backward,
    causal_band,
    forward,
    heads_first,
)
from dispatch_flops.formulas._ops import overloads, packets
from dispatch_flops.registry import register_flops

Tensor = torch.Tensor


# -- scaled_dot_product_attention's own kernels: heads first -------------------------------


@register_flops(overloads("_scaled_dot_product_flash_attention.default"))
def sdpa_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """q[B,H,Sq,d], k[B,Hkv,Sk,d], v[B,Hkv,Sk,dv], no mask but a causal one.

    MACs: B·H·Sq·Sk·(d+dv). FLOPs: ``_attention.forward``'s.
    """
    scores = heads_first(q, k, v, causal_band(is_causal))
    return forward(scores, masked=is_causal, dropout=dropout_p > 0)


@register_flops(overloads("_scaled_dot_product_flash_attention.quantized"))
def sdpa_flash_quantized(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _q_descale: Tensor | None,
    _k_descale: Tensor | None,
    _v_descale: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """8-bit operands; their scales are merged into the softmax's: as ``sdpa_flash``."""
    return sdpa_flash(q, k, v, dropout_p, is_causal, out=out)


@register_flops(packets("_scaled_dot_product_flash_attention_for_cpu"))
def sdpa_flash_for_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """As ``sdpa_flash``, with a mask. MACs: B·H·Sq·Sk·(d+dv)."""
    return _sdpa(q, k, v, attn_mask, dropout_p, is_causal)


@register_flops(packets("_scaled_dot_product_attention_math_for_mps"))
def sdpa_math_for_mps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """As ``sdpa_flash``, with a mask. MACs: B·H·Sq·Sk·(d+dv)."""
    return _sdpa(q, k, v, attn_mask, dropout_p, is_causal)


@register_flops(packets("_scaled_dot_product_efficient_attention"))
def sdpa_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    _compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """As ``sdpa_flash``, with a mask. MACs: B·H·Sq·Sk·(d+dv)."""
    return _sdpa(q, k, v, attn_bias, dropout_p, is_causal)


@register_flops(packets("_scaled_dot_product_cudnn_attention"))
def sdpa_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    _compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """As ``sdpa_flash``, with a mask. MACs: B·H·Sq·Sk·(d+dv)."""
    return _sdpa(q, k, v, attn_bias, dropout_p, is_causal)


@register_flops(packets("_scaled_dot_product_fused_attention_overrideable"))
def sdpa_overrideable(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> OpCost:
    """As ``sdpa_flash``, with a mask, on a backend outside torch. MACs: B·H·Sq·Sk·(d+dv)."""
    return _sdpa(q, k, v, attn_bias, dropout_p, is_causal)


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool
) -> OpCost:
    scores = heads_first(q, k, v, causal_band(is_causal))
    return forward(scores, masked=is_causal or mask is not None, dropout=dropout_p > 0)


# -- their backward ------------------------------------------------------------------------


@register_flops(packets("_scaled_dot_product_flash_attention_backward"))
def sdpa_flash_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _output: Tensor,
    _logsumexp: Tensor,
    _cum_seq_q: Tensor,
    _cum_seq_k: Tensor,
    _max_q: int,
    _max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> Split:
    """MACs: 2·B·H·Sq·Sk·(d+dv), and B·H·Sq·Sk·d recomputed. FLOPs: ``_attention.backward``'s."""
    return _sdpa_backward(q, k, v, None, dropout_p, is_causal)


@register_flops(packets("_scaled_dot_product_flash_attention_for_cpu_backward"))
def sdpa_flash_for_cpu_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _output: Tensor,
    _logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    out: Any,
    **_: Any,
) -> Split:
    """As ``sdpa_flash_backward``, with a mask."""
    return _sdpa_backward(q, k, v, attn_mask, dropout_p, is_causal)


@register_flops(packets("_scaled_dot_product_efficient_attention_backward"))
def sdpa_efficient_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    _output: Tensor,
    _logsumexp: Tensor,
    _philox_seed: Tensor,
    _philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *_: Any,
    out: Any,
    **__: Any,
) -> Split:
    """As ``sdpa_flash_backward``; the bias may want its gradient, too."""
    wanted = bool(grad_input_mask[3])
    return _sdpa_backward(q, k, v, attn_bias, dropout_p, is_causal, to_bias=wanted)


@register_flops(packets("_scaled_dot_product_cudnn_attention_backward"))
def sdpa_cudnn_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _output: Tensor,
    _logsumexp: Tensor,
    _philox_seed: Tensor,
    _philox_offset: Tensor,
    attn_bias: Tensor | None,
    _cum_seq_q: Tensor,
    _cum_seq_k: Tensor,
    _max_q: int,
    _max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> Split:
    """As ``sdpa_flash_backward``, with a mask."""
    return _sdpa_backward(q, k, v, attn_bias, dropout_p, is_causal)


@register_flops(packets("_scaled_dot_product_fused_attention_overrideable_backward"))
def sdpa_overrideable_backward(
    _grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Tensor | None,
    grad_input_mask: Sequence[bool],
    _output: Tensor,
    _logsumexp: Tensor,
    _cum_seq_q: Tensor,
    _cum_seq_k: Tensor,
    _max_q: int,
    _max_k: int,
    dropout_p: float,
    is_causal: bool,
    *_: Any,
    out: Any,
    **__: Any,
) -> Split:
    """As ``sdpa_flash_backward``; the bias may want its gradient, too."""
    wanted = bool(grad_input_mask[3])
    return _sdpa_backward(q, k, v, attn_bias, dropout_p, is_causal, to_bias=wanted)


def _sdpa_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    *,
    to_bias: bool = False,
) -> Split:
    return backward(
        heads_first(q, k, v, causal_band(is_causal)),
        masked=is_causal or is_given(mask),
        dropout=dropout_p > 0,
        bias_grad=mask.numel() if to_bias and mask is not None else None,
    )


def is_given(mask: Tensor | None) -> TypeGuard[Tensor]:
    """False for None and for the undefined tensor that autograd passes in its place."""
    return mask is not None and mask.numel() > 0
