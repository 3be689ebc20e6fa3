"""The models of published MFU tables, in plain torch: GPT, Llama and PaLM, with closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from benchmarks import llama

DTYPE = torch.bfloat16


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """A GPT as Megatron's and llm-foundry's MPT: learned positions, biases, tied embedding."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int

    @property
    def lookup_params(self) -> int:
        """Parameters that are only looked up: the positions; the head uses the embedding."""
        return self.sequence * self.width

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.width

    @property
    def params(self) -> int:
        """Embedding, positions, and 12 d^2 + 13 d for each layer with biases and two norms."""
        layer = 12 * self.width**2 + 13 * self.width
        embeddings = (self.vocabulary + self.sequence) * self.width
        return embeddings + self.layers * layer + 2 * self.width

    def forward_macs(self) -> int:
        """MACs of one sequence: 12 d^2 for each layer, the head, and attention in full."""
        weights = self.layers * 12 * self.width**2 + self.vocabulary * self.width
        return self.sequence * (weights + 2 * self.layers * self.sequence * self.width)

    def build(self) -> nn.Module:
        return Decoder(self, GptBlock, nn.LayerNorm, has_positions=True)


@dataclass(frozen=True, kw_only=True)
class PalmConfig:
    """PaLM: parallel layers, SwiGLU, one head of keys and values, tied embedding, no biases."""

    layers: int
    width: int
    heads: int
    head_size: int
    vocabulary: int
    sequence: int
    lookup_params: int = 0

    @property
    def head_params(self) -> int:
        return self.vocabulary * self.width

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.width * self.attention_width + 2 * self.width * self.head_size
        return attention + 3 * self.width * 4 * self.width

    @property
    def params(self) -> int:
        norms = (self.layers + 1) * self.width
        return self.vocabulary * self.width + self.layers * self.layer_weights + norms

    def forward_macs(self) -> int:
        """MACs of one sequence: one for each weight and token, and attention in full."""
        weights = self.layers * self.layer_weights + self.vocabulary * self.width
        attention = 2 * self.layers * self.sequence * self.attention_width
        return self.sequence * (weights + attention)

    def build(self) -> nn.Module:
        return Decoder(self, PalmBlock, nn.RMSNorm, has_positions=False)


@dataclass(frozen=True, kw_only=True)
class LlamaRun:
    """A Llama of ``benchmarks.llama`` at one length of sequence."""

    config: llama.LlamaConfig
    sequence: int

    @property
    def lookup_params(self) -> int:
        """The embedding, whose matrix the head does not share."""
        return self.config.vocab * self.config.hidden

    @property
    def head_params(self) -> int:
        return self.config.vocab * self.config.hidden

    @property
    def params(self) -> int:
        return self.config.params

    def forward_macs(self) -> int:
        return self.config.forward_macs(1, self.sequence)

    def build(self) -> nn.Module:
        return llama.Llama(self.config)


Config = GptConfig | PalmConfig | LlamaRun


class GptBlock(nn.Module):
    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class PalmBlock(nn.Module):
    def __init__(self, config: PalmConfig) -> None:
        super().__init__()
        width, hidden = config.width, 4 * config.width
        self.head_size = config.head_size
        self.norm = nn.RMSNorm(width)
        self.q = nn.Linear(width, config.attention_width, bias=False)
        self.kv = nn.Linear(width, 2 * config.head_size, bias=False)
        self.out = nn.Linear(config.attention_width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        q = self.q(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k, v = self.kv(normed).unflatten(-1, (2, 1, self.head_size)).unbind(2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = self.out(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + attended + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out


class Decoder(nn.Module):
    """Embedding, blocks and a head that shares the embedding's matrix."""

    def __init__(
        self,
        config: GptConfig | PalmConfig,
        block: type[nn.Module],
        norm: type[nn.Module],
        *,
        has_positions: bool,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.sequence, config.width) if has_positions else None
        self.layers = nn.ModuleList(block(config) for _ in range(config.layers))
        self.norm = norm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def checkpoint_layers(model: nn.Module) -> None:
    """Make every layer recompute its whole forward pass in backward.

    The last product as well: by default torch stops where nothing more is needed.
    """
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = _recomputed(layer.forward)


def _recomputed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*args: torch.Tensor) -> torch.Tensor:
        with set_checkpoint_early_stop(False):
            out: torch.Tensor = checkpoint(forward, *args, use_reentrant=False)
        return out

    return run


MPT = {
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16),
    "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}  # fmt: skip
MEGATRON = {
    "1.7b": (24, 2304, 24), "3.6b": (30, 3072, 32), "7.5b": (36, 4096, 32),
    "18.4b": (40, 6144, 48), "22b": (48, 6144, 64), "39.1b": (48, 8192, 64),
    "76.1b": (60, 10240, 80), "145.6b": (80, 12288, 96), "175b": (96, 12288, 96),
    "310.1b": (96, 16384, 128), "530b": (105, 20480, 128), "1t": (128, 25600, 160),
}  # fmt: skip
LLAMA = {
    "llama3-8b": llama.CONFIGS["8B"],
    "llama3-70b": llama.CONFIGS["70B"],
    "llama2-13b": llama.LlamaConfig(
        layers=40, hidden=5120, ffn=13824, heads=40, kv_heads=40, vocab=32000
    ),
    "llama2-70b": llama.LlamaConfig(
        layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=32000
    ),
}


def config_of(model: str, sequence: int) -> Config:
    """Return the configuration of a published model; raises KeyError for another name."""
    if model == "palm-540b":
        return PalmConfig(
            layers=118, width=18432, heads=48, head_size=256, vocabulary=256_000, sequence=sequence
        )
    if model in LLAMA:
        return LlamaRun(config=LLAMA[model], sequence=sequence)
    family, _, size = model.partition("-")
    sizes, vocabulary = {
        "mpt": (MPT, 50368),
        "gpt": (MEGATRON, 51200),
        "mt": ({"nlg-530b": MEGATRON["530b"]}, 50272),
    }[family]
    layers, width, heads = sizes[size]
    return GptConfig(
        layers=layers, width=width, heads=heads, vocabulary=vocabulary, sequence=sequence
    )
