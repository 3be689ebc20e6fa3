"""Quantised layers: integer products are MACs, rescaling is arithmetic on reals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dispatch_flops.operators.formulas._arithmetic import cost_of
from tests.helpers.profiling import macs_and_flops

pytestmark = pytest.mark.filterwarnings("ignore")

ops = torch.ops.quantized
T, K, OUT = 7, 5, 3


def small(*shape: int, dtype: torch.dtype = torch.quint8) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.rand(shape), 0.1, 0, dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_quantised_linear_counts_products_and_rescaling(bias: bool) -> None:
    packed = ops.linear_prepack(small(OUT, K, dtype=torch.qint8), torch.ones(OUT) if bias else None)
    macs = T * OUT * K
    assert macs_and_flops(ops.linear, small(T, K), packed, 0.1, 0) == (macs, 2 * macs + 5 * T * OUT)
    assert macs_and_flops(ops.linear_relu, small(T, K), packed, 0.1, 0) == (
        macs,
        2 * macs + 5 * T * OUT,
    )
    quantise = 2 * (T * K - 1) + 10 + 5 * T * K
    rescale = T * OUT * (2 if bias else 1)
    assert macs_and_flops(ops.linear_dynamic, torch.rand(T, K), packed) == (
        macs,
        2 * macs + quantise + rescale,
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_quantised_convolution_counts_products_and_rescaling(groups: int) -> None:
    weight = small(4, 6 // groups, 3, 2, dtype=torch.qint8)
    packed = ops.conv2d_prepack(weight, torch.ones(4), [1, 1], [0, 0], [1, 1], groups)
    out = 2 * 4 * (7 - 2) * (5 - 1)
    macs = out * (6 // groups) * 3 * 2
    assert macs_and_flops(ops.conv2d, small(2, 6, 7, 5), packed, 0.1, 0) == (
        macs,
        2 * macs + 5 * out,
    )
    assert macs_and_flops(ops.conv2d_relu, small(2, 6, 7, 5), packed, 0.1, 0) == (
        macs,
        2 * macs + 5 * out,
    )


@pytest.mark.parametrize("groups", [1, 2])
def test_quantised_transposed_convolution_counts_by_its_input(groups: int) -> None:
    if "qnnpack" not in torch.backends.quantized.supported_engines:
        pytest.skip("no backend transposes quantised convolutions")
    weight = small(6, 4 // groups, 3, 2, dtype=torch.qint8)
    packed = ops.conv_transpose2d_prepack(
        weight, torch.ones(4), [1, 1], [0, 0], [0, 0], [1, 1], groups
    )
    macs = 2 * 6 * 7 * 5 * (4 // groups) * 3 * 2
    counted, _ = macs_and_flops(ops.conv_transpose2d, small(2, 6, 7, 5), packed, 0.1, 0)
    assert counted == macs


def test_dynamic_linear_in_a_model_is_counted() -> None:
    model = nn.Sequential(nn.Linear(K, OUT)).eval()
    dynamic = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert macs_and_flops(dynamic, torch.rand(T, K))[0] == T * K * OUT


@pytest.mark.parametrize("bias", [True, False])
def test_dynamic_convolution_counts_quantising_and_rescaling(bias: bool) -> None:
    weight = small(4, 6, 3, dtype=torch.qint8)
    packed = ops.conv1d_prepack(weight, torch.ones(4) if bias else None, [1], [0], [1], 1)
    x = torch.rand(2, 6, 7)
    out = 2 * 4 * (7 - 2)
    quantise = 2 * (x.numel() - 1) + 10 + 5 * x.numel()
    macs = out * 6 * 3
    counted = macs_and_flops(ops.conv1d_dynamic, x, packed)
    assert counted == (macs, 2 * macs + quantise + out * (2 if bias else 1))


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
