"""Attention: queries [2,3,5,16], keys and values [2,3,7,16], the full rectangle of scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from one_op.probe import layer, of, op, without_gradients

aten = torch.ops.aten
Q, K = (2, 3, 5, 16), (2, 3, 7, 16)
SCORES = (2, 3, 5, 7, 16)
WHOLE = (SCORES, SCORES)

# one layer of encoder: width 12, inner width 20, 2 items of 7 tokens
ENCODER = ((4, 2, 7, 12, 12), (2, 2, 7, 7, 12), (2, 2, 7, 12, 20))
PARTS = "the peer is left with what does not go through the layer's fused operator"
RECTANGLE = "a causal mask halves nothing here: the full rectangle is the convention of all"


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)


def _flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v)


def _lengths(*shapes: tuple[int, ...]) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(s) for s in shapes])


def _meta(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.ones(s, device="meta") for s in shapes)


PROBES = (
    op("F.sdpa", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), of(Q, K, K), *WHOLE),
    op(
        "F.sdpa(query=, key=, value=)",
        lambda q, k, v: F.scaled_dot_product_attention(query=q, key=k, value=v),
        of(Q, K, K),
        *WHOLE,
    ),
    op(
        "F.sdpa, values narrower",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        of(Q, K, (2, 3, 7, 11)),
        SCORES,
        (2, 3, 5, 7, 11),
        note="values have 11 features, keys 16: the peer takes both for 16",
    ),
    op(
        "F.sdpa(enable_gqa=True)",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        of((2, 6, 5, 16), K, K),
        (2, 6, 5, 7, 16),
        (2, 6, 5, 7, 16),
        note="two query heads share a key head, and each has scores of its own",
    ),
    op(
        "F.sdpa(is_causal=True)",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        of(K, K, K),
        (2, 3, 7, 7, 16),
        (2, 3, 7, 7, 16),
        note=RECTANGLE,
    ),
    op(
        "F.sdpa(attn_mask=)",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        of(Q, K, K, (5, 7)),
        *WHOLE,
    ),
    op(
        "F.sdpa, nested: 2 and 5 tokens",
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda: (_lengths((3, 2, 16), (3, 5, 16)),),
        (2, 3, 2, 2, 16),
        (2, 3, 5, 5, 16),
        note="each item by its own length",
    ),
    op(
        "aten flash attention, meta",
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v),
        lambda: _meta(Q, K, K),
        *WHOLE,
    ),
    op(
        "aten efficient attention, meta",
        lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, False),
        lambda: _meta(Q, K, K),
        *WHOLE,
    ),
    op("flex_attention", _flex, of(Q, K, K), *WHOLE),
    layer(
        "nn.MultiheadAttention, training",
        lambda: _SelfAttention(),
        of((2, 7, 12)),
        *ENCODER[:2],
        note="projections 4·E² a token and both products; where less, one of these is missed",
    ),
    layer(
        "nn.MultiheadAttention, fast path",
        lambda: without_gradients(_SelfAttention()),
        of((2, 7, 12)),
        *ENCODER[:2],
        note=PARTS,
    ),
    layer(
        "nn.TransformerEncoderLayer, training",
        _encoder,
        of((2, 7, 12)),
        *ENCODER,
        note="the peer misses the two products of the attention, 2·S²·E an item",
    ),
    layer(
        "nn.TransformerEncoderLayer, fast path",
        lambda: without_gradients(_encoder()),
        of((2, 7, 12)),
        *ENCODER,
        note=PARTS,
    ),
)


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)[0]
