"""Attention: queries [2,3,5,16], keys and values [2,3,7,16], the full rectangle of scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.probes.probe import layer, of, op, without_gradients

aten = torch.ops.aten
Q, K = (2, 3, 5, 16), (2, 3, 7, 16)
SCORES = (2, 3, 5, 7, 16)
WHOLE = (SCORES, SCORES)

# One encoder layer: width 12, inner width 20, 2 items of 7 tokens. The fast path needs an even
# number of heads.
ENCODER = ((4, 2, 7, 12, 12), (2, 2, 7, 7, 12), (2, 2, 7, 12, 20))
PARTS = (
    "hooks switch the layer's fast path off, self_attn still runs fused: 0.3922 is left; "
    "without hooks all is lost; biases and norms are not MACs"
)


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(12, 2, 20, batch_first=True)


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
    ),
    op(
        "F.sdpa(enable_gqa=True)",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        of((2, 6, 5, 16), K, K),
        (2, 6, 5, 7, 16),
        (2, 6, 5, 7, 16),
    ),
    op(
        "F.sdpa(is_causal=True)",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        of(K, K, K),
        (2, 3, 7, 7, 16),
        (2, 3, 7, 7, 16),
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
    ),
    op(
        "aten flash attention, meta",
        lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v),
        lambda: _meta(Q, K, K),
        *WHOLE,
        device="meta",
    ),
    op(
        "aten efficient attention, meta",
        lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, False),
        lambda: _meta(Q, K, K),
        *WHOLE,
        device="meta",
    ),
    op("flex_attention", _flex, of(Q, K, K), *WHOLE),
    layer(
        "nn.MultiheadAttention, training",
        lambda: _SelfAttention(),
        of((2, 7, 12)),
        *ENCODER[:2],
        note="calflops misses the two products by bmm, 2·S²·E an item; biases are not MACs",
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
        note="without the attention's two products, 2·S²·E an item, it is 0.8627; what is more are "
        "biases and norms, no MACs",
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
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)[0]
