"""The definitions compute the same values as torch and have the closed forms' cost."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.oracles import contractions as define
from tests.oracles import elementwise
from tests.oracles.attention import attention
from tests.oracles.comparing import same_values, tensor
from tests.oracles.convolutions import convolution, transposed_convolution
from tests.oracles.counting import OperationCounts, count, numbers, values


def test_product_definitions_have_the_closed_forms_cost() -> None:
    a, b = tensor(2, 3, 5), tensor(2, 5, 4, seed=1)
    done = count(define.bmm, a, b)
    same_values(a @ b, done.result)
    assert done.macs == 2 * 3 * 5 * 4
    assert count(define.addbmm, tensor(3, 4), a, b).macs == 2 * 3 * 5 * 4
    assert count(define.mv, tensor(3, 5), tensor(5)).macs == 3 * 5
    assert count(define.dot_product, tensor(5), tensor(5)).macs == 5
    assert count(define.outer, tensor(5), tensor(3)).macs == 0
    assert count(define.addr, tensor(5, 3), tensor(5), tensor(3)).flops == 2 * 5 * 3


def test_matmul_definition_with_broadcast_batches_multiplies_them() -> None:
    assert count(define.matmul, tensor(7, 1, 2, 3), tensor(4, 3, 5)).macs == 7 * 4 * 2 * 3 * 5


def test_product_definition_with_an_empty_sum_is_free() -> None:
    done = count(define.mm, tensor(2, 0), tensor(0, 3))
    assert done.macs == 0 and values(done.result).shape == (2, 3)


def test_convolution_definition_counts_the_whole_window() -> None:
    x, w = tensor(2, 6, 5, 7), tensor(4, 3, 3, 2, seed=1)
    done = count(convolution, x, w, stride=(1, 2), padding=(1, 1), dilation=(1, 1), groups=2)
    same_values(F.conv2d(x, w, stride=(1, 2), padding=1, groups=2), done.result)
    assert done.macs == 2 * 4 * (6 // 2) * (3 * 2) * (5 * 4)


def test_transposed_convolution_definition_counts_by_its_input() -> None:
    x, w = tensor(4, 4, 8, 8), tensor(4, 6, 4, 4, seed=1)
    args = {"stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "output_padding": (0, 0)}
    done = count(transposed_convolution, x[:1], w, **args)
    same_values(F.conv_transpose2d(x[:1], w, stride=2, padding=1), done.result)
    assert done.macs == 1 * 4 * 6 * (4 * 4) * (8 * 8)


def test_attention_definition_counts_the_rectangle_or_the_triangle() -> None:
    q, k, v = tensor(2, 4, 3, 5), tensor(2, 2, 7, 5, seed=1), tensor(2, 2, 7, 6, seed=2)
    full = count(attention, q, k, v, causal=True)
    half = count(attention, q, k, v, causal=True, kept_only=True)
    assert full.macs == 2 * 4 * (3 * 7) * (5 + 6)
    assert half.macs == 2 * 4 * (1 + 2 + 3) * (5 + 6)
    same_values(
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), half.result
    )
    assert torch.equal(values(full.result), values(half.result))


def test_bilinear_definition_is_two_contractions() -> None:
    x, w, z = tensor(3, 5), tensor(2, 5, 7, seed=1), tensor(3, 7, seed=2)
    done = count(define.bilinear, x, w, z)
    same_values(F.bilinear(x, z, w), done.result)
    assert done.macs == 3 * 2 * 5 * 7 + 3 * 2 * 7


def test_einsum_definition_sums_single_indices_first() -> None:
    x, y = tensor(3, 5), tensor(3, 7, seed=1)
    done = count(define.einsum, "ij,ik->k", x, y)
    same_values(torch.einsum("ij,ik->k", x, y), done.result)
    assert done.macs == 3 * 7
    assert done.flops == 2 * 3 * 7 + 3 * (5 - 1)


def test_softmax_and_norm_definitions_count_each_operation() -> None:
    n = 7
    for function, torch_one, flops in (
        # max n-1, subtract n, exp n, sum n-1, divide n
        (elementwise.softmax, lambda x: x.softmax(0), 5 * n - 2),
        # max n-1, subtract n, exp n, sum n-1, log 1, subtract n
        (elementwise.log_softmax, lambda x: x.log_softmax(0), 5 * n - 1),
        # mean n; variance 3n; eps, rsqrt 2; subtract, scale, gain, shift 4n
        (_layer_norm, lambda x: F.layer_norm(x, (n,), x, x), 8 * n + 2),
        # squares n, mean n; eps, rsqrt 2; scale, gain 2n
        (_rms_norm, lambda x: F.rms_norm(x, (n,), x, 1e-5), 4 * n + 2),
    ):
        counts = OperationCounts()
        x = tensor(n)
        result = function(list(numbers(x, counts)))
        same_values(torch_one(x), result)
        assert counts.flops == flops


def _layer_norm(row):  # type: ignore[no-untyped-def]
    return elementwise.layer_norm(row, row, row, eps=1e-5)


def _rms_norm(row):  # type: ignore[no-untyped-def]
    return elementwise.rms_norm(row, row, eps=1e-5)
