"""Whole attention and encoder layers in one operator, and the pieces of them.

Letters: T tokens (B items of S, or the lengths of a nested batch summed), E embedding size,
H heads, F feed-forward size. Each costs what the layer's Python code costs on the same tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import cost_of
from dispatch_flops.operators.formulas._attention import (
    Scores,
    forward,
    forward_in_words,
    heads_first,
    rectangle,
    softmax,
    total,
)
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.softmax import filled_rows
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import is_strided_nested, nested_sizes
from dispatch_flops.profile.cost import OpCost, Share, Split, contraction

aten = torch.ops.aten
Tensor = torch.Tensor


def _lengths(x: Tensor) -> list[int]:
    """Tokens of each item of x[B,S,E], nested or not."""
    if is_strided_nested(x):
        return [sizes[0] for sizes in nested_sizes(x)]
    return [x.shape[1]] * x.shape[0]


def _linear(tokens: int, weight: Tensor) -> OpCost:
    """T·Σ elements MACs, one addition per token and output feature."""
    return contraction(tokens * weight.numel(), extra_flops=tokens * weight.shape[0])


def _multi_head_scores(query: Tensor, key: Tensor, heads: int, embed: int) -> Scores:
    d = embed // heads
    lengths = Counter(zip(_lengths(query), _lengths(key), strict=True))
    return total(rectangle(n, heads, heads, sq, sk, d, d) for (sq, sk), n in lengths.items())


def _attention_with_weights(scores: Scores, *, masked: bool, averaged: bool) -> OpCost:
    """Attention as F.multi_head_attention_forward computes it to return the weights: q scaled, keys
    not; softmax; the weights' mean over heads, one operation per score."""
    extra = scores.queries * scores.d + scores.pairs * (masked + averaged)
    extra += softmax(scores.pairs, scores.rows)
    return contraction(scores.pairs * (scores.d + scores.dv), extra_flops=extra)


@register_flops(ops("_native_multi_head_attention"), by_name=True)
def native_multi_head_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    proj_weight: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    out: Any,
    **_: Any,
) -> OpCost:
    """nn.MultiheadAttention without gradients: query, key, value[B,S,E], dense or nested.

    MACs: E² per token of query, key and value; Σ 2·Sq·Sk·E; E² per token of query for the output
    projection. nn.MultiheadAttention never calls ``out_proj``: on every path the projection is the
    attention's own. FLOPs: 2·MACs + biases + scaling of q and k + 6 per pair less 2 per row
    (softmax) + 1 per pair with a mask. If the weights are returned, q alone is scaled, the softmax
    is 5 per pair less 2 per row, and averaging the weights is 1 per pair.
    Source: torch.nn.functional.multi_head_attention_forward.
    """
    # One third of the packed projection belongs to each of query, key and value.
    tokens = [sum(_lengths(x)) for x in (query, key, value)]
    projected = contraction(
        sum(tokens) * embed_dim * qkv_weight.shape[-1], extra_flops=sum(tokens) * embed_dim
    )
    scores = _multi_head_scores(query, key, num_head, embed_dim)
    masked = mask is not None
    if need_weights:
        attended = _attention_with_weights(scores, masked=masked, averaged=average_attn_weights)
    else:
        attended = forward(scores, masked=masked, dropout=False)
    return projected + attended + _linear(tokens[0], proj_weight)


@register_flops(ops("_triton_multi_head_attention"), by_name=True)
def triton_multi_head_attention(**arguments: Any) -> OpCost:
    """As ``_native_multi_head_attention`` without weights."""
    return native_multi_head_attention(**arguments, need_weights=False)


