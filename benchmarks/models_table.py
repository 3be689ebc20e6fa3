"""Well-known models: MACs and parameters, counted on the meta device and by closed form.

    python benchmarks/models_table.py

Prints a Markdown table of one forward pass of one sequence. Models are transformers' own code, made
from a configuration, in bfloat16. A Mamba's scan runs in torch operators, and as one fused operator
with and without its formula. Without it, the total is a lower bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from mamba import Mamba, MambaShape, selective_scan, selective_scan_cost
from torch import nn

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.operators.registry import Formula

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model with its closed forms.

    macs: of a forward pass. active: parameters that one token uses; None for all.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    macs: int
    params: int
    active: int | None = None
    shape: str
    formulas: Mapping[Any, Formula] = field(default_factory=dict)
    complete: bool = True


def tokens(length: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"input_ids": torch.ones(1, length, dtype=torch.long, device=META)}


def from_transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return what builds a model from its class, its configuration's class and settings."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    return make


def encoder_macs(length: int, hidden: int, ffn: int) -> int:
    """Return a layer's MACs: 4 projections, 2 of the feed-forward part, scores and values."""
    return length * (4 * hidden**2 + 2 * hidden * ffn) + 2 * length**2 * hidden


def gpt2() -> Model:
    s, d, layers, vocab, positions = 1024, 768, 12, 50257, 1024
    layer = 12 * d * d + 13 * d  # weights, biases and two norms
    return Model(
        name="GPT-2",
        shape=f"{s} tokens",
        make=from_transformers("GPT2LMHeadModel", "GPT2Config"),
        inputs=tokens(s),
        macs=layers * encoder_macs(s, d, 4 * d) + s * d * vocab,
        params=layers * layer + (vocab + positions) * d + 2 * d,
    )


def bert() -> Model:
    s, d, layers, vocab = 512, 768, 12, 30522
    layer = 12 * d * d + 13 * d
    return Model(
        name="BERT-base",
        shape=f"{s} tokens",
        make=from_transformers("BertModel", "BertConfig"),
        inputs=tokens(s),
        macs=layers * encoder_macs(s, d, 4 * d) + d * d,  # the pooler reads one token
        params=layers * layer + (vocab + 512 + 2) * d + 2 * d + d * d + d,
    )


def vit() -> Model:
    patches, d, layers = 14 * 14, 768, 12
    layer = 12 * d * d + 13 * d
    return Model(
        name="ViT-B/16",
        shape="224 x 224",
        make=from_transformers("ViTForImageClassification", "ViTConfig", num_labels=1000),
        inputs=lambda: {"pixel_values": torch.ones(1, 3, 224, 224, dtype=DTYPE, device=META)},
        macs=patches * 768 * d + layers * encoder_macs(patches + 1, d, 4 * d) + d * 1000,
        params=768 * d + d + (patches + 2) * d + layers * layer + 2 * d + d * 1000 + 1000,
    )


def whisper() -> Model:
    s, frames, mels, d, layers, vocab = 448, 3000, 128, 1280, 32, 51866
    half = frames // 2
    convolutions = frames * 3 * mels * d + half * 3 * d * d
    encoder = layers * encoder_macs(half, d, 4 * d)
    crossing = s * 2 * d * d + half * 2 * d * d + 2 * s * half * d
    decoder = layers * (encoder_macs(s, d, 4 * d) + crossing) + s * d * vocab
    attention = 4 * d * d + 3 * d  # keys have no bias
    feed_forward = 8 * d * d + 5 * d
    return Model(
        name="Whisper large-v3",
        shape=f"30 s, {s} tokens",
        make=from_transformers(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            d_model=d,
            encoder_layers=layers,
            decoder_layers=layers,
            encoder_attention_heads=20,
            decoder_attention_heads=20,
            encoder_ffn_dim=4 * d,
            decoder_ffn_dim=4 * d,
            num_mel_bins=mels,
            vocab_size=vocab,
        ),
        inputs=lambda: {
            "input_features": torch.ones(1, mels, frames, dtype=DTYPE, device=META),
            "decoder_input_ids": torch.ones(1, s, dtype=torch.long, device=META),
        },
        macs=convolutions + encoder + decoder,
        params=(3 * mels * d + d + 3 * d * d + d + half * d)
        + layers * (attention + feed_forward + 4 * d)
        + layers * (2 * attention + feed_forward + 6 * d)
        + (vocab + s) * d
        + 4 * d,
    )


