"""Quantising, dequantising, fake quantisation, and operators that do both around others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.profiling import macs_and_flops

pytestmark = pytest.mark.filterwarnings("ignore")

ops = torch.ops.quantized
T, K = 7, 5


def small(*shape: int, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.rand(shape), 0.1, 0, dtype)


def test_quantise_and_dequantise_per_element_cost_five_and_two() -> None:
    x = torch.rand(T, K)
    assert macs_and_flops(lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)) == (
        0,
        5 * T * K,
    )
    scales, zeros = torch.ones(K), torch.zeros(K)
    assert macs_and_flops(lambda: torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8)) == (
        0,
        5 * T * K,
    )
    assert macs_and_flops(small(T, K).dequantize) == (0, 2 * T * K)


def test_fake_quantise_is_nine_forward_and_one_backward() -> None:
    x = torch.rand(T, K, requires_grad=True)
    fake = torch.fake_quantize_per_tensor_affine
    assert macs_and_flops(lambda: fake(x, 0.1, 0, 0, 255)) == (0, 9 * T * K)
    out = fake(x, 0.1, 0, 0, 255)
    assert macs_and_flops(out.backward, torch.ones(T, K)) == (0, T * K)  # gradient times mask


def test_quantisation_aware_training_has_no_uncounted_operators() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 9, 2))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    prepared = torch.ao.quantization.prepare_qat(model.train())
    macs_and_flops(lambda: prepared(torch.rand(1, 2, 5, 5)).sum().backward())


def test_observer_with_fake_quantisation_counts_both() -> None:
    """Minimum and maximum of all; two moving averages (3 each) and 10; 9 per element."""
    x, one = torch.rand(T, K), torch.ones(1, dtype=torch.long)
    state = [torch.zeros(()), torch.ones(()), torch.ones(1), torch.zeros(1, dtype=torch.int32)]
    counted = macs_and_flops(
        torch._fused_moving_avg_obs_fq_helper, x, one, one, *state, 0.01, 0, 255, -1
    )
    assert counted == (0, 2 * (T * K - 1) + 6 + 10 + 9 * T * K)


def test_learnable_fake_quantisation_matches_closed_form() -> None:
    x, scale, zero = torch.rand(T, K), torch.ones(1), torch.zeros(1)
    op = torch._fake_quantize_learnable_per_tensor_affine
    assert macs_and_flops(op, x, scale, zero, 0, 255) == (0, 7 * T * K)
    backward = torch.ops.aten._fake_quantize_learnable_per_tensor_affine_backward
    counted = macs_and_flops(backward, x, x, scale, zero, 0, 255)
    assert counted == (0, (7 + 2 + 1 + 4 + 2) * T * K + 2 * (T * K - 1))


def test_quantised_pointwise_includes_dequantising_and_quantising() -> None:
    a, b, n = small(T, K), small(T, K), T * K
    assert macs_and_flops(ops.add, a, b, 0.1, 0) == (0, (2 + 2 + 1 + 5) * n)
    assert macs_and_flops(ops.add_relu, a, b, 0.1, 0) == (0, (2 + 2 + 2 + 5) * n)
    assert macs_and_flops(ops.mul, a, b, 0.1, 0) == (0, (2 + 2 + 1 + 5) * n)
    assert macs_and_flops(ops.sigmoid, a, 0.1, 0) == (0, (2 + 1 + 5) * n)
    assert macs_and_flops(ops.relu6, a) == (0, 0)


def test_quantised_batch_norm_is_two_per_element() -> None:
    x, c = small(2, 3, 5, 7), torch.ones(3)
    counted = macs_and_flops(ops.batch_norm2d, x, c, c, c, c, 1e-5, 0.1, 0)
    assert counted == (0, (2 + 2 + 5) * 2 * 3 * 5 * 7 + 5 * 3)


def test_quantised_layer_norm_costs_as_much_as_on_reals() -> None:
    x, w = small(T, K), torch.ones(K)
    real = macs_and_flops(lambda: torch.nn.functional.layer_norm(torch.rand(T, K), (K,), w, w))[1]
    assert macs_and_flops(ops.layer_norm, x, [K], w, w, 1e-5, 0.1, 0) == (0, real + (2 + 5) * T * K)


def test_quantised_operators_cost_as_much_as_on_reals() -> None:
    x, w, n = small(2, 6, 5), torch.ones(6), 2 * 6 * 5
    real = torch.rand(2, 6, 5)
    by_groups = macs_and_flops(torch.nn.functional.group_norm, real, 3, w, w)[1]
    by_channels = macs_and_flops(torch.nn.functional.group_norm, real, 6, w, w)[1]
    softmax = macs_and_flops(torch.softmax, real, 1)[1]
    surround = (2 + 5) * n
    assert by_groups != by_channels
    assert macs_and_flops(ops.group_norm, x, 3, w, w, 1e-5, 0.1, 0) == (0, by_groups + surround)
    assert macs_and_flops(ops.instance_norm, x, w, w, 1e-5, 0.1, 0) == (0, by_channels + surround)
    assert macs_and_flops(ops.softmax, x, 1, 0.1, 0) == (0, softmax + surround)
    slope = small(6)
    assert macs_and_flops(ops.prelu, x, slope, 0.1, 0) == (0, 2 * n + surround + 2 * 6)


def test_dynamic_quantising_finds_the_range_first() -> None:
    """Minimum and maximum of all, 10 for scale and zero point, 5 per element."""
    counted = macs_and_flops(
        torch.quantize_per_tensor_dynamic, torch.rand(T, K), torch.quint8, False
    )
    assert counted == (0, 2 * (T * K - 1) + 10 + 5 * T * K)


def test_exported_quantised_program_is_counted() -> None:
    import torch.ao.quantization.fx._decomposed  # defines the library, late

    decomposed = torch.ops.quantized_decomposed
    x = torch.rand(T, K)
    quantised = decomposed.quantize_per_tensor(x, 0.1, 0, 0, 255, torch.uint8)
    assert macs_and_flops(decomposed.quantize_per_tensor, x, 0.1, 0, 0, 255, torch.uint8) == (
        0,
        5 * T * K,
    )
    assert macs_and_flops(
        decomposed.dequantize_per_tensor, quantised, 0.1, 0, 0, 255, torch.uint8
    ) == (
        0,
        2 * T * K,
    )
    assert macs_and_flops(decomposed.choose_qparams, x, 0, 255, 1e-5, torch.uint8) == (
        0,
        2 * (T * K - 1) + 10,
    )
