"""Contiguous copies of factors that the kernels of matrix products make.

BLAS takes factors whose rows or whose columns are contiguous, as a slice's or a transpose's are.
Factors with other strides, such as an expanded gradient, are copied.
Source: addmm_impl_cpu_ and bmm_out_or_baddbmm_, aten/src/ATen/native/LinearAlgebra.cpp; gemv,
aten/src/ATen/native/Blas.cpp; prepare_matrix_for_cublas, aten/src/ATen/native/cuda/Blas.cpp. On the
CPU, oneDNN multiplies in half precision. What it needs has no formula, nor has what sparse factors
need; the allocator reports it.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.workspaces import builtin_workspace

MATRICES = ops("mm", "addmm", "addmm_", "_addmm_activation")
VECTORS = ops("mv", "addmv", "addmv_")
BATCHES = ops("bmm", "baddbmm", "baddbmm_")
_STRIDED = torch.strided
_HALF = (torch.bfloat16, torch.float16)
# Of these, more than strides is asked.
_OTHER = frozenset((*_HALF, torch.complex64, torch.complex128))
_FEWEST = 400  # of one matrix; smaller products of a batch run without BLAS


def _may_be_unknown(args: tuple[Any, ...]) -> bool:
    a, b = args[-2:]
    return b.dtype in _HALF or a.layout is not _STRIDED or b.layout is not _STRIDED


def _may_be_unknown_in_batch(args: tuple[Any, ...]) -> bool:
    return _may_be_unknown(args) or (args[-1].dtype in _OTHER and _is_conjugated(*args[-2:]))


@builtin_workspace(MATRICES, _may_be_unknown, is_steady=True)
def matrices(*operands: Any, **_: Any) -> int | None:
    """Bytes: those of each factor that is copied."""
    a, b = operands[-2:]
    is_other = a.dtype in _OTHER
    if is_other and _is_unknown(a):
        return None
    copied = 0
    if is_other or not a.is_contiguous():
        if _is_sparse(a):
            return None
        copied = bytes_copied(a)
    if is_other or not b.is_contiguous():
        if _is_sparse(b):
            return None
        copied += bytes_copied(b)
    return copied if copied and a.numel() and b.numel() else 0


@builtin_workspace(VECTORS, _may_be_unknown, is_steady=True)
def vectors(*operands: Any, **_: Any) -> int | None:
    """Bytes: those of the matrix, if it is copied."""
    matrix = operands[-2]
    if _is_unknown(matrix) or _is_sparse(matrix):
        return None
    return bytes_copied(matrix)


@builtin_workspace(BATCHES, _may_be_unknown_in_batch, is_steady=True)
def batches(*operands: Any, **_: Any) -> int | None:
    """Bytes: those of one matrix of each factor that is copied; on CUDA, of the whole batch.

    The CPU copies neither factor unless both go to BLAS one matrix at a time. What is conjugated
    lazily is computed first, and what of it is copied has no formula.
    """
    a, b = operands[-2:]
    if _is_unknown(a) or _is_conjugated(a, b) or _is_sparse(a) or _is_sparse(b):
        return None
    if a.is_contiguous() and b.is_contiguous() and not a.is_complex():
        return 0
    batch, rows, inner = a.shape
    on_cuda = a.is_cuda
    if not on_cuda and (
        rows * inner * b.shape[2] < _FEWEST or (_are_items_adjacent(a) and _are_items_adjacent(b))
    ):
        return 0
    copied = bytes_copied(a) + bytes_copied(b)
    return copied * batch if on_cuda else copied


def _is_conjugated(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.is_conj() or b.is_conj()


def _is_sparse(factor: torch.Tensor) -> bool:
    return factor.layout is not _STRIDED


def _is_unknown(factor: torch.Tensor) -> bool:
    return factor.dtype in _HALF and factor.is_cpu


def bytes_copied(factor: torch.Tensor) -> int:
    """Return the bytes of the copy of a matrix, or of one of a batch; 0 if none is made."""
    shape, strides = factor.shape, factor.stride()
    rows, columns, down, right = shape[-2], shape[-1], strides[-2], strides[-1]
    if right == 1 and down >= columns:
        is_copied = factor.is_conj()  # BLAS conjugates a factor only as it transposes it
    else:
        is_copied = not (down == 1 and right >= rows)
    return int(rows * columns * factor.element_size()) if is_copied else 0


def _are_items_adjacent(batch: torch.Tensor) -> bool:
    """Return True if the rows, or the columns, of each matrix are contiguous."""
    (_, rows, columns), (_, down, right) = batch.shape, batch.stride()
    return (right == 1 and (rows == 1 or down >= columns)) or (
        down == 1 and (columns == 1 or right >= rows)
    )
