"""Quantised layers: integer products are MACs, rescaling is arithmetic on reals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import Profile
from dispatch_flops.operators.formulas._arithmetic import cost_of
from tests.helpers.profiling import profile_of

pytestmark = pytest.mark.filterwarnings("ignore")

ops = torch.ops.quantized
T, K, OUT = 7, 5, 3


def known(fn: Callable[..., Any], *args: Any) -> Profile:
    profile = profile_of(fn, *args)
    assert profile.uncounted_ops() == {}
    return profile


def cost(fn: Callable[..., Any], *args: Any) -> tuple[int, int]:
    total = known(fn, *args).total()
    return total.macs, total.flops


def small(*shape: int, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.rand(shape), 0.1, 0, dtype)


def test_quantise_and_dequantise_per_element_cost_five_and_two() -> None:
    x = torch.rand(T, K)
    assert cost(lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)) == (0, 5 * T * K)
    scales, zeros = torch.ones(K), torch.zeros(K)
    assert cost(lambda: torch.quantize_per_channel(x, scales, zeros, 1, torch.qint8)) == (
        0,
        5 * T * K,
    )
    assert cost(small(T, K).dequantize) == (0, 2 * T * K)


@pytest.mark.parametrize("bias", [True, False])
def test_quantised_linear_counts_products_and_rescaling(bias: bool) -> None:
    packed = ops.linear_prepack(small(OUT, K, dtype=torch.qint8), torch.ones(OUT) if bias else None)
    macs = T * OUT * K
    assert cost(ops.linear, small(T, K), packed, 0.1, 0) == (macs, 2 * macs + 5 * T * OUT)
    assert cost(ops.linear_relu, small(T, K), packed, 0.1, 0) == (macs, 2 * macs + 5 * T * OUT)
    quantise = 2 * (T * K - 1) + 10 + 5 * T * K
    rescale = T * OUT * (2 if bias else 1)
    assert cost(ops.linear_dynamic, torch.rand(T, K), packed) == (
        macs,
        2 * macs + quantise + rescale,
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_quantised_convolution_counts_products_and_rescaling(groups: int) -> None:
    weight = small(4, 6 // groups, 3, 2, dtype=torch.qint8)
    packed = ops.conv2d_prepack(weight, torch.ones(4), [1, 1], [0, 0], [1, 1], groups)
    out = 2 * 4 * (7 - 2) * (5 - 1)
    macs = out * (6 // groups) * 3 * 2
    assert cost(ops.conv2d, small(2, 6, 7, 5), packed, 0.1, 0) == (macs, 2 * macs + 5 * out)
    assert cost(ops.conv2d_relu, small(2, 6, 7, 5), packed, 0.1, 0) == (macs, 2 * macs + 5 * out)


@pytest.mark.parametrize("groups", [1, 2])
def test_quantised_transposed_convolution_counts_by_its_input(groups: int) -> None:
    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("no backend transposes quantised convolutions")
    weight = small(6, 4 // groups, 3, 2, dtype=torch.qint8)
    packed = ops.conv_transpose2d_prepack(
        weight, torch.ones(4), [1, 1], [0, 0], [0, 0], [1, 1], groups
    )
    macs = 2 * 6 * 7 * 5 * (4 // groups) * 3 * 2
    counted, _ = cost(ops.conv_transpose2d, small(2, 6, 7, 5), packed, 0.1, 0)
    assert counted == macs


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("both", [True, False])
def test_dynamic_recurrent_layer_has_the_macs_of_its_original(kind: Any, both: bool) -> None:
    original = kind(5, 3, num_layers=2, bidirectional=both).eval()
    x = torch.rand(7, 2, 5)
    dynamic = torch.ao.quantization.quantize_dynamic(original, {kind}, dtype=torch.qint8)
    assert cost(dynamic, x)[0] == cost(original, x)[0]
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 4]))
    assert cost(dynamic, packed)[0] == cost(original, packed)[0]


def test_dynamic_linear_in_a_model_is_counted() -> None:
    model = nn.Sequential(nn.Linear(K, OUT)).eval()
    dynamic = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert cost(dynamic, torch.rand(T, K))[0] == T * K * OUT


def test_quantised_pointwise_includes_dequantising_and_quantising() -> None:
    a, b, n = small(T, K), small(T, K), T * K
    assert cost(ops.add, a, b, 0.1, 0) == (0, (2 + 2 + 1 + 5) * n)
    assert cost(ops.add_relu, a, b, 0.1, 0) == (0, (2 + 2 + 2 + 5) * n)
    assert cost(ops.mul, a, b, 0.1, 0) == (0, (2 + 2 + 1 + 5) * n)
    assert cost(ops.sigmoid, a, 0.1, 0) == (0, (2 + 1 + 5) * n)
    assert cost(ops.relu6, a) == (0, 0)


def test_fake_quantise_is_nine_forward_and_one_backward() -> None:
    x = torch.rand(T, K, requires_grad=True)
    fake = torch.fake_quantize_per_tensor_affine
    assert cost(lambda: fake(x, 0.1, 0, 0, 255)) == (0, 9 * T * K)
    out = fake(x, 0.1, 0, 0, 255)
    assert cost(out.backward, torch.ones(T, K)) == (0, T * K)  # gradient times mask


def test_quantisation_aware_training_has_no_uncounted_operators() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 9, 2))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    prepared = torch.ao.quantization.prepare_qat(model.train())
    known(lambda: prepared(torch.rand(1, 2, 5, 5)).sum().backward())


def test_quantised_embedding_bag_counts_dequantising_and_sums() -> None:
    rows, width, picked, bags = 11, 8, 6, 2
    packed = ops.embedding_bag_byte_prepack(torch.rand(rows, width))
    indices, offsets = torch.arange(picked), torch.tensor([0, 4])
    counted = cost(ops.embedding_bag_byte_rowwise_offsets, packed, indices, offsets)
    assert counted == (0, (2 * picked + picked - bags) * width)


def test_exported_quantised_program_is_counted() -> None:
    import torch.ao.quantization.fx._decomposed  # defines the library, late

    decomposed = torch.ops.quantized_decomposed
    x = torch.rand(T, K)
    quantised = decomposed.quantize_per_tensor(x, 0.1, 0, 0, 255, torch.uint8)
    assert cost(decomposed.quantize_per_tensor, x, 0.1, 0, 0, 255, torch.uint8) == (0, 5 * T * K)
    assert cost(decomposed.dequantize_per_tensor, quantised, 0.1, 0, 0, 255, torch.uint8) == (
        0,
        2 * T * K,
    )
    assert cost(decomposed.choose_qparams, x, 0, 255, 1e-5, torch.uint8) == (
        0,
        2 * (T * K - 1) + 10,
    )


@pytest.mark.parametrize("bias", [True, False])
def test_dynamic_convolution_counts_quantising_and_rescaling(bias: bool) -> None:
    weight = small(4, 6, 3, dtype=torch.qint8)
    packed = ops.conv1d_prepack(weight, torch.ones(4) if bias else None, [1], [0], [1], 1)
    x = torch.rand(2, 6, 7)
    out = 2 * 4 * (7 - 2)
    quantise = 2 * (x.numel() - 1) + 10 + 5 * x.numel()
    macs = out * 6 * 3
    counted = cost(ops.conv1d_dynamic, x, packed)
    assert counted == (macs, 2 * macs + quantise + out * (2 if bias else 1))


@pytest.mark.parametrize("form", ["input_legacy", "data_legacy"])
def test_recurrent_layer_with_weights_as_tensors_is_counted(form: str) -> None:
    """Old programs do this: no type then distinguishes the state from the packed lengths."""
    x, state, weight = (torch.empty(n, 7, device="meta") for n in (3, 3, 3 * 7))
    lengths = torch.empty(1, device="meta", dtype=torch.int64)
    sequence = (x, lengths) if form == "data_legacy" else (x,)
    op = getattr(torch.ops.aten.quantized_gru, form)
    last = () if form == "data_legacy" else (False,)
    options = (True, 1, 0.0, False, False, *last)
    found = cost_of(op, *sequence, state, [weight, weight], *options, out=None)
    assert found.macs == 3 * 3 * 7 * (7 + 7)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_dynamic_cell_counts_all_gates(kind: Any, gates: int) -> None:
    cell = nn.Sequential(kind(5, 3)).eval()
    dynamic = torch.ao.quantization.quantize_dynamic(cell, {kind}, dtype=torch.qint8)
    assert cost(dynamic, torch.rand(7, 5))[0] == 7 * gates * 3 * (5 + 3)


def test_observer_with_fake_quantisation_counts_both() -> None:
    """Minimum and maximum of all; two moving averages (3 each) and 10; 9 per element."""
    x, one = torch.rand(T, K), torch.ones(1, dtype=torch.long)
    state = [torch.zeros(()), torch.ones(()), torch.ones(1), torch.zeros(1, dtype=torch.int32)]
    counted = cost(torch._fused_moving_avg_obs_fq_helper, x, one, one, *state, 0.01, 0, 255, -1)
    assert counted == (0, 2 * (T * K - 1) + 6 + 10 + 9 * T * K)


def test_learnable_fake_quantisation_matches_closed_form() -> None:
    x, scale, zero = torch.rand(T, K), torch.ones(1), torch.zeros(1)
    op = torch._fake_quantize_learnable_per_tensor_affine
    assert cost(op, x, scale, zero, 0, 255) == (0, 7 * T * K)
    backward = torch.ops.aten._fake_quantize_learnable_per_tensor_affine_backward
    counted = cost(backward, x, x, scale, zero, 0, 255)
    assert counted == (0, (7 + 2 + 1 + 4 + 2) * T * K + 2 * (T * K - 1))


def test_quantised_batch_norm_is_two_per_element() -> None:
    x, c = small(2, 3, 5, 7), torch.ones(3)
    counted = cost(ops.batch_norm2d, x, c, c, c, c, 1e-5, 0.1, 0)
    assert counted == (0, (2 + 2 + 5) * 2 * 3 * 5 * 7 + 5 * 3)


def test_quantised_layer_norm_costs_as_much_as_on_reals() -> None:
    x, w = small(T, K), torch.ones(K)
    real = cost(lambda: torch.nn.functional.layer_norm(torch.rand(T, K), (K,), w, w))[1]
    assert cost(ops.layer_norm, x, [K], w, w, 1e-5, 0.1, 0) == (0, real + (2 + 5) * T * K)


ERF_GELU, TANH_GELU = 5, 9  # x/sqrt(2), erf, 1 +, x *, / 2; and x^3, its factor, x +, its factor,
# tanh, 1 +, x *, / 2


@pytest.mark.parametrize(
    ("post", "per_result"),
    [
        ({"post_op_name": "none"}, 0),
        ({"post_op_name": "relu"}, 1),
        ({"post_op_name": "gelu", "post_op_algorithm": "none"}, ERF_GELU),
        ({"post_op_name": "gelu", "post_op_algorithm": "tanh"}, TANH_GELU),
        ({"binary_post_op": "sum", "unary_post_op": "relu"}, 1 + 1),
        ({"binary_post_op": "add", "unary_post_op": "none"}, 1),
    ],
)
@pytest.mark.parametrize(("dtype", "rescale"), [(torch.float32, 1), (torch.uint8, 5)])
def test_onednn_post_operations_are_added(
    post: dict[str, str], per_result: int, dtype: torch.dtype, rescale: int
) -> None:
    t, k, o = 3, 5, 7
    x, weight = (torch.empty(size, dtype=torch.uint8, device="meta") for size in ((t, k), (k, o)))
    out = torch.empty(t, o, dtype=dtype, device="meta")
    op = torch.ops.onednn.qlinear_pointwise.default
    found = cost_of(op, x, 1.0, 0, weight, out=out, **post)
    assert found.macs == t * k * o
    assert found.flops == 2 * t * k * o + t * o * (rescale + per_result)


def test_quantised_convolution_with_tanh_gelu_counts_the_activation() -> None:
    image, weight = (
        torch.empty(size, dtype=torch.uint8, device="meta")
        for size in ((2, 3, 11, 11), (5, 3, 3, 3))
    )
    out = torch.empty(2, 5, 9, 9, device="meta")
    op = torch.ops.onednn.qconv2d_pointwise.default
    found = cost_of(op, image, 1.0, 0, weight, attr="gelu", algorithm="tanh", out=out)
    macs, results = 2 * 5 * 9 * 9 * 3 * 3 * 3, 2 * 5 * 9 * 9
    assert (found.macs, found.flops) == (macs, 2 * macs + results * (1 + TANH_GELU))
