"""Sequence models in plain torch: decoders, an encoder, a recurrent model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.case import Case, tokens


def heads_of(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, S, E) to (B, heads, S, E / heads)."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


class GPT2(nn.Module):
    """Decoder with learned positions, fused qkv and a head tied to the embedding."""

    def __init__(self, vocab: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(GPT2Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out

    @staticmethod
    def macs(batch: int, s: int, d: int, depth: int, vocab: int) -> int:
        return batch * (depth * (12 * d * d * s + 2 * s * s * d) + s * d * vocab)


class GPT2Block(nn.Module):
    """Attention and perceptron, each after a norm and with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads_of(t, self.heads) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


class Bert(nn.Module):
    """Encoder with three embeddings, norms after, a pooler."""

    def __init__(self, vocab: int, width: int, depth: int, heads: int, inner: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(512, width)
        self.types, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, heads, inner) for _ in range(depth))
        self.pooler = nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.words(ids) + self.places(place) + self.types(torch.zeros_like(ids)))
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(self.pooler(x[:, 0]))

    @staticmethod
    def macs(batch: int, s: int, d: int, depth: int, inner: int) -> int:
        return batch * (depth * (4 * d * d * s + 2 * s * s * d + 2 * d * inner * s) + d * d)


class BertLayer(nn.Module):
    """Attention and perceptron, each with a residual and then a norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.dense = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads_of(f(x), self.heads) for f in (self.query, self.key, self.value))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.dense(a))
        out: torch.Tensor = self.norm2(x + self.down(F.gelu(self.up(x))))
        return out


class Llama(nn.Module):
    """Decoder with rotary positions, RMS norms, gated perceptron and grouped queries."""

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, key_heads: int, inner: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            LlamaBlock(width, heads, key_heads, inner) for _ in range(depth)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out

    @staticmethod
    def macs(
        batch: int, s: int, d: int, depth: int, heads: int, key_heads: int, inner: int, vocab: int
    ) -> int:
        """Return the MACs: keys and values are narrower, attention is by query heads."""
        narrow = key_heads * (d // heads)
        projections = 2 * d * d * s + 2 * d * narrow * s
        layer = projections + 2 * s * s * d + 3 * d * inner * s
        return batch * (depth * layer + s * d * vocab)


class LlamaBlock(nn.Module):
    """One layer of the decoder."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        narrow = key_heads * (width // heads)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q = rotated(heads_of(self.q(h), self.heads))
        k = rotated(heads_of(self.k(h), self.key_heads))
        v = heads_of(self.v(h), self.key_heads)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, elementwise."""
    steps, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(steps, device=x.device)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class MegatronGPT(nn.Module):
    """Megatron's decoder: scores and values by batched products, logits in the root itself."""

    def __init__(self, vocab: int, positions: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.layers = nn.ModuleList(MegatronLayer(width, heads) for _ in range(depth))
        self.final_layernorm = nn.LayerNorm(width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.word_embeddings(ids) + self.position_embeddings(place)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.final_layernorm(x), self.word_embeddings.weight)

    @staticmethod
    def linear_macs(rows: int, d: int, depth: int, vocab: int) -> int:
        """Return the MACs of projections and perceptrons, 12 d^2 per layer and row, and logits."""
        return rows * (depth * 12 * d * d + d * vocab)

    @staticmethod
    def attention_macs(batch: int, s: int, d: int, depth: int) -> int:
        return batch * depth * 2 * s * s * d


class MegatronLayer(nn.Module):
    """Attention and perceptron, named as Megatron names them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.attention = MegatronAttention(width, heads)
        self.post_attention_layernorm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict(
            {
                "dense_h_to_4h": nn.Linear(width, 4 * width),
                "dense_4h_to_h": nn.Linear(4 * width, width),
            }
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x))
        h = F.gelu(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x)))
        out: torch.Tensor = x + self.mlp["dense_4h_to_h"](h)
        return out


class MegatronAttention(nn.Module):
    """Causal self-attention by baddbmm, softmax and bmm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, steps, width = x.shape
        q, k, v = (
            heads_of(t, self.heads).flatten(0, 1) for t in self.query_key_value(x).chunk(3, -1)
        )
        start = x.new_zeros(batch * self.heads, steps, steps)
        scale = (width // self.heads) ** -0.5
        scores = torch.baddbmm(start, q, k.transpose(1, 2), beta=0.0, alpha=scale)
        hidden = torch.ones(steps, steps, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(hidden, -10000.0).softmax(-1)
        context = torch.bmm(weights, v).reshape(batch, self.heads, steps, -1)
        out: torch.Tensor = self.dense(context.transpose(1, 2).flatten(2))
        return out


def _lstm_macs(batch: int, steps: int, ins: int, hidden: int) -> int:
    """Two layers, both directions; the second layer reads both directions of the first."""
    cells = 4 * hidden * (ins + hidden) + 4 * hidden * (2 * hidden + hidden)
    return batch * steps * 2 * cells


class Tagger(nn.Module):
    """A two-layer LSTM, both directions."""

    def __init__(self, ins: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(ins, hidden, 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x)[0]
        return out


_GPT2 = GPT2.macs(1, 128, 768, 12, 50257)
_BERT = Bert.macs(4, 128, 768, 12, 3072)
_LLAMA = Llama.macs(1, 128, 512, 4, 8, 2, 1376, 32000)

CASES = (
    Case(
        name="GPT-2",
        make=lambda: GPT2(50257, 1024, 768, 12, 12),
        inputs=tokens(1, 128),
        macs=_GPT2,
        params=124_439_808,
        gradient_macs=2 * _GPT2,
        recomputed_macs=12 * 128 * 128 * 768,
    ),
    Case(
        name="BERT-base",
        make=lambda: Bert(30522, 768, 12, 12, 3072),
        inputs=tokens(4, 128),
        macs=_BERT,
        params=109_482_240,
        gradient_macs=2 * _BERT,
        recomputed_macs=4 * 12 * 128 * 128 * 768,
        modules={
            "layers.0.query": 4 * 128 * 768 * 768,
            "layers.11.up": 4 * 128 * 768 * 3072,
            "layers.5": 4 * 128 * (4 * 768**2 + 2 * 768 * 3072) + 4 * 2 * 128**2 * 768,
            "pooler": 4 * 768 * 768,
        },
    ),
    Case(
        name="Llama with grouped queries",
        make=lambda: Llama(32000, 512, 4, 8, 2, 1376),
        inputs=tokens(1, 128),
        macs=_LLAMA,
        params=2 * 32000 * 512
        + 4 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1376 + 2 * 512)
        + 512,
        gradient_macs=2 * _LLAMA,
        recomputed_macs=4 * 128 * 128 * 512,
    ),
    Case(
        name="LSTM",
        make=lambda: Tagger(128, 256),
        inputs=lambda: (torch.ones(8, 64, 128),),
        macs=_lstm_macs(8, 64, 128, 256),
        params=2 * 4 * 256 * ((128 + 256 + 2) + (512 + 256 + 2)),
        runs_for_real=True,
    ),
)
