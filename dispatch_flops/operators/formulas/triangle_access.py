"""Operators that read one triangle of a matrix, or its diagonal.

Letters: n×n a matrix, unless the shape is given; all matrices of a batch are read alike.
Source: LAPACK's potrf, potri, potrs, trtrs, syevd, sytrf and orgqr ("is not referenced").
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.access import Access, Arguments, declare_access
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.partial_access import read_in_part

Tensor = torch.Tensor


def _triangle(matrices: Tensor, *, has_diagonal: bool = True) -> int:
    n = matrices.shape[-1]
    return math.prod(matrices.shape[:-2]) * (n * (n - 1) // 2 + n * has_diagonal)


@declare_access(ops("linalg_cholesky_ex", "cholesky", "cholesky_inverse", "linalg_ldl_factor_ex"))
def symmetric(arguments: Arguments, out: Any) -> Access:
    """n(n+1)/2 elements: the matrix is symmetric, or only its factor is needed."""
    return read_in_part(arguments, {"self": _triangle(arguments["self"])})


@declare_access(ops("_linalg_eigh"))
def eigenvalues(arguments: Arguments, out: Any) -> Access:
    """n(n+1)/2 elements of the symmetric matrix."""
    return read_in_part(arguments, {"A": _triangle(arguments["A"])})


@declare_access(ops("cholesky_solve", "_cholesky_solve_helper"))
def solve_by_factor(arguments: Arguments, out: Any) -> Access:
    """n(n+1)/2 elements of the factor."""
    factor = "A" if "A" in arguments else "input2"
    return read_in_part(arguments, {factor: _triangle(arguments[factor])})


@declare_access(ops("linalg_solve_triangular"))
def solve_triangular(arguments: Arguments, out: Any) -> Access:
    """n(n+1)/2 elements, n(n-1)/2 where the diagonal is 1. (``triangular_solve`` copies all.)"""
    elements = _triangle(arguments["self"], has_diagonal=not arguments["unitriangular"])
    return read_in_part(arguments, {"self": elements})


@declare_access(ops("linalg_householder_product"))
def householder_product(arguments: Arguments, out: Any) -> Access:
    """What is below the diagonal of the m×n matrix, in as many columns as there are reflectors."""
    matrix: Tensor = arguments["input"]
    below = sum(max(matrix.shape[-2] - 1 - i, 0) for i in range(arguments["tau"].shape[-1]))
    return read_in_part(arguments, {"input": math.prod(matrix.shape[:-2]) * below})


@declare_access(ops("trace"))
def trace(arguments: Arguments, out: Any) -> Access:
    """The diagonal."""
    return read_in_part(arguments, {"self": min(arguments["self"].shape)})


@declare_access(ops("lu_unpack"))
def lu_unpack(arguments: Arguments, out: Any) -> Access:
    """The factors and the pivots, where they are asked for."""
    factors, pivots = arguments["unpack_data"], arguments["unpack_pivots"]
    unread = {"LU_data": not factors, "LU_pivots": not pivots}
    return Access(unread=[name for name, is_unread in unread.items() if is_unread])


@declare_access(ops("_fft_c2r"))
def real_from_half_spectrum(arguments: Arguments, out: Any) -> Access:
    """Half of the spectrum: size // 2 + 1 elements of the last dimension."""
    source: Tensor = arguments["self"]
    size = source.shape[arguments["dim"][-1]]
    kept = min(arguments["last_dim_size"] // 2 + 1, size)
    return read_in_part(arguments, {"self": source.numel() // max(size, 1) * kept})
