"""Whole programs with their truth in MACs: the zoo of the tests, transformers' models from their
configurations, and programs that ask something in particular of a counter."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from one_op.probe import Called, without_gradients
from zoo import CASES, Case
from zoo.case import tokens
from zoo.graph import GraphShape, GraphTransformer
from zoo.language import Bert
from zoo.special import CheckpointedMLP


@dataclass(frozen=True, kw_only=True)
class Program:
    """macs: forward, with backward where ``backward``. note: who is right where counters differ."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    macs: int
    backward: bool = False
    own_macs: Callable[[], Mapping[Any, Callable[..., int]]] = dict
    note: str = ""
    needs: str = ""

    @property
    def truth(self) -> str:
        return f"{self.macs:,}"

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        return self.make(), self.inputs()


# -- the zoo ---------------------------------------------------------------------------------


def _zoo(case: Case) -> list[Program]:
    def make() -> nn.Module:
        return case.make().eval()

    programs = [Program(name=case.name, make=make, inputs=case.inputs, macs=case.macs)]
    if case.gradient_macs is not None:
        whole = case.macs + case.gradient_macs
        name = f"{case.name}, forward and backward"
        programs.append(
            Program(name=name, make=make, inputs=case.inputs, macs=whole, backward=True)
        )
    return programs


# -- transformers ----------------------------------------------------------------------------


def preload() -> None:
    """Imports what takes long, before anything forks."""
    importlib.import_module("torch._dynamo")
    transformers = importlib.import_module("transformers")
    for name in ("Bert", "GPT2LMHead"):
        getattr(transformers, f"{name}Model")
    for name in ("Llama", "Mixtral"):
        getattr(transformers, f"{name}ForCausalLM")
    for name in ("T5ForConditionalGeneration", "SwinForImageClassification"):
        getattr(transformers, name)


