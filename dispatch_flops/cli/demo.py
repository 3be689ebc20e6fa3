"""A model to try the profiler on: BERT-base in plain torch, with random weights.

Shapes, module names and classes are those of the published model, so that its profile can be
laid beside any other tool's. Letters: B sequences, S tokens each, D width.
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
    """The model and token ids of shape (batch, seq): a target for ``dispatch-flops profile``.

    MACs: batch·(layers·(4·D²·S + 2·S²·D + 2·D·inner·S) + D²); 44,696,862,720 by default.
    """
    return BertModel(layers), torch.ones(batch, seq, dtype=torch.long)


class BertModel(nn.Module):
    """Token ids (B, S) to hidden states (B, S, D) and the pooled first token (B, D)."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embeddings = BertEmbeddings()
        self.encoder = BertEncoder(layers)
        self.pooler = BertPooler()

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.encoder(self.embeddings(ids))
        return hidden, self.pooler(hidden)


class BertEmbeddings(nn.Module):
    """The sum of three embeddings, normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(TOKEN_TYPES, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        tokens = self.word_embeddings(ids) + self.token_type_embeddings(torch.zeros_like(ids))
        out: torch.Tensor = self.LayerNorm(tokens + self.position_embeddings(places))
        return out


class BertEncoder(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer() for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            hidden = layer(hidden)
        return hidden


class BertLayer(nn.Module):
    """Attention and a perceptron, each with a residual and a norm after it."""

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
    """Self-attention and its output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.self = BertSelfAttention()
        self.output = BertOutput(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.output(self.self(hidden), hidden)
        return out


class BertSelfAttention(nn.Module):
    """Scaled dot-product attention over heads, without a mask."""

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
    """The wide half of the perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, INNER)
        self.intermediate_act_fn = nn.GELU()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.intermediate_act_fn(self.dense(hidden))
        return out


class BertOutput(nn.Module):
    """A projection back to the model's width, the residual and the norm."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, EPSILON)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.LayerNorm(self.dense(hidden) + residual)
        return out


class BertPooler(nn.Module):
    """The first token of each sequence, projected."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.activation = nn.Tanh()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.activation(self.dense(hidden[:, 0]))
        return out
