"""Programs that each test one ability of a counter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from from_transformers import encoder
from program import SDPA, Program
from torch import nn

from tests.models.case import tokens
from tests.models.graph import GraphShape, GraphTransformer
from tests.models.language import Bert
from tests.models.special import CheckpointedMLP
from tests.probes.probe import Called, without_gradients


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


PROGRAMS = [
    Program(
        name="BERT, inference_mode",
        make=lambda: _Inference(_small_bert()),
        inputs=tokens(3, 17),
        macs=_SMALL,
        note=SDPA + "; under inference_mode linear and matmul are not decomposed, and ptflops "
        "has no formula for them",
    ),
    Program(
        name="BERT, meta",
        make=_meta_small,
        inputs=_on_meta,
        macs=_SMALL,
        note=SDPA
        + "; DeepSpeed counts F.linear, and again the torch.mm that meta decomposes it to",
    ),
    Program(
        name="BERT, torch.compile, cold",
        make=_compiled(warm=False),
        inputs=tokens(3, 17),
        macs=_SMALL,
        note=SDPA,
    ),
    Program(
        name="BERT, torch.compile, warm",
        make=_compiled(warm=True),
        inputs=tokens(3, 17),
        macs=_SMALL,
        note=SDPA,
    ),
    Program(
        name="TransformerEncoder, fast path",
        make=_encoder_stack,
        inputs=_tensors((8, 64, 256)),
        macs=8 * 4 * encoder(64, 256, 1024),
        note="hooks switch the layer's fast path off; self_attn still runs fused: 0.36 is lost. "
        "For torch and ptflops the whole layer is one operator without a formula",
    ),
    Program(
        name="attention by einsum",
        make=lambda: Called(_einsum_attention),
        inputs=_tensors((2, 65, 256), *[(256, 256)] * 4),
        macs=2 * (4 * 256**2 * 65 + 2 * 65**2 * 256),
        note="fvcore parses the four digits that numpy prints of the contraction",
    ),
    Program(
        name="mm, @, linear, addmm, matmul, bmm, baddbmm, sdpa, mv",
        make=lambda: Called(_products),
        inputs=_tensors((128, 65), (65, 65), (4, 33, 33), (4, 33, 33)),
        macs=5 * 128 * 65**2 + 2 * 4 * 33**3 + 2 * 4 * 33**3 + 128 * 65,
        note="no peer sees mv, only DeepSpeed sdpa; fvcore and ptflops miss baddbmm, calflops mm, "
        "bmm and @; ptflops adds addmm's sum",
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
        note="fvcore does not know the operator that padding='same' becomes",
    ),
    Program(
        name="custom operator between products",
        make=lambda: Called(_with_own),
        inputs=_tensors((32, 128), (128, 255), (255, 64)),
        macs=32 * 128 * 255 + 32 * 255 * 64,
        note="torch and dispatch_flops get its formula; DeepSpeed sees the torch.mm inside, the "
        "others do not",
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
        note="recomputation is not model work: dispatch_flops counts it as a separate phase, "
        "torch adds it",
        backward=True,
    ),
]
