"""One step of a continuous batch: sequences of different lengths, packed into one row of tokens.

Linear layers run once over all new tokens. Attention runs for each sequence on its own, over its
own keys and values, which are written in place. It needs a model of transformers whose attention
is chosen by name, which all recent language models of it are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dispatch_flops.errors import ConfigError, TargetError

_ATTENTION = "dispatch_flops_packed"
_PART = re.compile(r"(?:(\d+)x)?(\d+)@(\d+)")


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A sequence in a step: tokens that the step computes, and those cached before it.

    ``NewTokens(1, 4096)`` decodes, ``NewTokens(5, 4096)`` checks 4 drafted tokens, and
    ``NewTokens(512, 0)`` is a prompt.
    """

    new: int
    context: int = 0

    @property
    def most(self) -> int:
        """Tokens that the sequence gains at most: 1 for a prompt, else all that are computed."""
        return self.new if self.context else 1


def parse_sequences(text: str) -> tuple[NewTokens, ...]:
    """Parse ``"12x1@1024+512@0"``: 12 sequences of 1 new token after 1024, and a prompt of 512.

    Raises ConfigError for any other text, and for a sequence without new tokens.
    """
    found: list[NewTokens] = []
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        if match is None or not int(match[2]) or match[1] == "0":
            raise ConfigError(
                f"sequences={text!r}: {part!r} is not COUNTxNEW@CONTEXT; write such as "
                "12x1@1024+512@0"
            )
        found += [NewTokens(int(match[2]), int(match[3]))] * int(match[1] or 1)
    return tuple(found)


class PackedCache:
    """Keys and values of each sequence and layer, with room for the new tokens of one step.

    It is passed as ``past_key_values``. The first pass makes room: in a layer with a sliding window
    for as many tokens as its new ones attend to.
    """

    def __init__(self, sequences: Sequence[NewTokens]) -> None:
        self._sequences = sequences
        self.layers: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._attended: set[int] = set()

    @property
    def is_attended(self) -> bool:
        """True if every layer has attended to its own keys and values."""
        return bool(self._attended) and self._attended == self.layers.keys()

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values behind the cached ones; return the new ones."""
        if layer_idx not in self.layers:
            self.layers[layer_idx] = [
                (_room(keys, sequence), _room(values, sequence)) for sequence in self._sequences
            ]
        new = [sequence.new for sequence in self._sequences]
        pieces = zip(keys.split(new, dim=2), values.split(new, dim=2), strict=True)
        for pair, own, count in zip(self.layers[layer_idx], pieces, new, strict=True):
            for held, part in zip(pair, own, strict=True):
                held[:, :, held.shape[2] - count :].copy_(part)
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: positions are passed to the model."""
        return 0

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return attention of each sequence over its own keys and values."""
        out = []
        self._attended.add(module.layer_idx)
        if sliding_window is not None:
            self._keep_window(module.layer_idx, sliding_window)
        parts = query.split([sequence.new for sequence in self._sequences], dim=2)
        held = self.layers[module.layer_idx]
        for sequence, part, (keys, values) in zip(self._sequences, parts, held, strict=True):
            out.append(
                nn.functional.scaled_dot_product_attention(
                    part, keys, values, scale=scaling, enable_gqa=part.shape[1] != keys.shape[1],
                    is_causal=sequence.new > 1 and not sequence.context,
                )
            )  # fmt: skip
        return torch.cat(out, dim=2).transpose(1, 2), None

    def _keep_window(self, layer: int, window: int) -> None:
        """Keep of each sequence the tokens that a window shows to the new ones."""
        self.layers[layer] = [
            (_last(keys, sequence.new + window - 1), _last(values, sequence.new + window - 1))
            for sequence, (keys, values) in zip(self._sequences, self.layers[layer], strict=True)
        ]


def _room(like: torch.Tensor, sequence: NewTokens) -> torch.Tensor:
    heads, size = like.shape[1], like.shape[3]
    return like.new_empty(1, heads, sequence.context + sequence.new, size)


def _last(held: torch.Tensor, tokens: int) -> torch.Tensor:
    return held if held.shape[2] <= tokens else held[:, :, -tokens:].clone()


def packed_inputs(sequences: Sequence[NewTokens]) -> dict[str, torch.Tensor]:
    """Return token ids and positions of all new tokens, and which of them need logits.

    A prompt needs the logits of its last token, a sequence that goes on those of all new tokens.
    """
    total = sum(sequence.new for sequence in sequences)
    logits = sum(sequence.most for sequence in sequences)
    ids = torch.ones(1, total, dtype=torch.long)
    return {
        "input_ids": ids,
        "position_ids": torch.ones_like(ids),
        "logits_to_keep": torch.ones(logits, dtype=torch.long),
    }


def attention_without_a_name(model: nn.Module) -> TargetError:
    """Return the error of a model whose attention cannot be replaced."""
    return TargetError(
        f"{type(model).__name__} has no attention that transformers chooses by name; "
        "plan batches of equal lengths"
    )


@contextmanager
def packed_attention(model: nn.Module, cache: PackedCache) -> Iterator[None]:
    """Let the model's attention run for each sequence of the cache; undone at the end.

    Raises TargetError for a model whose attention is not chosen by name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = getattr(model, "config", None)
    before = getattr(config, "_attn_implementation", None)
    if config is None or before is None:
        raise attention_without_a_name(model)
    ALL_ATTENTION_FUNCTIONS[_ATTENTION] = cache.attend
    config._attn_implementation = _ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
        ALL_ATTENTION_FUNCTIONS.pop(_ATTENTION)