def llama(size: str, layers: int, d: int, ffn: int, heads: int) -> Model:
    s, vocab, kv = 8192, 128256, 8 * (d // heads)
    weights = 2 * d * d + 2 * d * kv + 3 * d * ffn
    return Model(
        name=f"Llama 3 {size}",
        shape=f"{s} tokens",
        make=from_transformers(
            "LlamaForCausalLM",
            "LlamaConfig",
            num_hidden_layers=layers,
            hidden_size=d,
            intermediate_size=ffn,
            num_attention_heads=heads,
            num_key_value_heads=8,
            vocab_size=vocab,
            max_position_embeddings=s,
        ),
        inputs=tokens(s),
        macs=layers * (s * weights + 2 * s * s * d) + s * d * vocab,
        params=layers * (weights + 2 * d) + d + 2 * vocab * d,
    )


def mixtral() -> Model:
    s, layers, d, ffn, kv, experts, chosen, vocab = 4096, 32, 4096, 14336, 1024, 8, 2, 32000
    attention, expert = 2 * d * d + 2 * d * kv, 3 * d * ffn
    used = attention + chosen * expert + d * experts
    other = d + 2 * vocab * d
    return Model(
        name="Mixtral 8x7B",
        shape=f"{s} tokens",
        make=from_transformers("MixtralForCausalLM", "MixtralConfig"),
        inputs=tokens(s),
        macs=layers * (s * used + 2 * s * s * d) + s * d * vocab,
        params=layers * (attention + experts * expert + d * experts + 2 * d) + other,
        active=layers * (used + 2 * d) + other,
    )


def deepseek_v3() -> Model:
    s, layers, dense, d, heads, vocab = 4096, 61, 3, 7168, 128, 129280
    q_rank, kv_rank, rope, nope, v = 1536, 512, 64, 128, 128
    experts, chosen, ffn, expert = 256, 8, 18432, 3 * 7168 * 2048
    projections = (
        d * q_rank
        + q_rank * heads * (nope + rope)
        + d * (kv_rank + rope)
        + kv_rank * heads * (nope + v)
        + heads * v * d
    )
    attention = s * s * heads * (nope + rope + v)
    routed = layers - dense
    used = (
        layers * projections + dense * 3 * d * ffn + routed * ((chosen + 1) * expert + d * experts)
    )
    norms = layers * (2 * d + q_rank + kv_rank) + d
    other = norms + 2 * vocab * d
    return Model(
        name="DeepSeek-V3",
        shape=f"{s} tokens",
        make=from_transformers("DeepseekV3ForCausalLM", "DeepseekV3Config"),
        inputs=tokens(s),
        macs=s * used + layers * attention + s * d * vocab,
        params=used + routed * (experts - chosen) * expert + other,
        active=used + other,
    )


def mamba(*, fused: bool, with_formula: bool = True) -> Model:
    shape, s = MambaShape(), 1024
    scan = "in torch operators" if not fused else "fused"
    if fused:
        scan += ", with its formula" if with_formula else ", without a formula"
    scan_macs = shape.scan_macs(1, s) if not fused or with_formula else 0
    return Model(
        name=f"Mamba 130M, scan {scan}",
        shape=f"{s} tokens",
        make=lambda: Mamba(shape, fused=fused),
        inputs=tokens(s),
        macs=shape.product_macs(1, s) + scan_macs,
        params=shape.params,
        formulas={selective_scan: selective_scan_cost} if with_formula else {},
        complete=not fused or with_formula,
    )


DTYPE = torch.bfloat16
MODELS: dict[str, Callable[[], Model]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
    "llama-8b": lambda: llama("8B", 32, 4096, 14336, 32),
    "llama-70b": lambda: llama("70B", 80, 8192, 28672, 64),
    "llama-405b": lambda: llama("405B", 126, 16384, 53248, 128),
    "mixtral": mixtral,
    "deepseek-v3": deepseek_v3,
    "mamba": lambda: mamba(fused=False),
    "mamba-fused": lambda: mamba(fused=True),
    "mamba-fused-unknown": lambda: mamba(fused=True, with_formula=False),
}


def count(model: Model) -> Profile:
    """Return the profile of a forward pass on the meta device."""
    with META:
        built = model.make().eval().to(DTYPE)
    counter = FlopCounterMode(
        built, display=False, meta_value=1, custom_mapping=dict(model.formulas)
    )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        with counter:
            built(**model.inputs())
    return counter.profile


def main() -> None:
    print("| model | input | MACs | closed form | parameters | active per token |")
    print("|---|---|---:|---:|---:|---:|")
    for make in MODELS.values():
        model = make()
        profile = count(model)
        assert profile.total_params == model.params, (profile.total_params, model.params)
        same = "the same" if profile.total().macs == model.macs else f"{model.macs:,}"
        bound = "" if model.complete else "≥ "
        active = model.active or model.params
        print(
            f"| {model.name} | {model.shape} | {bound}{profile.total().macs:,} | {same} "
            f"| {model.params:,} | {active:,} |"
        )


if __name__ == "__main__":
    main()