def _transformers(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """From transformers' code, without its caches: tracers cannot return them."""

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
    """One layer: four projections, both products of the attention, two of the perceptron."""
    return 4 * d * d * s + 2 * s * s * d + 2 * d * ff * s


def swin_macs() -> int:
    """Swin-T at 224: windows of 7·7, patches merged between stages."""
    macs = 96 * 48 * 56**2
    for depth, c, side in ((2, 96, 56), (2, 192, 28), (6, 384, 14), (2, 768, 7)):
        n = side * side
        macs += depth * (12 * c * c * n + 2 * n * 49 * c)
        if c < 768:
            macs += n // 4 * 4 * c * 2 * c
    return macs + 768 * 1000


def t5_macs(s: int, t: int) -> int:
    """T5-small: the decoder looks at itself and at what is encoded."""
    d, ff, layers, vocab = 512, 2048, 6, 32128
    crossing = 2 * d * d * t + 2 * d * d * s + 2 * t * s * d
    return layers * (encoder(s, d, ff) + encoder(t, d, ff) + crossing) + t * d * vocab


def mixtral_macs(s: int) -> int:
    """Two layers; each token is seen by 2 of 8 experts of three products."""
    d, ff, narrow, experts, vocab = 192, 320, 96, 8, 1009
    attention = 2 * d * d * s + 2 * d * narrow * s + 2 * s * s * d
    return 2 * (attention + s * d * experts + s * 2 * 3 * d * ff) + s * d * vocab


def gpt2_generate_macs(prompt: int, new: int) -> int:
    """The prompt, then a token at a time over what is kept; logits of the last token only."""
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


def _from_transformers() -> list[Program]:
    programs = [
        Program(name=f"BERT-base ({a})", make=_bert(a), inputs=tokens(1, 128), macs=_BERT)
        for a in ("eager", "sdpa")
    ]
    programs += [
        Program(
            name=f"BERT-base ({a}), forward and backward",
            make=_bert(a),
            inputs=tokens(1, 128),
            macs=3 * _BERT - 2 * 768**2,  # nothing goes back to the pooler
            backward=True,
        )
        for a in ("eager", "sdpa")
    ]
    programs += [
        Program(
            name="GPT-2 small",
            make=_transformers("GPT2LMHeadModel", "GPT2Config", use_cache=False),
            inputs=tokens(1, 128),
            macs=_GPT2,
        ),
        Program(
            name="GPT-2 small, generating 8 after 16",
            make=lambda: _Generating(_transformers("GPT2LMHeadModel", "GPT2Config")()),
            inputs=tokens(1, 16),
            macs=gpt2_generate_macs(16, 8),
        ),
        Program(
            name="T5-small, 128 and 32",
            make=_t5,
            inputs=lambda: (*tokens(1, 128)(), *tokens(1, 32)()),
            macs=t5_macs(128, 32),
        ),
        Program(
            name="Llama, grouped queries",
            make=_transformers("LlamaForCausalLM", "LlamaConfig", **_LLAMA_CONFIG),
            inputs=tokens(1, 128),
            macs=_LLAMA,
        ),
        Program(
            name="Swin-T",
            make=_transformers("SwinForImageClassification", "SwinConfig", num_labels=1000),
            inputs=lambda: (torch.ones(1, 3, 224, 224),),
            macs=swin_macs(),
        ),
    ]
    for name, settings in {
        "default experts": {},
        "eager experts": {"experts_implementation": "eager"},
    }.items():
        make = _transformers("MixtralForCausalLM", "MixtralConfig", **_MIXTRAL_CONFIG, **settings)
        programs.append(
            Program(
                name=f"Mixtral, {name}",
                make=make,
                inputs=lambda: (torch.arange(24)[None],),
                macs=mixtral_macs(24),
            )
        )
    return programs


# -- in particular ---------------------------------------------------------------------------


def _small_bert() -> nn.Module:
    return Bert(1009, 96, 2, 4, 208).eval()


_SMALL = Bert.macs(3, 17, 96, 2, 208)


class _Inference(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        with torch.inference_mode():
            return self.inner(x)


def _compiled(*, warm: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = torch.compile(_small_bert(), backend="eager")
        if warm:
            model(*tokens(3, 17)())
        return model

    return make


def _on_meta() -> tuple[Any, ...]:
    with torch.device("meta"):
        return tokens(3, 17)()


def _einsum_attention(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    q, k, v = (torch.einsum("bsd,de->bse", x, w) for w in weights[:3])
    scores = torch.einsum("bse,bte->bst", q, k).softmax(-1)
    return torch.einsum("bse,de->bsd", torch.einsum("bst,bte->bse", scores, v), weights[3])


def _products(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = torch.mm(F.linear(x @ w, w), w)
    x = torch.matmul(torch.addmm(x, x, w), w)
    y = torch.baddbmm(torch.bmm(a, b), a, b).unsqueeze(0)
    y = F.scaled_dot_product_attention(y, y, y)
    return torch.mv(x, w[0]).sum() + y.sum()


def _spectral(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft2(F.linear(x, up), dim=(1, 2))
    return F.linear(torch.fft.irfft2(spectrum * 0.5, dim=(1, 2)), down)


def _convolutions(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x = F.conv2d(x, w, padding="same")
    x = F.conv2d(x, w, padding=[1, 1], stride=[2, 2])
    return F.conv1d(x.flatten(2), v, padding="valid")


def _encoder_stack() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return without_gradients(nn.TransformerEncoder(layer, 4))


def _own_operator() -> Any:
    if not hasattr(torch.ops.workloads, "matched"):

        @torch.library.custom_op("workloads::matched", mutates_args=())
        def matched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return torch.mm(a, b)

    return torch.ops.workloads.matched


def _with_own(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _own_operator()(torch.mm(x, w), v)
    return out


_GRAPH = GraphShape(features=9, width=16, heads=3, layers=4, nodes=37, edges=101, rows=11)


def _meta_small() -> nn.Module:
    with torch.device("meta"):
        return _small_bert()


def _tensors(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(torch.ones(s) for s in shapes)


PARTICULAR = [
    Program(
        name="BERT, inference_mode",
        make=lambda: _Inference(_small_bert()),
        inputs=tokens(3, 17),
        macs=_SMALL,
    ),
    Program(name="BERT, meta", make=_meta_small, inputs=_on_meta, macs=_SMALL),
    Program(
        name="BERT, torch.compile, cold",
        make=_compiled(warm=False),
        inputs=tokens(3, 17),
        macs=_SMALL,
    ),
    Program(
        name="BERT, torch.compile, warm",
        make=_compiled(warm=True),
        inputs=tokens(3, 17),
        macs=_SMALL,
    ),
    Program(
        name="TransformerEncoder, fast path",
        make=_encoder_stack,
        inputs=_tensors((8, 64, 256)),
        macs=8 * 4 * encoder(64, 256, 1024),
    ),
    Program(
        name="attention by einsum",
        make=lambda: Called(_einsum_attention),
        inputs=_tensors((2, 65, 256), *[(256, 256)] * 4),
        macs=2 * (4 * 256**2 * 65 + 2 * 65**2 * 256),
    ),
    Program(
        name="mm, @, linear, addmm, matmul, bmm, baddbmm, sdpa, mv",
        make=lambda: Called(_products),
        inputs=_tensors((128, 65), (65, 65), (4, 33, 33), (4, 33, 33)),
        macs=5 * 128 * 65**2 + 2 * 4 * 33**3 + 2 * 4 * 33**3 + 128 * 65,
    ),
    Program(
        name="spectral filter",
        make=lambda: Called(_spectral),
        inputs=_tensors((4, 64, 64, 3), (32, 3), (1, 32)),
        macs=4 * 64**2 * (3 * 32 + 32),
    ),
    Program(
        name="functional convolutions",
        make=lambda: Called(_convolutions),
        inputs=_tensors((2, 5, 24, 26), (5, 5, 3, 3), (7, 5, 4)),
        macs=2 * 5 * 5 * 9 * (24 * 26 + 12 * 13) + 2 * 7 * 5 * 4 * (12 * 13 - 3),
    ),
    Program(
        name="custom operator between products",
        make=lambda: Called(_with_own),
        inputs=_tensors((32, 128), (128, 255), (255, 64)),
        macs=32 * 128 * 255 + 32 * 255 * 64,
        own_macs=lambda: {_own_operator(): lambda a, b: a.numel() * b.shape[1]},
    ),
    Program(
        name="graph transformer",
        make=lambda: GraphTransformer(_GRAPH).eval(),
        inputs=lambda: GraphTransformer(_GRAPH).inputs(),
        macs=_GRAPH.module_macs()[""],
        needs="torch_geometric",
    ),
    Program(
        name="checkpointed perceptron, forward and backward",
        make=lambda: CheckpointedMLP(256, 1024, 4, reentrant=False),
        inputs=lambda: (torch.ones(64, 256, requires_grad=True),),
        macs=3 * CheckpointedMLP.macs(64, 256, 1024, 4),
        backward=True,
    ),
]

GROUPS = {
    "Models in plain torch": [program for case in CASES for program in _zoo(case)],
    "transformers": _from_transformers(),
    "In particular": [p for p in PARTICULAR if not p.needs or importlib.util.find_spec(p.needs)],
}
