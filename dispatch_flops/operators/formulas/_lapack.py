"""Operation counts of LAPACK's routines, per matrix.

The formulas are those of LAPACK Working Note 41 (Installation Guide for LAPACK, appendix C) where
it has one, with fractions written so that every count is an exact int. A division or a square root
counts as one multiplication. ``getrf`` for m < n follows the scalar algorithm. The iterative
routines (svd, eig, eigh) depend on the data; they use the customary leading terms of Golub and
Van Loan (Matrix Computations) and of the LAPACK Users' Guide (table 3.13), rounded down.

Letters: m rows, n columns, k reflectors or pivots, r right-hand sides.
"""

from __future__ import annotations

from typing import NamedTuple

from dispatch_flops.operators.formulas._arithmetic import COMPLEX_ADD, COMPLEX_MUL


class Work(NamedTuple):
    """Multiplications and additions of one matrix; a complex one takes 6 and 2 FLOPs."""

    mults: int
    adds: int

    def plus(self, other: Work) -> Work:
        return Work(self.mults + other.mults, self.adds + other.adds)

    def flops(self, *, complex_numbers: bool) -> int:
        if complex_numbers:
            return COMPLEX_MUL * self.mults + COMPLEX_ADD * self.adds
        return self.mults + self.adds


def potrf(n: int) -> Work:
    """Cholesky factor: n^3/3 FLOPs to leading order."""
    adds = (n**3 - n) // 6
    return Work(adds + n * (n + 1) // 2, adds)


def potri(n: int) -> Work:
    """Inverse from a Cholesky factor: 2n^3/3."""
    return Work((2 * n**3 + 6 * n**2 + 4 * n) // 6, (2 * n**3 - 3 * n**2 + n) // 6)


def potrs(n: int, r: int) -> Work:
    """Solution from a Cholesky factor, or from sytrf's: 2n^2 r."""
    return Work(r * n * (n + 1), r * n * (n - 1))


def sytrf(n: int) -> Work:
    """Bunch-Kaufman factorisation of a symmetric matrix: n^3/3."""
    return Work((n**3 + 3 * n**2 + 20 * n) // 6, (n**3 - n) // 6)


def getrf(m: int, n: int) -> Work:
    """LU with row pivoting: 2n^3/3 for m = n.

    Step i = 1..k, k = min(m, n), takes a reciprocal, scales m-i elements and updates
    (m-i)(n-i); the sums of i and of i^2 are k(k+1)/2 and k(k+1)(2k+1)/6.
    """
    k = min(m, n)
    line, square = k * (k + 1) // 2, k * (k + 1) * (2 * k + 1) // 6
    update = m * n * k - (m + n) * line + square
    return Work(update + m * k - line + k, update)


def getri(n: int) -> Work:
    """Inverse from an LU factorisation: 4n^3/3."""
    return Work((4 * n**3 + 3 * n**2 + 5 * n) // 6, (4 * n**3 - 9 * n**2 + 5 * n) // 6)


def getrs(n: int, r: int) -> Work:
    """Solution from an LU factorisation, one triangle having a unit diagonal: 2n^2 r."""
    return Work(r * n**2, r * n * (n - 1))


def trsm(n: int, r: int, *, unit: bool = False) -> Work:
    """Triangular solve: n^2 r; a unit diagonal saves n divisions per right-hand side."""
    half = r * n * (n - 1) // 2
    return Work(half if unit else half + r * n, half)


def geqrf(m: int, n: int) -> Work:
    """Householder QR: 2mn^2 - 2n^3/3 for m >= n."""
    if m > n:
        shared = 6 * m * n**2 - 2 * n**3 + 3 * n**2
        return Work((shared + 6 * m * n + 23 * n) // 6, (shared + 5 * n) // 6)
    shared = 6 * n * m**2 - 2 * m**3 - 3 * m**2 + 6 * m * n
    return Work((shared + 6 * m * n + 23 * m) // 6, (shared + 5 * m) // 6)


def orgqr(m: int, n: int, k: int) -> Work:
    """The first n columns of a product of k reflectors of length m: 4mnk - 2(m+n)k^2 + 4k^3/3."""
    shared = 6 * m * n * k - 3 * (m + n) * k**2 + 2 * k**3
    return Work(
        (shared + 6 * n * k - 3 * k**2 - 5 * k) // 3, (shared + 3 * n * k - 3 * m * k + k) // 3
    )


def ormqr(m: int, n: int, k: int, *, left: bool = True) -> Work:
    """A product of k reflectors times an m x n matrix, from the left or from the right."""
    if left:
        return Work(n * k * (2 * m - k + 2), n * k * (2 * m - k + 1))
    mults = 2 * k * m * (2 * n - k + 1) + 2 * k * n - k**2 + k
    return Work(mults // 2, m * k * (2 * n - k + 1))


def gesvd(m: int, n: int, *, vectors: bool, full: bool) -> Work:
    """Singular values, with all singular vectors (full), the first min(m, n), or none.

    The cheaper of the Golub-Reinsch algorithm and of QR followed by it, for m >= n. Values:
    min(4mn^2 - 4n^3/3, 2mn^2 + 2n^3). Thin: min(14mn^2 + 8n^3, 6mn^2 + 20n^3). Full:
    min(4m^2n + 8mn^2 + 9n^3, 4m^2n + 22n^3). Golub and Van Loan, section 8.6.
    """
    m, n = max(m, n), min(m, n)
    if not vectors:
        direct, reduced = (12 * m * n**2 - 4 * n**3) // 3, 2 * m * n**2 + 2 * n**3
    elif full and m > n:
        direct = 4 * m**2 * n + 8 * m * n**2 + 9 * n**3
        reduced = 4 * m**2 * n + 22 * n**3
    else:
        direct, reduced = 14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3
    return balanced(min(direct, reduced))


def syevd(n: int, *, vectors: bool) -> Work:
    """Eigenvalues (4n^3/3) or also eigenvectors (9n^3) of a symmetric matrix: the symmetric QR
    algorithm, Golub and Van Loan, section 8.3."""
    return balanced(9 * n**3 if vectors else 4 * n**3 // 3)


def geev(n: int, *, vectors: bool) -> Work:
    """Eigenvalues (10n^3) or also right eigenvectors (79n^3/3) of a general matrix: LAPACK
    Users' Guide, table 3.13."""
    return balanced(79 * n**3 // 3 if vectors else 10 * n**3)


def balanced(count: int) -> Work:
    """Return ``count`` FLOPs of which half are multiplications, as in sums of products."""
    return Work(count - count // 2, count // 2)


def scaled_and_symmetrised(n: int) -> Work:
    """V[n, n]·s, and (X + Xᴴ) / 2 for the product X of that."""
    return Work(2 * n * n, n * n)
