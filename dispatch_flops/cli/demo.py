"""The model of the command ``demo``: BERT-base in plain torch, with random weights.

Shapes, module names and classes are those of the published model, so that its profile can be
compared with that of any other tool. B: sequences. S: tokens per sequence. D: width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, POSITIONS, TOKEN_TYPES = 30522, 512, 2
WIDTH, HEADS, INNER, LAYERS = 768, 12, 3072, 12
EPSILON = 1e-12


def bert_base(
    batch: int = 4, seq: int = 128, layers: int = LAYERS
) -> tuple[nn.Module, torch.Tensor]:
    """Return the model and token ids of shape (batch, seq): a target of ``dispatch-flops profile``.

    MACs: batch·(layers·(4·D²·S + 2·S²·D + 2·D·inner·S) + D²); 44,696,862,720 by default.
    """
    return BertModel(layers), torch.ones(batch, seq, dtype=torch.long)


class BertModel(nn.Module):
    """Map token ids (B, S) to hidden states (B, S, D) and the pooled first token (B, D)."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings()
        self.encoder = BertEncoder(layers)
        self.pooler = BertPooler()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(self.embeddings(ids))
        return hidden, self.pooler(hidden)


class BertEmbeddings(nn.Module):
    """Normalised sum of the word, position and token type embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(TOKEN_TYPES, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        tokens = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
        out: torch.Tensor = self.LayerNorm(tokens + self.position_embeddings(positions))
        return out


class BertEncoder(nn.Module):
    """Sequence of identical layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer() for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            hidden = layer(hidden)
        return hidden


class BertLayer(nn.Module):
    """Attention and a feed-forward network, each followed by a residual and a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = BertAttention()
        self.intermediate = BertIntermediate()
        self.output = BertOutput(INNER)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        attended = self.attention(hidden)
        out: torch.Tensor = self.output(self.intermediate(attended), attended)
        return out


class BertAttention(nn.Module):
    """Self-attention with its output projection, residual and layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.self = BertSelfAttention()
        self.output = BertOutput(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.output(self.self(hidden), hidden)
        return out


class BertSelfAttention(nn.Module):
    """Multi-head scaled dot-product attention without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(hidden).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


class BertIntermediate(nn.Module):
    """Expansion of the feed-forward network: D to INNER, with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.intermediate_act_fn(self.dense(hidden))
        return out


class BertOutput(nn.Module):
    """Projection to the model's width, then the residual and a layer norm."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.LayerNorm(self.dense(hidden) + residual)
        return out


class BertPooler(nn.Module):
    """Projection of each sequence's first token, with tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.Tanh()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.dense(hidden[:, 0]))
        return out
