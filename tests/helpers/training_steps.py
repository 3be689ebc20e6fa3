"""Small models with a loss, of all kinds of kernels, and steady training steps of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dispatch_flops.operators.tensors import tensors_in
from tests.models.vision import ResNet

Loss = Callable[[], Tensor]
Made = tuple[nn.Module, Tensor, Loss]  # the model and its input
Workload = Callable[[], Made]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def step_of(
    model: nn.Module, x: Tensor, loss: Loss, make_optimizer: MakeOptimizer
) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a training step that ran once, and the tensors that are there before the next."""
    optimizer = make_optimizer(model)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    step()
    gc.collect()
    state: Any = tensors_in(list(optimizer.state.values()))
    return step, [*model.parameters(), *model.buffers(), x, *state]


def mlp() -> Made:
    model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Dropout(0.1), nn.Linear(300, 70))
    x = torch.randn(210, 64)
    return model, x, lambda: model(x).square().mean()


def encoder() -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.randn(3, 70, 64)
    return model, x, lambda: model(x).square().mean()


def checkpointed(*, use_reentrant: bool) -> Made:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(70, 70), nn.GELU(), nn.Linear(70, 70)) for _ in range(4)
    )
    x = torch.randn(900, 70, requires_grad=True)

    def loss() -> Tensor:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=use_reentrant, preserve_rng_state=False)
        return y.square().mean()

    return layers, x, loss


def attention(
    backend: SDPBackend,
    size: int = 48,
    rows: tuple[int, ...] = (2, 4, 250),
    dtype: torch.dtype = torch.float32,
) -> Made:
    model, x = nn.Linear(size, size, dtype=dtype), torch.randn(*rows, size, dtype=dtype)

    def loss() -> Tensor:
        with sdpa_kernel(backend):
            q = model(x)
            return functional.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()

    return model, x, loss


def gru() -> Made:
    model, x = nn.GRU(30, 70, 2), torch.randn(20, 5, 30)
    return model, x, lambda: model(x)[0].square().mean()


def resnet() -> Made:
    model, x = ResNet((1, 1, 1, 1), 1), torch.randn(2, 3, 32, 32)
    return model, x, lambda: model(x).square().mean()


def lstm() -> Made:
    model, x = nn.LSTM(64, 96), torch.randn(32, 8, 64)
    return model, x, lambda: model(x)[0].square().mean()


def convolutions() -> Made:
    layers = (nn.Conv2d(3, 37, 7, 2), nn.ReLU(), nn.Conv2d(37, 41, 3), nn.ReLU())
    model, x = nn.Sequential(*layers), torch.randn(5, 3, 61, 67)
    return model, x, lambda: model(x).square().mean()


def norms() -> Made:
    """Also a table, whose gradients are sorted."""
    layers = (nn.Embedding(997, 96), nn.LayerNorm(96), nn.RMSNorm(96), nn.GroupNorm(3, 51))
    model, ids = nn.Sequential(*layers), torch.randint(997, (7, 51))
    return model, ids, lambda: model(ids).logsumexp(-1).mean()


_ANYWHERE: dict[str, Workload] = {
    "mlp": mlp,
    "encoder": encoder,
    "checkpointed": partial(checkpointed, use_reentrant=False),
    "checkpointed, reentrant": partial(checkpointed, use_reentrant=True),
    "attention, math": partial(attention, SDPBackend.MATH),
    "gru": gru,
    "resnet": resnet,
    "lstm": lstm,
}
ON_CPU: dict[str, Workload] = {
    **_ANYWHERE,
    "attention, flash": partial(attention, SDPBackend.FLASH_ATTENTION),
}
_on_cuda = partial(attention, size=64, rows=(2, 3, 777))
ON_CUDA: dict[str, Workload] = {
    **_ANYWHERE,
    "flash": partial(_on_cuda, SDPBackend.FLASH_ATTENTION, dtype=torch.bfloat16),
    "efficient": partial(_on_cuda, SDPBackend.EFFICIENT_ATTENTION),
    "cudnn": partial(_on_cuda, SDPBackend.CUDNN_ATTENTION, dtype=torch.bfloat16),
    "convolutions": convolutions,
    "norms": norms,
}
