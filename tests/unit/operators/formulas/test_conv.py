"""Convolutions: every dimension, stride, padding, dilation and grouping, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dispatch_flops.operators.formulas._arithmetic import cost_of
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def macs_of(fn: Callable[..., Any], *args: Any) -> int:
    return profile_of(fn, *args).total().macs


def test_convolution_and_transposed_convolution_match_exact_counts() -> None:
    transposed = profile_of(nn.ConvTranspose2d(4, 6, 4, 2, 1), torch.ones(2, 4, 8, 8)).total()
    assert (transposed.macs, transposed.flops) == (49_152, 101_376)
    depthwise = nn.Conv2d(4, 4, 3, groups=4)
    x = torch.ones(1, 4, 8, 8, requires_grad=True)
    profile = profile_of(lambda: depthwise(x).sum().backward())
    assert profile.total("forward").macs == 1_296
    assert profile.total().macs == 3_888


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_convolution_forward_counts_products_and_bias(dims: int, groups: int, bias: bool) -> None:
    """Stride 2, padding 1, dilation 2, kernel 3 on 9: floor((9 + 2 - 4 - 1) / 2) + 1 = 4."""
    conv = CONV[dims](4, 6, 3, 2, 1, 2, groups, bias)
    outputs = 5 * 6 * 4**dims
    cost = profile_of(conv, torch.ones(5, 4, *[9] * dims)).total()
    assert cost.macs == outputs * (4 // groups) * 3**dims
    assert cost.flops == 2 * cost.macs + bias * outputs


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_transposed_convolution_forward_counts_by_its_input(
    dims: int, groups: int, bias: bool
) -> None:
    """Stride 2, padding 1, output padding 1, kernel 3 on 5: (5 - 1)·2 - 2 + 2 + 1 + 1 = 10."""
    conv = TRANSPOSED[dims](4, 6, 3, 2, 1, 1, groups, bias)
    cost = profile_of(conv, torch.ones(7, 4, *[5] * dims)).total()
    assert cost.macs == 7 * 4 * 5**dims * (6 // groups) * 3**dims
    assert cost.flops == 2 * cost.macs + bias * 7 * 6 * 10**dims


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("to_input", "to_weight"), [(True, True), (True, False), (False, True)])
def test_convolution_backward_is_the_forward_per_gradient(
    transposed: bool, groups: int, to_input: bool, to_weight: bool
) -> None:
    conv = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 8, 3, 2, 1, groups=groups)
    conv.weight.requires_grad_(to_weight)
    assert conv.bias is not None
    conv.bias.requires_grad_(False)
    x = torch.ones(3, 4, 7, 7, requires_grad=to_input)
    profile = profile_of(lambda: conv(x).backward(torch.ones_like(conv(x.detach()))))
    once = macs_of(conv, x.detach())
    assert once > 0
    assert profile.total("backward").macs == (to_input + to_weight) * once


def test_convolution_bias_gradient_sums_over_batch_and_space() -> None:
    for transposed in (False, True):
        weight = torch.ones(4, 6, 3, 3) if transposed else torch.ones(6, 4, 3, 3)
        x, grad = torch.ones(5, 4, 7, 7), torch.ones(5, 6, 5, 5)
        grad = torch.ones(5, 6, 9, 9) if transposed else grad
        cost = cost_of(
            aten.convolution_backward,
            *(grad, x, weight, [6], [1, 1], [0, 0], [1, 1], transposed, [0, 0], 1),
            (False, False, True),
            out=(None, None, None),
        )
        assert (cost.macs, cost.flops) == (0, grad.numel() - 6)


def test_convolution_unbatched_or_empty_is_counted() -> None:
    conv = nn.Conv2d(4, 6, 3)
    assert macs_of(conv, torch.ones(4, 8, 8)) == 6 * 6 * 6 * 4 * 9
    assert macs_of(conv, torch.ones(0, 4, 8, 8)) == 0
    assert macs_of(conv, torch.ones(1, 4, 3, 3)) == 6 * 1 * 1 * 4 * 9


@pytest.mark.parametrize("padding", ["same", "valid", [1, 2], (0, 1)])
def test_convolution_with_every_form_of_padding_counts_its_output(padding: Any) -> None:
    """Kernel 5 x 3 on 9 x 8."""
    outputs = {"same": 9 * 8, "valid": 5 * 6, (1, 2): 7 * 10, (0, 1): 5 * 8}
    fn = lambda: F.conv2d(torch.ones(2, 4, 9, 8), torch.ones(6, 4, 5, 3), padding=padding)  # noqa: E731
    key = padding if isinstance(padding, str) else tuple(padding)
    with torch.no_grad():
        assert macs_of(fn) == 2 * 6 * outputs[key] * 4 * 15


def test_convolution_of_complex_numbers_counts_real_products() -> None:
    """Eager runs a complex convolution as 3 real ones; a complex operator counts as 4."""
    x, w = torch.ones(2, 3, 5, 5, dtype=torch.complex64), torch.ones(4, 3, 2, 2).to(torch.complex64)
    one = 2 * 4 * 16 * 3 * 4
    assert macs_of(F.conv2d, x, w) == 3 * one
    rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    y = torch.ones(2, 4, 4, 4, dtype=torch.complex64)
    bias = torch.ones(4, dtype=torch.complex64)
    cost = cost_of(aten.convolution, x, w, bias, *rest, out=y)
    assert (cost.macs, cost.flops) == (4 * one, 8 * one + 2 * 2 * 4 * 16)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_convolution_in_every_grad_mode_and_on_meta_costs_the_same(
    mode: Callable[[], Any], device: str
) -> None:
    conv = nn.Conv2d(3, 5, 3, padding=1, device=device)
    with mode():
        cost = profile_of(conv, torch.ones(2, 3, 7, 7, device=device)).total()
    assert (cost.macs, cost.flops) == (2 * 5 * 49 * 27, 2 * 2 * 5 * 49 * 27 + 2 * 5 * 49)


# -- kernels of backends, called with shapes only ------------------------------------------

X, W, Z = torch.ones(2, 4, 7, 7), torch.ones(6, 2, 3, 3), torch.ones(2, 6, 5, 5)
BIAS = torch.ones(6)
OUTPUTS = 2 * 6 * 25
MACS = OUTPUTS * 2 * 9
GEOMETRY = ([0, 0], [1, 1], [1, 1], 2)


@pytest.mark.parametrize(
    ("op", "args", "extra"),
    [
        ("cudnn_convolution", (*GEOMETRY, False, False, False), 0),
        ("mkldnn_convolution", (BIAS, *GEOMETRY), 1),
        ("mkldnn_convolution", (None, *GEOMETRY), 0),
        ("miopen_convolution", (BIAS, *GEOMETRY, False, False), 1),
        ("miopen_depthwise_convolution", (None, *GEOMETRY, False, False), 0),
        ("cudnn_convolution_relu", (BIAS, *GEOMETRY), 2),
        ("cudnn_convolution_add_relu", (Z, 1.0, BIAS, *GEOMETRY), 3),
        ("cudnn_convolution_add_relu", (Z, 0.5, None, *GEOMETRY), 3),
        ("convolution_overrideable", (BIAS, *GEOMETRY[:3], False, [0, 0], 2), 1),
        ("_slow_conv2d_forward", ([3, 3], BIAS, [1, 1], [0, 0]), 1),
        ("_conv_depthwise2d", ([3, 3], None, [1, 1], [0, 0], [1, 1]), 0),
    ],
)
def test_backend_convolution_costs_the_same(op: str, args: tuple[Any, ...], extra: int) -> None:
    """``extra`` operations per output element: bias, the other summand, its factor, relu."""
    cost = cost_of(getattr(aten, op), X, W, *args, out=Z)
    assert (cost.macs, cost.flops) == (MACS, 2 * MACS + extra * OUTPUTS)


@pytest.mark.parametrize("op", ["cudnn_convolution_transpose", "miopen_convolution_transpose"])
def test_backend_transposed_convolution_costs_the_same(op: str) -> None:
    weight = torch.ones(4, 3, 3, 3)
    bias = () if op.startswith("cudnn") else (None,)
    cost = cost_of(
        getattr(aten, op),
        X,
        weight,
        *bias,
        [0, 0],
        [0, 0],
        [1, 1],
        [1, 1],
        2,
        out=torch.ones(2, 6, 9, 9),
    )
    assert cost.macs == X.numel() * 3 * 9


def test_onednn_convolution_counts_fused_operations() -> None:
    ops = torch.ops.mkldnn
    unary = profile_of(
        lambda: ops._convolution_pointwise(X, W, BIAS, *GEOMETRY, "relu", [], "")
    ).total()
    assert (unary.macs, unary.flops) == (MACS, 2 * MACS + 2 * OUTPUTS)
    binary = profile_of(
        lambda: ops._convolution_pointwise(X, Z, W, None, *GEOMETRY, "add", 1.0, "relu", [], None)
    ).total()
    assert (binary.macs, binary.flops) == (MACS, 2 * MACS + 2 * OUTPUTS)
    in_place = profile_of(
        lambda: ops._convolution_pointwise_(
            Z.clone(), X, W, BIAS, *GEOMETRY, "add", 1.0, None, [], None
        )
    ).total()
    assert (in_place.macs, in_place.flops) == (MACS, 2 * MACS + 2 * OUTPUTS)


def test_conv_tbc_forward_and_backward_match_closed_form() -> None:
    x, weight, bias = torch.ones(7, 2, 3), torch.ones(4, 3, 5), torch.ones(5)
    outputs = 6 * 2 * 5
    once = outputs * 4 * 3
    forward = profile_of(lambda: torch.conv_tbc(x, weight, bias, 1)).total()
    assert (forward.macs, forward.flops) == (once, 2 * once + outputs)
    grad = torch.ones(6, 2, 5)
    backward = cost_of(aten.conv_tbc_backward, grad, x, weight, bias, 1, out=None)
    assert (backward.macs, backward.flops) == (2 * once, 4 * once + outputs - 5)


@pytest.mark.parametrize("overload", ["output_mask", "output_mask_out", "grad_input"])
def test_slow_backward_in_every_form_costs_the_same(overload: str) -> None:
    """The overload that writes into three given tensors has no mask and computes all of them."""
    x, weight, grad = (
        torch.ones(s, device="meta") for s in ((2, 3, 9, 9), (5, 3, 3, 3), (2, 5, 7, 7))
    )
    mask = [] if overload == "grad_input" else [[True, True, True]]
    op = getattr(aten._slow_conv2d_backward, overload)
    cost = cost_of(op, grad, x, weight, [3, 3], [1, 1], [0, 0], *mask, out=None)
    assert cost.macs == 2 * (2 * 5 * 49) * (3 * 9)
    assert cost.flops == 2 * cost.macs + 2 * 5 * 49 - 5
