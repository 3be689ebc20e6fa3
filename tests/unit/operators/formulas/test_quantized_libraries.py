"""Products of bitsandbytes, torchao and vLLM, by operators of their schemas, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.profiling import profile_of
from tests.helpers.stand_ins import nothing, stand_in

M, N, K, BLOCK = 3, 10, 14, 4
MACS = M * N * K
BLOCKS = -(-N * K // BLOCK)
X, BIAS = torch.ones(M, K), torch.ones(N)
INT_X, INT_W = torch.ones(M, K, dtype=torch.int8), torch.ones(N, K, dtype=torch.int8)
PACKED = torch.ones(N * K // 2, 1, dtype=torch.uint8)
ABSMAX, CODE = torch.ones(BLOCKS), torch.ones(16)
ROWS, COLUMNS = torch.ones(M), torch.ones(N)


def product(*_: Any, **__: Any) -> Tensor:
    return torch.empty(M, N)


def mixed(*_: Any) -> tuple[Tensor, None]:
    return torch.empty(M, N), None


_4BIT = (
    "gemm_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, "
    "Tensor? bias=None, Tensor? absmax_8bit=None, Tensor? absmax_code=None, "
    "Tensor? absmax_offset=None) -> Tensor"
)
_MIXED = (
    "int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, "
    "Tensor? outlier_cols=None, Tensor? bias=None) -> (Tensor, Tensor?)"
)
_QUANTISED = (torch.empty(N * K, dtype=torch.uint8), ABSMAX)
# Library, schema, kernel, arguments, MACs, FLOPs.
CASES: dict[str, tuple[str, str, Callable[..., Any], tuple[Any, ...], int, int]] = {
    "int8 product": (
        "bitsandbytes", "int8_linear_matmul(Tensor A, Tensor B) -> Tensor", product,
        (INT_X, INT_W), MACS, 2 * MACS,
    ),
    "int8 rescaled, bias": (
        "bitsandbytes",
        "int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, "
        "Tensor? bias=None) -> Tensor",
        product, (torch.ones(M, N, dtype=torch.int32), ROWS, COLUMNS, None, BIAS),
        0, M * N * (3 + 1),
    ),
    "int8 scaled product": (
        "bitsandbytes",
        "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, "
        "Tensor? bias=None, ScalarType? dtype=None) -> Tensor",
        product, (INT_X, INT_W, ROWS, COLUMNS), MACS, 2 * MACS + 3 * M * N,
    ),
    "int8 product without outliers": (
        "bitsandbytes", _MIXED, mixed, (X, INT_X, INT_W, ROWS, COLUMNS),
        MACS, 2 * MACS + 3 * M * N,
    ),
    "int8 product with outliers, bias": (
        "bitsandbytes", _MIXED, mixed,
        (X, INT_X, INT_W, ROWS, COLUMNS, torch.tensor([2, 5]), BIAS),
        M * N * (K + 2), 2 * M * N * (K + 2) + 3 * M * N + M * N + 2 * N * 2 + M * N,
    ),
    # |x|, the maximum of a row, 127 / maximum, the product and its rounding
    "int8 quantised": (
        "bitsandbytes", "int8_vectorwise_quant(Tensor A, float threshold=0.0) "
        "-> (Tensor, Tensor, Tensor?)",
        lambda *_: (INT_X, ROWS, None), (X,), 0, M * K + M * (K - 1) + M + 2 * M * K,
    ),
    # |x| again, and whether it is an outlier
    "int8 quantised with outliers": (
        "bitsandbytes", "int8_vectorwise_quant(Tensor A, float threshold=0.0) "
        "-> (Tensor, Tensor, Tensor?)",
        lambda *_: (INT_X, ROWS, None), (X, 6.0), 0,
        M * K + M * (K - 1) + M + 2 * M * K + 2 * M * K,
    ),
    # then |x|, the maximum of a column, the product with 127, the quotient and its rounding
    "int8 quantised twice": (
        "bitsandbytes", "int8_double_quant(Tensor A, float threshold=0.0) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
        lambda *_: (INT_X, INT_X, ROWS, COLUMNS, None), (X,), 0,
        M * K + M * (K - 1) + M + 2 * M * K + M * K + (M - 1) * K + 3 * M * K,
    ),
    "int8 quantised twice with outliers": (
        "bitsandbytes", "int8_double_quant(Tensor A, float threshold=0.0) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
        lambda *_: (INT_X, INT_X, ROWS, COLUMNS, None), (X, 6.0), 0,
        M * K + M * (K - 1) + M + 4 * M * K + 2 * M * K + (M - 1) * K + 3 * M * K,
    ),
    "int8 dequantised": (
        "bitsandbytes", "int8_vectorwise_dequant(Tensor A, Tensor stats) -> Tensor", product,
        (INT_W, COLUMNS), 0, 2 * N * K,
    ),
    "4-bit product": (
        "bitsandbytes", _4BIT, product, (X, PACKED, [N, K], ABSMAX, BLOCK, "nf4"),
        MACS, 2 * MACS + N * K,
    ),
    "4-bit product, bias, nested maxima": (
        "bitsandbytes", _4BIT, product,
        (X, PACKED, [N, K], ABSMAX, BLOCK, "nf4", BIAS, ABSMAX.to(torch.uint8), CODE, CODE[:1]),
        MACS, 2 * MACS + N * K + M * N + 2 * BLOCKS,
    ),
    "4-bit product with a vector": (
        "bitsandbytes",
        "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) "
        "-> Tensor",
        product, (X[:1], PACKED, [N, K], ABSMAX, CODE, BLOCK), N * K, 3 * N * K,
    ),
    "4-bit dequantised": (
        "bitsandbytes",
        "dequantize_4bit(Tensor A, Tensor absmax, int blocksize, str quant_type, int[] shape, "
        "ScalarType dtype) -> Tensor",
        product, (PACKED, ABSMAX, BLOCK, "nf4", [N, K], torch.float32), 0, N * K,
    ),
    "8-bit dequantised": (
        "bitsandbytes",
        "dequantize_blockwise(Tensor A, Tensor absmax, Tensor code, int blocksize, "
        "ScalarType dtype) -> Tensor",
        product, (INT_W.to(torch.uint8), ABSMAX, CODE, BLOCK, torch.float32), 0, N * K,
    ),
    "8-bit quantised": (
        "bitsandbytes",
        "quantize_blockwise(Tensor A, Tensor code, int blocksize) -> (Tensor, Tensor)",
        lambda *_: _QUANTISED, (torch.ones(N, K), CODE, BLOCK), 0,
        # |x|, the maximum, the product, two bounds, eight comparisons; two per block
        N * K + (N * K - BLOCKS) + 3 * N * K + 8 * N * K + 2 * BLOCKS,
    ),
    "4-bit quantised": (
        "bitsandbytes",
        "quantize_4bit(Tensor A, int blocksize, str quant_type, ScalarType quant_storage) "
        "-> (Tensor, Tensor)",
        lambda *_: _QUANTISED, (torch.ones(N, K), BLOCK, "nf4", torch.uint8), 0,
        N * K + (N * K - BLOCKS) + 3 * N * K + 4 * N * K + 2 * BLOCKS,
    ),
    "torchao mx": (
        "torchao", "mx_fp8_bf16(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale) -> Tensor",
        product, (X, torch.ones(K, N), ROWS, COLUMNS), MACS, 2 * MACS + 2 * M * N,
    ),
    "torchao blockwise": (
        "torchao",
        "blockwise_scaled_mm(Tensor a, Tensor b, Tensor a_s, int scale_recipe_a, Tensor b_s, "
        "int scale_recipe_b, ScalarType out_dtype) -> Tensor",
        product, (X, torch.ones(K, N), ROWS, 1, COLUMNS, 1, torch.float32),
        MACS, 2 * MACS + 2 * M * N,
    ),
    "torchao blockwise, inference": (
        "ao",
        "blockwise_fp8_gemm(Tensor a, Tensor a_s, Tensor b, Tensor b_s, SymInt block_size=128) "
        "-> Tensor",
        product, (X, ROWS, torch.ones(N, K), COLUMNS), MACS, 2 * MACS + 2 * M * N,
    ),
    "torchao float8 linear": (
        "torchao",
        "float8_linear_cpu(Tensor input, Tensor input_scales, Tensor weight, "
        "Tensor weight_scales, Tensor? bias, ScalarType output_dtype) -> Tensor",
        product, (X, ROWS, INT_W, COLUMNS, BIAS, torch.float32), MACS, 2 * MACS + 3 * M * N,
    ),
    "torchao int4 linear": (
        "torchao",
        "da8w4_linear_cpu(Tensor input, Tensor input_scales, Tensor input_qzeros, Tensor weight, "
        "Tensor weight_scales, Tensor weight_qzeros, Tensor compensation, Tensor? bias, "
        "ScalarType output_dtype) -> Tensor",
        product, (INT_X, ROWS, ROWS, PACKED, COLUMNS, COLUMNS, COLUMNS, None, torch.float32),
        MACS, 2 * MACS + 2 * M * N,
    ),
    "torchao sparse linear": (
        "torchao",
        "rowwise_scaled_linear_sparse_cutlass_f8f8(Tensor input, Tensor input_scale, "
        "Tensor weight, Tensor weight_meta, Tensor weight_scale, Tensor? bias=None, "
        "ScalarType? out_dtype=None) -> Tensor",
        product, (X, ROWS, torch.ones(N, K // 2), COLUMNS, COLUMNS, BIAS),
        MACS // 2, MACS + 3 * M * N,
    ),
    "vLLM scaled product": (
        "_C",
        "cutlass_scaled_mm(Tensor! out, Tensor a, Tensor b, Tensor a_scales, Tensor b_scales, "
        "Tensor? bias) -> ()",
        nothing, (torch.ones(M, N), X, torch.ones(K, N), ROWS, COLUMNS, BIAS),
        MACS, 2 * MACS + 3 * M * N,
    ),
    "vLLM AWQ": (
        "_C",
        "awq_gemm(Tensor _in_feats, Tensor _kernel, Tensor _scaling_factors, Tensor _zeros, "
        "SymInt split_k_iters) -> Tensor",
        product, (X, PACKED, COLUMNS, COLUMNS, 8), MACS, 2 * MACS + 2 * N * K,
    ),
    "vLLM Marlin": (
        "_C",
        "marlin_gemm(Tensor a, Tensor? c_or_none, Tensor b_q_weight, Tensor? b_bias_or_none, "
        "Tensor b_scales, Tensor? a_scales, Tensor? global_scale, Tensor? b_zeros_or_none, "
        "Tensor? g_idx_or_none, Tensor? perm_or_none, Tensor workspace, int b_type_id, "
        "SymInt size_m, SymInt size_n, SymInt size_k, bool is_k_full, bool use_atomic_add, "
        "bool use_fp32_reduce, bool is_zp_float) -> Tensor",
        product,
        (X, None, PACKED, BIAS, COLUMNS, None, None, COLUMNS, None, None, COLUMNS, 1, M, N, K,
         True, False, True, False),
        MACS, 2 * MACS + 2 * N * K + M * N,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operator_of_the_librarys_schema_costs_what_is_counted_by_hand(case: str) -> None:
    library, schema, kernel, args, macs, flops = CASES[case]
    with stand_in(library, schema, kernel) as op:
        total = profile_of(op, *args).total()
    assert (total.macs, total.flops) == (macs, flops)


def test_cutlass_scaled_mm_writes_its_result_and_reads_the_rest() -> None:
    library, schema, kernel, args, _, _ = CASES["vLLM scaled product"]
    with stand_in(library, schema, kernel) as op:
        total = profile_of(op, *args).total()
    assert total.bytes_read == 4 * (M * K + K * N + M + N + N)
    assert total.bytes_written == 4 * M * N


@pytest.mark.parametrize(
    ("case", "changed", "dtype"),
    [
        ("int8 scaled product", {}, "int8"),
        ("int8 product with outliers, bias", {}, "int8"),
        ("torchao int4 linear", {}, "int8"),
        ("torchao float8 linear", {0: X.to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
        ("vLLM scaled product", {1: INT_X}, "int8"),
        ("vLLM scaled product", {1: X.to(torch.float8_e4m3fn)}, "float8_e4m3fn"),
    ],
)
def test_product_computes_in_the_dtype_of_its_first_factor(
    case: str, changed: dict[int, Tensor], dtype: str
) -> None:
    library, schema, kernel, args, _, _ = CASES[case]
    args = tuple(changed.get(position, value) for position, value in enumerate(args))
    with stand_in(library, schema, kernel) as op:
        (row,) = [row for row in profile_of(op, *args).op_totals() if row.cost and row.cost.macs]
    assert row.dtype == dtype
