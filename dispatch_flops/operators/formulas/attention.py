"""Fused scaled dot-product attention: every backend's forward and backward.

All cost the same; ``_attention`` derives the cost and explains the letters. Arguments have the
schemas' names: a backend's mask, if it has one, is ``attn_mask`` or ``attn_bias``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.operators.formulas._attention import (
    SCALES_OF_8_BITS,
    backward,
    backward_in_words,
    causal_band,
    forward,
    forward_in_words,
    heads_first,
)
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_given
from dispatch_flops.profile.cost import OpCost, Split

Tensor = torch.Tensor


_MASKED = "if masked or causal"


@register_flops(
    ops("_scaled_dot_product_flash_attention"),
    by_name=True,
    note=f"{forward_in_words('if causal')} {SCALES_OF_8_BITS}",
)
@register_flops(
    ops("_scaled_dot_product_flash_attention_for_cpu"),
    by_name=True,
    note=forward_in_words(_MASKED, dropout=False),
)
@register_flops(
    ops(
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math_for_mps",
        "_scaled_dot_product_fused_attention_overrideable",  # of a backend outside torch
    ),
    by_name=True,
    note=forward_in_words(_MASKED),
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
    """query[B,H,Sq,d], key[B,Hkv,Sk,d], value[B,Hkv,Sk,dv], optionally a mask."""
    masked = is_causal or attn_mask is not None or attn_bias is not None
    scores = heads_first(query, key, value, causal_band(is_causal))
    return forward(scores, masked=masked, dropout=dropout_p > 0)


@register_flops(
    ops("_scaled_dot_product_flash_attention_backward"),
    by_name=True,
    note=backward_in_words("if causal"),
)
@register_flops(
    ops("_scaled_dot_product_flash_attention_for_cpu_backward"),
    by_name=True,
    note=backward_in_words(_MASKED, dropout=False),
)
@register_flops(
    ops("_scaled_dot_product_cudnn_attention_backward"),
    by_name=True,
    note=backward_in_words(_MASKED),
)
@register_flops(
    ops(
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_fused_attention_overrideable_backward",
    ),
    by_name=True,
    note=backward_in_words(_MASKED, bias=True),
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
    """Gradients of ``sdpa`` for query, key and value, and for the bias if it is needed."""
    to_bias = attn_bias.numel() if attn_bias is not None and grad_input_mask[3] else None
    return backward(
        heads_first(query, key, value, causal_band(is_causal)),
        masked=is_causal or is_given(attn_mask) or is_given(attn_bias),
        dropout=dropout_p > 0,
        bias_grad=to_bias,
    )
