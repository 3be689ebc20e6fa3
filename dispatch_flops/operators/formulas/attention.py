"""Fused scaled dot-product attention: every backend's forward and backward.

All cost the same; ``_attention`` derives the cost and explains the letters. Arguments have the
schemas' names: a backend's mask, if it has one, is ``attn_mask`` or ``attn_bias``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.operators.formulas._attention import backward, causal_band, forward, heads_first
from dispatch_flops.operators.formulas._ops import packets
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_given
from dispatch_flops.profile.cost import OpCost, Split

Tensor = torch.Tensor


@register_flops(
    packets(
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math_for_mps",
        "_scaled_dot_product_fused_attention_overrideable",  # of a backend outside torch
    ),
    by_name=True,
)
@tells_apart(0)
def sdpa(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """query[B,H,Sq,d], key[B,Hkv,Sk,d], value[B,Hkv,Sk,dv], optionally a mask.

    MACs: B·H·Sq·Sk·(d+dv). FLOPs: 2·MACs + scaling, softmax, mask and dropout.
    The scales of 8-bit operands are merged into the softmax's scale.
    """
    masked = is_causal or attn_mask is not None or attn_bias is not None
    scores = heads_first(query, key, value, causal_band(is_causal))
    return forward(scores, masked=masked, dropout=dropout_p > 0)


@register_flops(
    packets(
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward",
    ),
    by_name=True,
)
@tells_apart(0)
def sdpa_backward(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    grad_input_mask: Sequence[bool] = (True, True, True, False),
    out: Any,
    **_: Any,
) -> Split:
    """MACs: 2·B·H·Sq·Sk·(d+dv), and B·H·Sq·Sk·d recomputed. FLOPs: 2·MACs
    + the softmax's gradient, scaling, mask and dropout.

    The bias's gradient is included if it is needed.
    """
    to_bias = attn_bias.numel() if attn_bias is not None and grad_input_mask[3] else None
    return backward(
        heads_first(query, key, value, causal_band(is_causal)),
        masked=is_causal or is_given(attn_mask) or is_given(attn_bias),
        dropout=dropout_p > 0,
        bias_grad=to_bias,
    )
