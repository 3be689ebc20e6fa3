"""Factorisations and solvers of linear algebra.

They cost what LAPACK's routines cost (``_lapack``), per matrix of the batch; a complex
multiplication is 6 FLOPs and a complex addition 2. These are only FLOPs: MACs are reserved for
contractions, such as those of ``linalg_pinv`` and ``linalg_matrix_exp``.
Partial pivoting only compares and exchanges, which is free.

Letters: b batch, A[..., m, n] a matrix, r right-hand sides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas import _lapack
from dispatch_flops.operators.formulas._lapack import Work
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.profile.cost import OpCost, contraction, flops

Tensor = torch.Tensor

declare_free(
    ops("lu_unpack", "_linalg_check_errors"),
    "copies triangles or checks results",
)


# -- factorisations ------------------------------------------------------------------------


@register_flops(ops("linalg_cholesky_ex", "cholesky"))
def cholesky(A: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """A[n, n] = L @ L^H. FLOPs: n^3/3 to leading order. Source: xPOTRF."""
    return batched(A, _lapack.potrf(A.shape[-1]))


@register_flops(ops("linalg_lu_factor_ex", "linalg_lu"))
def lu(A: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """P @ A[m, n] = L @ U.

    FLOPs: m·n·k - (m+n)·k^2/2 + k^3/3 products and as many sums to leading order, k = min(m, n);
    2n^3/3 for m = n. Source: xGETRF.
    """
    return batched(A, _lapack.getrf(*A.shape[-2:]))


@register_flops(ops("linalg_ldl_factor_ex"))
def ldl(A: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """A[n, n] = L @ D @ L^H. FLOPs: n^3/3 to leading order. Source: xSYTRF."""
    return batched(A, _lapack.sytrf(A.shape[-1]))


@register_flops(ops("geqrf"))
def geqrf(A: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """The reflectors of A[m, n]'s QR factorisation.

    FLOPs: 2k^2·max(m, n) - 2k^3/3 to leading order, k = min(m, n). Source: xGEQRF.
    """
    return batched(A, _lapack.geqrf(*A.shape[-2:]))


@register_flops(ops("linalg_qr"))
def qr(A: Tensor, mode: str = "reduced", *, out: Any, **_: Any) -> OpCost:
    """A[m, n] = Q @ R; mode "r" computes only R.

    FLOPs: those of ``aten.geqrf``, and for Q those of ``aten.linalg_householder_product``.
    Source: xGEQRF, then xORGQR.
    """
    m, n = A.shape[-2:]
    k = min(m, n)
    work = _lapack.geqrf(m, n)
    if mode != "r":
        work = work.plus(_lapack.orgqr(m, m if mode == "complete" else k, k))
    return batched(A, work)


@register_flops(ops("linalg_householder_product", "orgqr"))
def householder_product(A: Tensor, tau: Tensor, *, out: Any, **_: Any) -> OpCost:
    """The first n columns of the product of k reflectors in A[m, n].

    FLOPs: 4m·n·k - 2(m+n)·k^2 + 4k^3/3 to leading order. Source: xORGQR.
    """
    m, n = A.shape[-2:]
    return batched(A, _lapack.orgqr(m, n, tau.shape[-1]))


@register_flops(ops("ormqr"))
def ormqr(
    A: Tensor, tau: Tensor, other: Tensor, left: bool = True, *_args: Any, out: Any, **_: Any
) -> OpCost:
    """Q @ other[m, n] or other @ Q, Q the product of k reflectors.

    FLOPs: 4m·n·k - 2n·k^2 to leading order, from the right 4m·n·k - 2m·k^2. Source: xORMQR.
    """
    m, n = other.shape[-2:]
    return batched(other, _lapack.ormqr(m, n, tau.shape[-1], left=left))


@register_flops(ops("_linalg_svd"))
def svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, out: Any, **_: Any
) -> OpCost:
    """A[m, n] = U @ diag(S) @ Vh.

    FLOPs: for m >= n min(14m·n^2 + 8n^3, 6m·n^2 + 20n^3); with all of U, m > n,
    min(4m^2·n + 8m·n^2 + 9n^3, 4m^2·n + 22n^3); of the values alone
    min(4m·n^2 - 4n^3/3, 2m·n^2 + 2n^3).
    Source: LAPACK's gesvd; Golub and Van Loan, Matrix Computations, section 8.6.
    """
    return batched(A, _lapack.gesvd(*A.shape[-2:], vectors=compute_uv, full=full_matrices))


@register_flops(ops("_linalg_eigh"))
def eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True, *, out: Any, **_: Any) -> OpCost:
    """Eigenvalues and, if asked for, eigenvectors of a Hermitian A[n, n].

    FLOPs: 9n^3, of the values alone 4n^3/3.
    Source: Golub and Van Loan, Matrix Computations, section 8.3.
    """
    return batched(A, _lapack.syevd(A.shape[-1], vectors=compute_v))


@register_flops(ops("linalg_matrix_sqrth"))
def matrix_sqrth(A: Tensor, *, out: Any, **_: Any) -> OpCost:
    """√A = V·√max(λ, 0) @ Vᴴ of a Hermitian A[n, n], and its mean with its adjoint.

    MACs: n³. FLOPs: 2·MACs + eigh + 2·n (of the eigenvalues) + 3·n². Source: ATen's kernel.
    """
    n, batch = A.shape[-1], prod(A.shape[:-2])
    work = _lapack.syevd(n, vectors=True).plus(_lapack.scaled_and_symmetrised(n))
    return contraction(
        batch * n**3,
        complex_numbers=A.is_complex(),
        extra_flops=batched(A, work).flops + batch * 2 * n,
    )


@register_flops(ops("linalg_polar"))
def polar(A: Tensor, *, out: Any, **_: Any) -> OpCost:
    """A[m, n] = (U @ Vh) @ H with H = V·S @ Vh, and the mean of H with its adjoint.

    MACs: n³ + m·n². FLOPs: 2·MACs + svd + 3·n². Source: ATen's kernel.
    """
    m, n = A.shape[-2:]
    work = _lapack.gesvd(m, n, vectors=True, full=False).plus(_lapack.scaled_and_symmetrised(n))
    return contraction(
        prod(A.shape[:-2]) * (n**3 + m * n**2),
        complex_numbers=A.is_complex(),
        extra_flops=batched(A, work).flops,
    )


@register_flops(ops("linalg_eig"))
def eig(A: Tensor, *, out: Any, **_: Any) -> OpCost:
    """Eigenvalues and right eigenvectors of A[n, n]. FLOPs: 79n^3/3. Source: xGEEV."""
    return batched(A, _lapack.geev(A.shape[-1], vectors=True))


@register_flops(ops("linalg_eigvals", "_linalg_eigvals"))
def eigvals(A: Tensor, *, out: Any, **_: Any) -> OpCost:
    """Eigenvalues of A[n, n]. FLOPs: 10n^3. Source: xGEEV."""
    return batched(A, _lapack.geev(A.shape[-1], vectors=False))


# -- solvers and inverses ------------------------------------------------------------------


@register_flops(ops("_linalg_solve_ex"))
def solve(A: Tensor, B: Tensor, *, out: Any, **_: Any) -> OpCost:
    """X with A[n, n] @ X = B[n, r], or X @ A = B.

    FLOPs: 2n^3/3 + 2n^2·r to leading order. Source: xGETRF, then xGETRS.
    """
    n = A.shape[-1]
    solution = out[0]
    factor = batched(A, _lapack.getrf(n, n))
    return factor + batched_solve(solution, n, _lapack.getrs, A)


@register_flops(ops("linalg_lu_solve"))
def lu_solve(LU: Tensor, pivots: Tensor, B: Tensor, *, out: Any, **_: Any) -> OpCost:
    """X with A[n, n] @ X = B[n, r] from A's LU factorisation.

    FLOPs: 2n^2·r to leading order. Source: xGETRS.
    """
    return batched_solve(out, LU.shape[-1], _lapack.getrs, LU)


@register_flops(ops("cholesky_solve", "_cholesky_solve_helper"))
def cholesky_solve(B: Tensor, L: Tensor, upper: bool = False, *, out: Any, **_: Any) -> OpCost:
    """X with L @ L^H @ X = B[n, r]. FLOPs: 2n^2·r. Source: xPOTRS."""
    return batched_solve(out, L.shape[-1], _lapack.potrs, L)


@register_flops(ops("linalg_ldl_solve"))
def ldl_solve(LD: Tensor, pivots: Tensor, B: Tensor, *, out: Any, **_: Any) -> OpCost:
    """X with A[n, n] @ X = B[n, r] from A's LDL factorisation. FLOPs: 2n^2·r. Source: xSYTRS."""
    return batched_solve(out, LD.shape[-1], _lapack.potrs, LD)


