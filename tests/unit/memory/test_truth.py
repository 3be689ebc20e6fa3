"""Peaks of training steps against the events of torch's CPU allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.profile import MemoryProfile
from tests.helpers.allocator import peak_bytes
from tests.models.vision import ResNet

pytestmark = pytest.mark.slow

Loss = Callable[[], torch.Tensor]
Workload = Callable[[], tuple[nn.Module, torch.Tensor, Loss]]


def mlp() -> tuple[nn.Module, torch.Tensor, Loss]:
    model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Dropout(0.1), nn.Linear(300, 70))
    x = torch.randn(210, 64)
    return model, x, lambda: model(x).square().mean()


def encoder() -> tuple[nn.Module, torch.Tensor, Loss]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    x = torch.randn(3, 70, 64)
    return model, x, lambda: model(x).square().mean()


def checkpointed(*, use_reentrant: bool) -> tuple[nn.Module, torch.Tensor, Loss]:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(70, 70), nn.GELU(), nn.Linear(70, 70)) for _ in range(4)
    )
    x = torch.randn(900, 70, requires_grad=True)

    def loss() -> torch.Tensor:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=use_reentrant, preserve_rng_state=False)
        return y.square().mean()

    return layers, x, loss


def attention(backend: SDPBackend) -> tuple[nn.Module, torch.Tensor, Loss]:
    model, x = nn.Linear(48, 48), torch.randn(2, 4, 250, 48)

    def loss() -> torch.Tensor:
        with sdpa_kernel(backend):
            q = model(x)
            return functional.scaled_dot_product_attention(q, q, q, is_causal=True).square().mean()

    return model, x, loss


def gru() -> tuple[nn.Module, torch.Tensor, Loss]:
    model, x = nn.GRU(30, 70, 2), torch.randn(20, 5, 30)
    return model, x, lambda: model(x)[0].square().mean()


def resnet() -> tuple[nn.Module, torch.Tensor, Loss]:
    model, x = ResNet((1, 1, 1, 1), 1), torch.randn(2, 3, 32, 32)
    return model, x, lambda: model(x).square().mean()


def lstm() -> tuple[nn.Module, torch.Tensor, Loss]:
    model, x = nn.LSTM(64, 96), torch.randn(32, 8, 64)
    return model, x, lambda: model(x)[0].square().mean()


WORKLOADS: dict[str, Workload] = {
    "mlp": mlp,
    "encoder": encoder,
    "checkpointed": lambda: checkpointed(use_reentrant=False),
    "checkpointed, reentrant": lambda: checkpointed(use_reentrant=True),
    "attention, math": lambda: attention(SDPBackend.MATH),
    "attention, flash": lambda: attention(SDPBackend.FLASH_ATTENTION),
    "gru": gru,
    "resnet": resnet,
    "lstm": lstm,
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), foreach=False),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), foreach=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "SGD, foreach": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=True),
}


def truth_and_ours(
    workload: Workload, make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> tuple[int, MemoryProfile]:
    """Return the allocator's peak of a steady training step, and the profile of the next one."""
    model, x, loss = workload()
    optimizer = make_optimizer(model)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    step()
    gc.collect()
    state: Any = list(optimizer.state.values())
    truth = peak_bytes(step, [*model.parameters(), *model.buffers(), x, *tensors_in(state)])
    with FlopCounterMode(model, display=False, memory=True) as counter:
        step()
    memory = counter.profile.memory
    assert memory is not None
    return truth, memory


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_peak_equals_the_allocators_within_a_thousandth(workload: str, optimizer: str) -> None:
    truth, memory = truth_and_ours(WORKLOADS[workload], OPTIMIZERS[optimizer])
    assert abs(memory.peak_bytes - truth) <= truth / 1000
    assert not memory.is_lower_bound
    assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("queries", [100, 250, 800])
def test_flash_workspaces_are_those_of_the_allocator(dtype: torch.dtype, queries: int) -> None:
    q, k = (torch.randn(2, 3, length, 40, dtype=dtype) for length in (queries, 600))
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, lse = forward(q, k, k)
    for run in (
        lambda: forward(q, k, k),
        lambda: backward(out, q, k, k, out, lse, 0.0, False),
        lambda: backward(q, q, k, k, out, lse, 0.0, False),
    ):
        truth = peak_bytes(run, [q, k, out, lse])
        with FlopCounterMode(display=False, memory=True) as counter:
            for tensor in (q, k, out, lse):
                tensor.detach()  # is met, and counts as there before
            run()
        assert counter.profile.memory is not None
        assert counter.profile.memory.peak_bytes == truth
        assert counter.profile.memory.by_role()["workspace"] > 0
