"""Quantised layers: integer products are MACs, rescaling is arithmetic on reals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.operators.conventions import conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.formulas._arithmetic import cost_of
from dispatch_flops.operators.registry import lookup
from dispatch_flops.profile.cost import OpCost
from tests.helpers.profiling import macs_and_flops, profile_of

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


SCALE, ZERO = torch.tensor(0.1), torch.tensor(0)
SCALES, ZEROS = torch.ones(OUT), torch.zeros(OUT, dtype=torch.int64)


def onednn_linear() -> None:
    onednn = torch.ops.onednn
    weight = onednn.qlinear_prepack(torch.ones(OUT, K, dtype=torch.int8), [T, K])
    x = torch.ones(T, K, dtype=torch.uint8)
    to_reals = (None, 1.0, 0, torch.float32, "none", [], "")
    onednn.qlinear_pointwise(x, 0.1, 0, weight, SCALES, ZEROS, *to_reals)


def onednn_convolution() -> None:
    onednn, sizes = torch.ops.onednn, ([1, 1], [0, 0], [1, 1], 1)
    kernel, image = torch.ones(OUT, 2, 3, 3), torch.ones(2, 2, 5, 5)
    weight = onednn.qconv_prepack(kernel.to(torch.int8), SCALES, 0.1, 0, *sizes, [2, 2, 5, 5])
    to_reals = (None, *sizes, 1.0, 0, torch.float32, "none", [], "")
    onednn.qconv_pointwise(image.to(torch.uint8), 0.1, 0, weight, SCALES, ZEROS, *to_reals)


def linear_of_reals() -> None:
    packed = ops.linear_prepack(small(OUT, K, dtype=torch.qint8), None)
    ops.linear_with_input_q_dq_qweight_dq_output_fp32(torch.ones(T, K), 0.1, 0, packed)


def linear_of_4_bits() -> None:
    k, n = 32, 4
    packed = torch._dyn_quant_pack_4bit_weight(
        torch.ones(n, k // 2, dtype=torch.uint8), torch.ones(n, 1), None, k, k, n
    )
    torch._dyn_quant_matmul_4bit(torch.ones(T, k), packed, k, k, n)


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        (onednn_linear, "uint8"),
        (onednn_convolution, "uint8"),
        (linear_of_reals, "int8"),
        (linear_of_4_bits, "int8"),
    ],
)
def test_products_of_integers_compute_in_them_whatever_scales_and_results_are(
    call: Callable[[], None], dtype: str
) -> None:
    (found,) = {op.dtype for op in profile_of(call).op_totals() if op.cost and op.cost.macs}
    assert found == dtype


def priced(op: Any, *args: Any, out: torch.Tensor) -> CallCost:
    rule = lookup(op.default)
    assert rule is not None
    return cost_of_call("", op.default, rule, args, {}, out, conventions())


def test_compressed_products_compute_in_the_dtype_of_their_factors() -> None:
    """Whatever that of the bias, or of the factor alpha."""
    a, bias = torch.ones(8, 8, dtype=torch.int8), torch.ones(8, 8, dtype=torch.int32)
    product = priced(torch.ops.aten._cslt_sparse_mm, a, a, None, torch.ones(8), out=a)
    assert product.dtype == "int8"
    added = priced(torch.ops.aten._sparse_semi_structured_addmm, bias, a, a, a, out=bias)
    assert added.dtype == "int8"


def test_linear_of_reals_counts_quantising_and_dequantising() -> None:
    x, weight, bias = torch.ones(T, K), torch.ones(OUT, K), torch.ones(OUT)
    library = torch.ops._quantized
    ends = (SCALE, ZERO, OUT)
    packed = library._wrapped_linear_prepack(weight, SCALE, ZERO, bias)
    macs = T * K * OUT
    flops = 2 * macs + 5 * T * K + (5 + 2) * T * OUT
    call = library._wrapped_quantized_linear_prepacked
    profile = profile_of(call, x, SCALE, ZERO, packed, *ends)
    (op,) = profile.op_totals()
    assert op.dtype == "int8"
    assert profile.total() == OpCost(
        macs=macs,
        flops=flops,
        bytes_read=4 * T * K + K * OUT + 4 * OUT,
        bytes_written=4 * T * OUT,
    )
    whole = (x, SCALE, ZERO, weight, SCALE, ZERO, bias, *ends)
    counted = macs_and_flops(library.wrapped_quantized_linear, *whole)
    assert counted == (macs, flops + 5 * K * OUT)
