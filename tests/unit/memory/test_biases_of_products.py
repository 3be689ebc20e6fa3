"""Peaks of products to which torch adds a bias in place, against its allocator's events.

``linear`` does so, in place of one operator for both, where its input has gaps or another order in
memory. Under a dispatch mode it adds out of place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode
from tests.helpers.allocator import counted_peak_bytes, peak_bytes

BATCH, STEPS, INPUTS, OUTPUTS = 7, 13, 23, 71
Function = Callable[[torch.Tensor, nn.Linear], torch.Tensor]


def apart(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return x @ layer.weight.t() + layer.bias


def apart_in_functions(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    return torch.add(torch.matmul(x, layer.weight.t()), layer.bias)


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x.matmul(weight.t()) + bias


def recomputed(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    y = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(y, torch.Tensor)
    return y.sin()


def recomputed_to_few(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    """The recomputed product is larger than all that outlives the forward."""

    def few(x: torch.Tensor) -> torch.Tensor:
        return layer(x).sum(-1)

    return checkpoint(few, x, use_reentrant=False, preserve_rng_state=False)  # type: ignore[return-value]


class InBackward(torch.autograd.Function):
    """A product of scalars, whose backward pass runs a product with a bias."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        ctx.x, ctx.layer = x, layer
        return one * x.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * linear(ctx.x, ctx.layer.weight, ctx.layer.bias).sum(), None, None


def in_backward(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    one: torch.Tensor = InBackward.apply(layer.bias[0], x, layer)
    return one


def with_tangent_of_bias(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    bias = layer.bias.detach()
    return torch.func.jvp(lambda b: linear(x, layer.weight, b), (bias,), (bias,))[0]


FUNCTIONS: dict[str, Function] = {
    "layer": lambda x, layer: layer(x),
    "function": lambda x, layer: linear(x, layer.weight, layer.bias),
    "product and sum of the program": apart,
    "product and sum in functions": apart_in_functions,
    "product and sum in TorchScript": lambda x, layer: scripted(x, layer.weight, layer.bias),
    "recomputed": recomputed,
    "recomputed to few": recomputed_to_few,
    "in a backward pass": in_backward,
    "under vmap": lambda x, layer: torch.func.vmap(layer)(x),
    "with a tangent of the bias": with_tangent_of_bias,
}


def difference(run: Callable[[], object], module: nn.Module, x: torch.Tensor) -> int:
    """Return by how much the peak of ``run`` differs from the allocator's."""
    run()
    module.zero_grad()
    truth = peak_bytes(run, [*module.parameters(), x])
    module.zero_grad()
    return counted_peak_bytes(run, module) - truth


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_product_with_a_bias_peaks_at_the_allocators_bytes(name: str, has_gradients: bool) -> None:
    layer = nn.Linear(INPUTS, OUTPUTS)
    x = torch.randn(BATCH, STEPS, 5, INPUTS).transpose(1, 2)

    def run() -> None:
        with torch.set_grad_enabled(has_gradients):
            y = FUNCTIONS[name](x, layer)
        if has_gradients:
            y.sum().backward()

    assert abs(difference(run, layer, x)) <= 16  # scalars of the profiler's run


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layer_without_gradients_peaks_at_the_allocators_bytes(
    kind: type[nn.RNNBase],
) -> None:
    layer = kind(INPUTS, INPUTS, batch_first=True)
    x = torch.randn(BATCH, STEPS, INPUTS)

    def run() -> None:
        with torch.no_grad():
            layer(x)

    assert abs(difference(run, layer, x)) <= 16


def test_product_on_the_meta_device_peaks_as_on_the_cpu() -> None:
    peaks = []
    for device in ("cpu", "meta"):
        layer = nn.Linear(INPUTS, OUTPUTS, device=device)
        x = torch.ones(BATCH, STEPS, INPUTS, device=device).transpose(0, 1)
        with FlopCounterMode(layer, display=False, memory=True) as fc:
            layer(x)
        assert fc.profile.memory is not None
        peaks.append(fc.profile.memory.peak_bytes)
    assert peaks[0] == peaks[1]
