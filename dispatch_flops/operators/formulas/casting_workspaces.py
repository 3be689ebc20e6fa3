"""Copies of the operand, of the result's dtype, that reductions and cumulative sums make.

Elements that have another dtype than the sum are cast before they are added: booleans, integers
but int64, and those of a call with ``dtype=``. CUDA adds half precision in place of a cast.
N elements of the operand, R of the result.
Source: make_reduction, aten/src/ATen/native/ReduceOpsUtils.h; cumsum, mean, get_allany_iter and
count_nonzero, aten/src/ATen/native/ReduceOps.cpp and TensorAdvancedIndexing.cpp.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.workspaces import builtin_workspace

_HALF = (torch.bfloat16, torch.float16)
SHORT_INTEGERS = frozenset((torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32))


def _is_in_half(args: tuple[Any, ...]) -> bool:
    return args[0].dtype in _HALF


def _is_complex(args: tuple[Any, ...]) -> bool:
    return bool(args[0].is_complex())


@builtin_workspace(ops("sum", "nansum", "prod", "cumsum", "cumprod"), _is_in_half, is_steady=True)
def sums(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> int | None:
    """Bytes: N·(size of the result's dtype), if the operand's is another.

    In half precision, the CPU casts where it adds up several dimensions, or gaps, to float32.
    """
    if x.is_cpu and x.dtype in _HALF:
        return None
    if dtype is None:
        return 8 * x.numel() if x.dtype in SHORT_INTEGERS else 0
    return _cast(x, dtype)


@builtin_workspace(ops("linalg_vector_norm", "norm"), _is_complex, is_steady=True)
def norms(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> int | None:
    """Bytes: as of a sum. Some norms of complex numbers take their absolute values first."""
    if x.is_cpu and x.is_complex():
        return None
    return 0 if dtype is None else _cast(x, dtype)


@builtin_workspace(ops("mean"))
def mean(
    x: torch.Tensor, dim: Any = None, *_: Any, dtype: torch.dtype | None = None, **__: Any
) -> int:
    """Bytes: as of a sum; on the CPU, means in half precision are computed in float32.

    There, 4·N of the operand if it is not of float32, and 4·R.
    """
    result = x.dtype if dtype is None else dtype
    if result not in _HALF or not (x.is_cpu or x.is_meta):
        return 0 if dtype is None else _cast(x, dtype)
    dims = dim if dim else range(x.dim())
    rows = x.numel()
    for position in dims:
        rows //= max(1, x.shape[position])
    return _cast(x, torch.float32) + 4 * rows


@builtin_workspace(ops("all", "any"))
def truths(x: torch.Tensor, *_: Any, **__: Any) -> int:
    """Bytes: N of booleans, on the CPU."""
    if not (x.is_cpu or x.is_meta) or x.dtype in (torch.bool, torch.uint8):
        return 0
    return x.numel()


@builtin_workspace(ops("count_nonzero"))
def counts(x: torch.Tensor, dim: Any = None, **_: Any) -> int:
    """Bytes: N of booleans, and 8·N as of their sum; 0 of a count over all on the CPU."""
    if (dim is None or dim == []) and (x.is_cpu or x.is_meta):
        return 0
    return (8 if x.dtype is torch.bool else 9) * x.numel()


def _cast(x: torch.Tensor, dtype: torch.dtype) -> int:
    if x.dtype is dtype or (x.is_cuda and x.dtype in _HALF and dtype is torch.float32):
        return 0
    return x.numel() * dtype.itemsize