@register_flops(ops("_transformer_encoder_layer_fwd"), by_name=True)
def transformer_encoder_layer_fwd(
    *,
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    proj_weight: Tensor,
    use_gelu: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    mask: Tensor | None = None,
    out: Any,
    **_: Any,
) -> Split:
    """nn.TransformerEncoderLayer without gradients: src[B,S,E], dense or nested.

    MACs: T·4E² + Σ 2·S²·E (``self_attn``), T·E·F each (``linear1``, ``linear2``).
    FLOPs: 2·MACs + biases + the scaling, softmax and mask of ``aten._native_multi_head_attention``
    without weights + both norms' + the layer's own: the activation on T·F elements and two residual
    sums of T·E.
    Source: torch.nn.TransformerEncoderLayer.forward.
    """
    tokens = sum(_lengths(src))
    attention = native_multi_head_attention(
        query=src,
        key=src,
        value=src,
        embed_dim=embed_dim,
        num_head=num_heads,
        qkv_weight=qkv_weight,
        proj_weight=proj_weight,
        mask=mask,
        need_weights=False,
        out=out,
    )
    activation = aten.gelu if use_gelu else aten.relu
    own = tokens * _per_token(activation, ffn_bias_1) + 2 * tokens * embed_dim
    parts = {
        "self_attn": attention,
        "linear1": _linear(tokens, ffn_weight_1),
        "linear2": _linear(tokens, ffn_weight_2),
        "norm1": OpCost(flops=tokens * _norm_per_token(norm_weight_1, norm_bias_1, eps)),
        "norm2": OpCost(flops=tokens * _norm_per_token(norm_weight_2, norm_bias_2, eps)),
    }
    return Split(
        own=OpCost(flops=own),
        shares=tuple(Share(cost=cost, child=child) for child, cost in parts.items()),
    )


# A layer's vector has the shape of one token's features: an op's cost on it, times T, is the cost
# on all tokens, and a nested tensor's shape, which raises, is not needed.
def _per_token(op: Any, features: Tensor) -> int:
    return cost_of(op, features, out=features).flops


def _norm_per_token(weight: Tensor, bias: Tensor, eps: float) -> int:
    norm = aten.native_layer_norm
    return cost_of(norm, weight, list(weight.shape), weight, bias, eps, out=(weight,)).flops


# -- pieces --------------------------------------------------------------------------------


@register_flops(ops("_transform_bias_rescale_qkv"))
def transform_bias_rescale_qkv(
    qkv: Tensor, qkv_bias: Tensor, num_heads: int, *, out: Any, **_: Any
) -> OpCost:
    """qkv[T,3E] + bias, split into heads, q scaled. FLOPs: 3·T·E + T·E."""
    return OpCost(flops=qkv.numel() + qkv.numel() // 3)


@register_flops(ops("_masked_softmax"))
def masked_softmax(
    self: Tensor, mask: Tensor, dim: int | None = None, *_: Any, out: Any, **__: Any
) -> OpCost:
    """Softmax of scores filled with -inf at the mask, which is free. FLOPs: softmax's."""
    return OpCost(flops=softmax(self.numel(), filled_rows(self, -1 if dim is None else dim)))


@register_flops(ops("_nested_tensor_softmax_with_shape"))
def nested_tensor_softmax_with_shape(self: Tensor, query: Tensor, *, out: Any, **_: Any) -> OpCost:
    """Softmax of padded scores[B,H,S,S], padding included. FLOPs: softmax's."""
    return OpCost(flops=softmax(self.numel(), filled_rows(self, -1)))


@register_flops(ops("_masked_softmax_backward"))
def masked_softmax_backward(
    grad_output: Tensor, output: Tensor, mask: Tensor, dim: int | None = None, *, out: Any, **_: Any
) -> OpCost:
    """p = g·y; p - y·Σp. FLOPs: 4 per score less 1 per row."""
    rows = filled_rows(output, -1 if dim is None else dim)
    return OpCost(flops=4 * output.numel() - rows)


@register_flops(ops("_triton_scaled_dot_attention"), note=forward_in_words(""))
@tells_apart(0)
def triton_scaled_dot_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, *, out: Any, **_: Any
) -> OpCost:
    """q[B,H,Sq,d], k[B,H,Sk,d], v[B,H,Sk,dv]."""
    return forward(heads_first(q, k, v), masked=False, dropout=dropout_p > 0)
