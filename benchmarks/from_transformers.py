"""Models of transformers, made from configurations with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from program import ADDED, SDPA, THREE, Program
from torch import nn

from tests.models.case import tokens

GROUPED = "grouped_mm, the default experts, does most of the work, and no peer knows it"


def preload() -> None:
    """Import what takes long, before any process forks."""
    importlib.import_module("torch._dynamo")
    transformers = importlib.import_module("transformers")
    for name in ("Bert", "GPT2LMHead"):
        getattr(transformers, f"{name}Model")
    for name in ("Llama", "Mixtral"):
        getattr(transformers, f"{name}ForCausalLM")
    for name in ("T5ForConditionalGeneration", "SwinForImageClassification"):
        getattr(transformers, name)


def _transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what builds a model of transformers from its configuration."""

    def make() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**settings)
        built: nn.Module = getattr(transformers, model)(made).eval()
        return built

    return make


class _EncoderDecoder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor, decoded: torch.Tensor) -> Any:
        return self.inner(input_ids=ids, decoder_input_ids=decoded).logits


class _Generating(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> Any:
        mask = torch.ones_like(ids)
        options = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        return self.inner.generate(ids, attention_mask=mask, **options)


def encoder(s: int, d: int, ff: int) -> int:
    """Return a layer's MACs: four projections, attention's two products, the MLP's two."""
    return 4 * d * d * s + 2 * s * s * d + 2 * d * ff * s


def swin_macs() -> int:
    """Return Swin-T's MACs at 224 x 224: windows of 7·7, patches merged between stages."""
    macs = 96 * 48 * 56**2
    for depth, c, side in ((2, 96, 56), (2, 192, 28), (6, 384, 14), (2, 768, 7)):
        n = side * side
        macs += depth * (12 * c * c * n + 2 * n * 49 * c)
        if c < 768:
            macs += n // 4 * 4 * c * 2 * c
    return macs + 768 * 1000


def t5_macs(s: int, t: int) -> int:
    """Return T5-small's MACs: the decoder has self-attention and cross-attention."""
    d, ff, layers, vocab = 512, 2048, 6, 32128
    crossing = 2 * d * d * t + 2 * d * d * s + 2 * t * s * d
    return layers * (encoder(s, d, ff) + encoder(t, d, ff) + crossing) + t * d * vocab


def mixtral_macs(s: int) -> int:
    """Return the MACs of two layers; each token uses 2 of 8 experts of three products."""
    d, ff, narrow, experts, vocab = 192, 320, 96, 8, 1009
    attention = 2 * d * d * s + 2 * d * narrow * s + 2 * s * s * d
    return 2 * (attention + s * d * experts + s * 2 * 3 * d * ff) + s * d * vocab


def gpt2_generate_macs(prompt: int, new: int) -> int:
    """Return the MACs of the prompt and of each token over the cache; only last logits."""
    d, vocab = 768, 50257
    macs = 12 * encoder(prompt, d, 4 * d) + d * vocab
    for i in range(1, new):
        macs += 12 * (12 * d * d + 2 * (prompt + i) * d) + d * vocab
    return macs


_BERT = 12 * encoder(128, 768, 3072) + 768**2
_GPT2 = 12 * encoder(128, 768, 3072) + 128 * 768 * 50257
_LLAMA = (
    4 * (2 * 512**2 * 128 + 2 * 512 * 128 * 128 + 3 * 512 * 1376 * 128 + 2 * 128**2 * 512)
    + 128 * 512 * 32000
)
_LLAMA_CONFIG = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 1376,
    "use_cache": False,
}
_MIXTRAL_CONFIG = {
    "vocab_size": 1009,
    "hidden_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 320,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "use_cache": False,
}


def _bert(attention: str) -> Callable[[], nn.Module]:
    return _transformers("BertModel", "BertConfig", attn_implementation=attention)


def _t5() -> nn.Module:
    make = _transformers("T5ForConditionalGeneration", "T5Config", num_layers=6, use_cache=False)
    return _EncoderDecoder(make())


def programs() -> list[Program]:
    """Return the forward of every model, and forward with backward of some."""
    made = [
        Program(
            name=f"BERT-base ({a})", make=_bert(a), inputs=tokens(1, 128), macs=_BERT, note=note
        )
        for a, note in (("eager", ADDED), ("sdpa", SDPA))
    ]
    made += [
        Program(
            name=f"BERT-base ({a}), forward and backward",
            make=_bert(a),
            inputs=tokens(1, 128),
            macs=3 * _BERT - 2 * 768**2,  # the pooler gets no gradient
            backward=True,
            note=note,
        )
        for a, note in (("eager", THREE), ("sdpa", SDPA))
    ]
    made += [
        Program(
            name="GPT-2 small",
            make=_transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False),
            inputs=tokens(1, 128),
            macs=_GPT2,
            note=SDPA,
        ),
        Program(
            name="GPT-2 small, generating 8 after 16",
            make=lambda: _Generating(_transformers("GPT2LMHeadModel", "GPT2Config")()),
            inputs=tokens(1, 16),
            macs=gpt2_generate_macs(16, 8),
            note=SDPA,
        ),
        Program(
            name="T5-small, 128 and 32",
            make=_t5,
            inputs=lambda: (*tokens(1, 128)(), *tokens(1, 32)()),
            macs=t5_macs(128, 32),
            note="attention: fvcore and calflops see none of it, torch and ptflops miss the "
            "decoder's cross-attention, which runs as one kernel",
        ),
        Program(
            name="Llama, grouped queries",
            make=_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA_CONFIG),
            inputs=tokens(1, 128),
            macs=_LLAMA,
            note=SDPA,
        ),
        Program(
            name="Swin-T",
            make=_transformers("SwinForImageClassification", "SwinConfig", num_labels=1000),
            inputs=lambda: (torch.ones(1, 3, 224, 224),),
            macs=swin_macs(),
            note="attention: fvcore and calflops do not see it; " + ADDED,
        ),
    ]
    for name, settings, note in (
        ("default experts", {}, GROUPED),
        ("eager experts", {"experts_implementation": "eager"}, SDPA),
    ):
        make = _transformers("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL_CONFIG, **settings)
        made.append(
            Program(
                name=f"Mixtral, {name}",
                make=make,
                inputs=lambda: (torch.arange(24)[None],),
                macs=mixtral_macs(24),
                note=note,
            )
        )
    return made
