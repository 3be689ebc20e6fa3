"""Exact costs of small calls that other FLOP counters are known to get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.profiling import profile_of


def _forward(call: Callable[[], Any]) -> tuple[int, int]:
    cost = profile_of(call).total("forward")
    return cost.macs, cost.flops


def test_attention_on_cpu_and_meta_counts_the_same() -> None:
    q = torch.ones(1, 12, 64, 64)
    macs = 2 * 12 * 64 * 64 * 64
    assert macs == 6_291_456
    for device in ("cpu", "meta"):
        x = q.to(device)
        found = _forward(lambda x=x: F.scaled_dot_product_attention(x, x, x))
        assert found[0] == macs


def test_transposed_convolution_with_bias_costs_its_input_times_its_kernel() -> None:
    layer, x = nn.ConvTranspose2d(4, 6, 4, stride=2, padding=1), torch.ones(2, 4, 8, 8)
    macs, bias = 2 * 4 * 6 * (4 * 4) * (8 * 8), 2 * 6 * (16 * 16)
    assert (macs, 2 * macs + bias) == (49_152, 101_376)
    assert _forward(lambda: layer(x)) == (macs, 2 * macs + bias)


def test_depthwise_convolution_backward_costs_twice_its_forward() -> None:
    layer = nn.Conv2d(4, 4, 3, groups=4)
    x = torch.ones(1, 4, 8, 8, requires_grad=True)
    profile = profile_of(lambda: layer(x).sum().backward())
    forward = 4 * (3 * 3) * (6 * 6)
    assert profile.total("forward").macs == forward == 1_296
    assert profile.model_total().macs == 3 * forward == 3_888


def test_product_with_a_vector_costs_one_mac_per_element() -> None:
    a, x = torch.ones(4, 8), torch.ones(8)
    assert _forward(lambda: x @ x)[0] == 8
    assert _forward(lambda: a @ x)[0] == 4 * 8


def test_linear_with_bias_adds_one_flop_per_output() -> None:
    x, w, bias = torch.ones(4, 8), torch.ones(16, 8), torch.ones(16)
    macs = 4 * 8 * 16
    assert (macs, 2 * macs + 4 * 16) == (512, 1_088)
    assert _forward(lambda: F.linear(x, w, bias)) == (macs, 2 * macs + 4 * 16)


@pytest.mark.parametrize(
    "a,b,flops",
    [
        ((2, 3, 4), (4,), 2 * 3 * 4),
        ((8,), (2, 8), 2 * 8),
        ((4, 1, 7), (1, 5, 7), 4 * 5 * 7),
    ],
)
def test_elementwise_product_when_broadcast_costs_one_flop_per_output(
    a: tuple[int, ...], b: tuple[int, ...], flops: int
) -> None:
    assert _forward(lambda: torch.ones(a, device="meta") * torch.ones(b, device="meta")) == (
        0,
        flops,
    )


def test_lstm_fused_and_unfused_counts_the_same() -> None:
    macs = 5 * 3 * (4 * 20) * (10 + 20)
    assert macs == 36_000
    for dtype in (torch.float32, torch.float64):
        layer, x = nn.LSTM(10, 20).to(dtype), torch.ones(5, 3, 10, dtype=dtype)
        assert _forward(lambda layer=layer, x=x: layer(x))[0] == macs


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_multi_head_attention_on_every_path_counts_the_same(
    train: bool, weights: bool, grad: bool
) -> None:
    layer = nn.MultiheadAttention(100, 1, batch_first=True).train(train)
    x = torch.ones(1, 1000, 100)
    macs = 4 * 1000 * 100 * 100 + 2 * 1000 * 1000 * 100
    assert macs == 240_000_000
    with torch.set_grad_enabled(grad):
        assert _forward(lambda: layer(x, x, x, need_weights=weights))[0] == macs


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_encoder_layer_on_every_path_counts_the_same(train: bool, grad: bool) -> None:
    layer = nn.TransformerEncoderLayer(512, 4, 512, batch_first=True).train(train)
    x = torch.ones(1, 64, 512)
    macs = 64 * (4 * 512 * 512 + 2 * 512 * 512) + 2 * 64 * 64 * 512
    assert macs == 104_857_600
    with torch.set_grad_enabled(grad):
        assert _forward(lambda: layer(x))[0] == macs


def test_layer_called_three_times_has_its_parameters_once() -> None:
    layer = nn.Linear(100, 100)
    model = nn.Sequential(layer, layer, layer)
    profile = profile_of(model, torch.ones(1, 100), model=model)
    assert profile.total("forward").macs == 3 * 100 * 100
    assert profile.total_params == 100 * 100 + 100


def test_frozen_linear_backward_costs_only_the_input_gradient() -> None:
    layer = nn.Linear(5, 7).requires_grad_(False)
    x = torch.ones(3, 5, requires_grad=True)
    profile = profile_of(lambda: layer(x).sum().backward())
    assert profile.total("backward").macs == 3 * 5 * 7


def test_complex_product_costs_four_real_ones() -> None:
    a = torch.ones(2, 3, dtype=torch.complex64)
    b = torch.ones(3, 5, dtype=torch.complex64)
    assert _forward(lambda: a @ b) == (4 * 2 * 3 * 5, 8 * 2 * 3 * 5)