@register_flops(ops("linalg_solve_triangular"))
def solve_triangular(
    A: Tensor, B: Tensor, *, unitriangular: bool = False, out: Any, **_: Any
) -> OpCost:
    """X with A[n, n] @ X = B[n, r] or X @ A = B, A a triangle.

    FLOPs: n^2·r; n·r less for a unit diagonal. Source: xTRSM.
    """
    return batched_solve(out, A.shape[-1], triangular(unitriangular), A)


@register_flops(ops("triangular_solve"), cacheable=False, by_name=True)
def triangular_solve(
    *, self: Tensor, A: Tensor, unitriangular: bool = False, out: Any, **_: Any
) -> OpCost:
    """FLOPs: those of ``aten.linalg_solve_triangular``. A sparse A[n, n]: 2 per stored element
    and right-hand side, for those on the diagonal 1, or 0 if it is a unit diagonal.
    """
    if A.layout is not torch.strided:
        return sparse_triangular_solve(self, A, unitriangular)
    return batched_solve(out[0], A.shape[-1], triangular(unitriangular), A)


@register_flops(ops("linalg_inv_ex"))
def inverse(A: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """A^-1. FLOPs: 2n^3 to leading order. Source: xGETRF, then xGETRI.

    (ATen solves for the identity, at up to 8n^3/3, without exploiting its zeros.)
    """
    n = A.shape[-1]
    return batched(A, _lapack.getrf(n, n).plus(_lapack.getri(n)))


@register_flops(ops("cholesky_inverse"))
def cholesky_inverse(L: Tensor, *_args: Any, out: Any, **_: Any) -> OpCost:
    """(L @ L^H)^-1. FLOPs: 2n^3/3 to leading order. Source: xPOTRI."""
    return batched(L, _lapack.potri(L.shape[-1]))


@register_flops(ops("linalg_lstsq"))
def lstsq(
    A: Tensor,
    B: Tensor,
    rcond: float | None = None,
    *,
    driver: str | None = None,
    out: Any,
    **_: Any,
) -> OpCost:
    """X minimising |A[m, n] @ X - B[m, r]|.

    FLOPs: drivers gels and gelsy (the default): factorise A, or A^H if it is wide, by QR; apply the
    reflectors; solve with the triangle (``aten.geqrf``, ``aten.ormqr``,
    ``aten.linalg_solve_triangular``). Drivers gelss and gelsd: the thin SVD, then
    V @ (S^-1 * (U^H @ B)), which is 2kr(m+n) + kr.
    """
    m, n = A.shape[-2:]
    tall, k = max(m, n), min(m, n)
    r = 1 if B.dim() == A.dim() - 1 else B.shape[-1]
    if driver in ("gelss", "gelsd"):
        project = k * r * (m + n)
        work = _lapack.gesvd(m, n, vectors=True, full=False)
        return batched(A, work.plus(Work(project + k * r, project)))
    work = _lapack.geqrf(tall, k).plus(_lapack.ormqr(tall, r, k))
    return batched(A, work.plus(_lapack.trsm(k, r)))


@register_flops(ops("linalg_pinv"))
def pinv(A: Tensor, *, hermitian: bool = False, out: Any, **_: Any) -> OpCost:
    """V @ diag(1/S) @ U^H from the thin SVD, or from the eigenvectors if Hermitian.

    MACs: mnk for the last product, k = min(m, n). FLOPs: 2·MACs, the factorisation, the largest of
    k values, a threshold, k comparisons and reciprocals, nk to scale V.
    """
    m, n = A.shape[-2:]
    k = min(m, n)
    batch = prod(A.shape[:-2])
    if hermitian:
        factor = _lapack.syevd(n, vectors=True)
    else:
        factor = _lapack.gesvd(m, n, vectors=True, full=False)
    scale = n * k * (2 if A.is_complex() else 1)
    return batched(A, factor) + contraction(
        batch * m * n * k,
        complex_numbers=A.is_complex(),
        extra_flops=batch * (3 * k + scale) if k else 0,
    )


# -- determinants and other functions of a matrix ------------------------------------------


@register_flops(ops("_linalg_det"))
def det(A: Tensor, *, out: Any, **_: Any) -> OpCost:
    """FLOPs: 2n^3/3 to leading order (xGETRF), the product of n pivots, and one more with the
    sign.
    """
    n = A.shape[-1]
    return batched(A, _lapack.getrf(n, n).plus(Work(n, 0)))


@register_flops(ops("_linalg_slogdet"))
def slogdet(A: Tensor, *, out: Any, **_: Any) -> OpCost:
    """The product of n pivots' signs and one more; the sum of n logarithms of moduli.

    FLOPs: 2n^3/3 to leading order (xGETRF), n signs, n products, n moduli, n logarithms, n - 1 sums
    of real numbers.
    """
    n = A.shape[-1]
    pivots = 4 * n - 1 if n else 0
    return batched(A, _lapack.getrf(n, n).plus(Work(n, 0))) + flops(prod(A.shape[:-2]) * pivots)


@register_flops(ops("linalg_matrix_exp"))
def matrix_exp(A: Tensor, *, out: Any, **_: Any) -> OpCost:
    """exp(A[n, n]) by a Taylor polynomial of degree 18: 5 matrix products.

    MACs: 5 n^3. The norm of A is data: a small one takes fewer products, and for each halving that
    a large one takes, the result is squared. n = 1 is one exponential per element.
    Source: Bader, Blanes and Casas (Mathematics 7, 2019), the algorithm that ATen runs.
    """
    n = A.shape[-1]
    if n <= 1:
        return flops(A.numel())
    return contraction(5 * prod(A.shape[:-2]) * n**3, complex_numbers=A.is_complex())


@register_flops(ops("_compute_linear_combination"))
def linear_combination(terms: Tensor, coefficients: Tensor, *, out: Any, **_: Any) -> OpCost:
    """out[i] = sum over j of coefficients[i, j] * terms[j].

    MACs: one per coefficient and element of a term. FLOPs: 2·MACs.
    """
    elements = prod(terms.shape[1:])
    return contraction(coefficients.numel() * elements, complex_numbers=terms.is_complex())


@register_flops(ops("linalg_cross"))
def cross(a: Tensor, b: Tensor, *, dim: int = -1, out: Tensor, **_: Any) -> OpCost:
    """Each element of the cross product: two products, one difference."""
    elements = out.numel()
    if not (out.is_floating_point() or out.is_complex()):
        return flops(0)
    return flops(Work(2 * elements, elements).flops(complex_numbers=out.is_complex()))


# -- helpers -------------------------------------------------------------------------------


def batched(A: Tensor, work: Work) -> OpCost:
    """Return the cost of ``work`` for each matrix of the batch A[..., m, n]."""
    if not A.numel():
        return flops(0)
    return flops(prod(A.shape[:-2]) * work.flops(complex_numbers=A.is_complex()))


def batched_solve(X: Tensor, n: int, routine: Callable[[int, int], Work], A: Tensor) -> OpCost:
    """Return the cost of solving for ``X``, which has n unknowns per right-hand side.

    Right-hand sides are counted in the result, which covers vectors, matrices, solving from
    either side, and broadcast batches.
    """
    if not X.numel():
        return flops(0)
    return flops(routine(n, X.numel() // n).flops(complex_numbers=A.is_complex()))


def triangular(unit: bool) -> Callable[[int, int], Work]:
    """Return xTRSM with or without divisions by the diagonal."""
    return partial(_lapack.trsm, unit=unit)


def sparse_triangular_solve(B: Tensor, A: Tensor, unit: bool) -> OpCost:
    """One product and one sum for each stored element and right-hand side; for those on the
    diagonal a division instead, or nothing for a unit diagonal."""
    r = B.numel() // A.shape[-1]
    nnz = A._nnz()
    work = Work(r * (nnz - A.shape[-1] if unit else nnz), r * max(nnz - A.shape[-1], 0))
    return flops(work.flops(complex_numbers=A.is_complex()))
