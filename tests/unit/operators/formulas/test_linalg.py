"""Factorisations: against scalar algorithms that count, and against products of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dispatch_flops.operators.formulas import _lapack
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
N, R, BATCH = 5, 3, 2
A = torch.eye(N).repeat(BATCH, 1, 1) * 3 + 0.1
B = torch.ones(BATCH, N, R)


class Scalar:
    """A number that counts the products and sums it is used in; a root or a quotient is one
    product."""

    mults = adds = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __mul__(self, other: Scalar) -> Scalar:
        Scalar.mults += 1
        return Scalar(self.value * other.value)

    def __truediv__(self, other: Scalar) -> Scalar:
        Scalar.mults += 1
        return Scalar(self.value / other.value)

    def __sub__(self, other: Scalar) -> Scalar:
        Scalar.adds += 1
        return Scalar(self.value - other.value)

    def __add__(self, other: Scalar) -> Scalar:
        Scalar.adds += 1
        return Scalar(self.value + other.value)

    def sqrt(self) -> Scalar:
        Scalar.mults += 1
        return Scalar(self.value**0.5)


def scalars(matrix: torch.Tensor) -> list[list[Scalar]]:
    return [[Scalar(value) for value in row] for row in matrix.tolist()]


def work(algorithm: Callable[..., Any], *args: Any) -> tuple[int, int]:
    Scalar.mults = Scalar.adds = 0
    algorithm(*args)
    return Scalar.mults, Scalar.adds


def lu(a: list[list[Scalar]]) -> None:
    m, n = len(a), len(a[0])
    for k in range(min(m, n)):
        reciprocal = Scalar(1) / a[k][k]
        for i in range(k + 1, m):
            a[i][k] = a[i][k] * reciprocal
            for j in range(k + 1, n):
                a[i][j] = a[i][j] - a[i][k] * a[k][j]


def cholesky(a: list[list[Scalar]]) -> None:
    for k in range(len(a)):
        a[k][k] = a[k][k].sqrt()
        for i in range(k + 1, len(a)):
            a[i][k] = a[i][k] / a[k][k]
        for j in range(k + 1, len(a)):
            for i in range(j, len(a)):
                a[i][j] = a[i][j] - a[i][k] * a[j][k]


def forward_substitution(a: list[list[Scalar]], b: list[list[Scalar]], unit: bool) -> None:
    for column in range(len(b[0])):
        for i in range(len(a)):
            for k in range(i):
                b[i][column] = b[i][column] - a[i][k] * b[k][column]
            if not unit:
                b[i][column] = b[i][column] / a[i][i]


def solve_lu(a: list[list[Scalar]], b: list[list[Scalar]]) -> None:
    forward_substitution(a, b, unit=True)
    forward_substitution(a, b, unit=False)  # backwards, which takes as much


def solve_cholesky(a: list[list[Scalar]], b: list[list[Scalar]]) -> None:
    forward_substitution(a, b, unit=False)
    forward_substitution(a, b, unit=False)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (4, 4), (7, 3), (3, 7)])
def test_lu_matches_the_scalar_algorithm(m: int, n: int) -> None:
    matrix = torch.rand(m, n) + 3 * torch.eye(m, n)
    assert work(lu, scalars(matrix)) == _lapack.getrf(m, n)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_symmetric_and_triangular_routines_match_scalar_algorithms(n: int) -> None:
    matrix = scalars(torch.rand(n, n) + n * torch.eye(n))
    rhs = scalars(torch.rand(n, R))
    assert work(cholesky, scalars(torch.eye(n))) == _lapack.potrf(n)
    assert work(forward_substitution, matrix, rhs, False) == _lapack.trsm(n, R)
    assert work(forward_substitution, matrix, rhs, True) == _lapack.trsm(n, R, unit=True)
    assert work(solve_lu, matrix, rhs) == _lapack.getrs(n, R)
    assert work(solve_cholesky, matrix, rhs) == _lapack.potrs(n, R)


LEADING = {
    "potrf": (_lapack.potrf, (1000,), 1000**3 / 3),
    "potri": (_lapack.potri, (1000,), 2 * 1000**3 / 3),
    "sytrf": (_lapack.sytrf, (1000,), 1000**3 / 3),
    "getrf": (_lapack.getrf, (1000, 1000), 2 * 1000**3 / 3),
    "getri": (_lapack.getri, (1000,), 4 * 1000**3 / 3),
    "geqrf tall": (_lapack.geqrf, (2000, 1000), 2 * 2000 * 1000**2 - 2 * 1000**3 / 3),
    "geqrf wide": (_lapack.geqrf, (1000, 2000), 2 * 2000 * 1000**2 - 2 * 1000**3 / 3),
    "orgqr": (_lapack.orgqr, (2000, 1000, 1000), 2 * 2000 * 1000**2 - 2 * 1000**3 / 3),
    "ormqr": (_lapack.ormqr, (2000, 500, 1000), 4 * 2000 * 500 * 1000 - 2 * 500 * 1000**2),
}


@pytest.mark.parametrize("name", LEADING)
def test_routine_for_large_sizes_matches_its_leading_terms(name: str) -> None:
    routine, sizes, leading = LEADING[name]
    assert sum(routine(*sizes)) == pytest.approx(leading, rel=0.01)


@pytest.mark.parametrize("m", range(1, 8))
@pytest.mark.parametrize("n", range(1, 8))
def test_routine_counts_are_whole_numbers(m: int, n: int) -> None:
    """The working note's fractions are whole: their numerators are divisible by 6 or 3."""
    k = min(m, n)
    mults, adds = _lapack.geqrf(m, n)
    if m > n:
        assert 6 * mults == n * (n * (3 - 2 * n + 6 * m) + 6 * m + 23)
        assert 6 * adds == n * (n * (3 - 2 * n + 6 * m) + 5)
    else:
        assert 6 * mults == m * (m * (-3 - 2 * m + 6 * n) + 12 * n + 23)
        assert 6 * adds == m * (m * (-3 - 2 * m + 6 * n) + 6 * n + 5)
    mults, adds = _lapack.orgqr(m, n, k)
    assert 3 * mults == k * (6 * m * n + 6 * n - 5 + k * (2 * k - 3 * (m + n) - 3))
    assert 3 * adds == k * (6 * m * n + 3 * n - 3 * m + 1 + k * (2 * k - 3 * (m + n)))
    mults, adds = _lapack.getri(n)
    assert (6 * mults, 6 * adds) == (n * (5 + n * (4 * n + 3)), n * (5 + n * (4 * n - 9)))


def flops_of(fn: Callable[[], Any]) -> int:
    total = profile_of(fn).total()
    assert total.macs == 0
    return total.flops


LU, PIVOTS = torch.linalg.lu_factor(A)
GETRF, GETRS = sum(_lapack.getrf(N, N)), sum(_lapack.getrs(N, R))

OPERATORS = {
    "cholesky_ex": (lambda: torch.linalg.cholesky_ex(A), sum(_lapack.potrf(N))),
    "lu_factor": (lambda: torch.linalg.lu_factor_ex(A), GETRF),
    "lu": (lambda: torch.linalg.lu(A), GETRF),
    "ldl": (lambda: torch.linalg.ldl_factor_ex(A), sum(_lapack.sytrf(N))),
    "solve": (lambda: torch.linalg.solve_ex(A, B), GETRF + GETRS),
    "solve from the right": (
        lambda: torch.linalg.solve_ex(A, B.mT.contiguous(), left=False),
        GETRF + GETRS,
    ),
    "solve a vector": (
        lambda: torch.linalg.solve_ex(A, B[..., 0]),
        GETRF + sum(_lapack.getrs(N, 1)),
    ),
    "inv": (lambda: torch.linalg.inv_ex(A), GETRF + sum(_lapack.getri(N))),
    "triangular": (
        lambda: torch.linalg.solve_triangular(A, B, upper=True),
        sum(_lapack.trsm(N, R)),
    ),
    "triangular, unit": (
        lambda: torch.linalg.solve_triangular(A, B, upper=True, unitriangular=True),
        sum(_lapack.trsm(N, R, unit=True)),
    ),
    "lu_solve": (lambda: torch.linalg.lu_solve(LU, PIVOTS, B), GETRS),
    "lu_solve from the right": (
        lambda: torch.linalg.lu_solve(LU, PIVOTS, B.mT.contiguous(), left=False),
        GETRS,
    ),
    "ldl_solve": (lambda: torch.linalg.ldl_solve(A, PIVOTS, B), sum(_lapack.potrs(N, R))),
    "geqrf": (lambda: torch.geqrf(A), sum(_lapack.geqrf(N, N))),
    "cholesky_solve": (lambda: torch.cholesky_solve(B, A), sum(_lapack.potrs(N, R))),
    "cholesky_inverse": (lambda: torch.cholesky_inverse(A), sum(_lapack.potri(N))),
    "qr": (
        lambda: torch.linalg.qr(A),
        sum(_lapack.geqrf(N, N)) + sum(_lapack.orgqr(N, N, N)),
    ),
    "qr, r alone": (lambda: torch.linalg.qr(A, mode="r"), sum(_lapack.geqrf(N, N))),
    "det": (lambda: torch.linalg.det(A), GETRF + N),
    "slogdet": (lambda: torch.linalg.slogdet(A), GETRF + 5 * N - 1),
    "eigh": (lambda: torch.linalg.eigh(A), 9 * N**3),
    # torch.linalg.eigvalsh, eigvals and svdvals compute vectors too while any mode is active.
    "eigvalsh": (lambda: aten._linalg_eigh(A, compute_v=False), 4 * N**3 // 3),
    "eig": (lambda: torch.linalg.eig(A), 79 * N**3 // 3),
    "eigvals": (lambda: aten._linalg_eigvals(A), 10 * N**3),
    "svd": (lambda: torch.linalg.svd(A), 22 * N**3),
    "svdvals": (lambda: aten._linalg_svd(A, compute_uv=False), (12 - 4) * N**3 // 3),
    "cross of integers": (lambda: torch.linalg.cross(B.long(), B.long()), 0),
    "cross": (lambda: torch.linalg.cross(B, B), N * R * 3),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_costs_its_routine_per_matrix(name: str) -> None:
    fn, each = OPERATORS[name]
    assert flops_of(fn) == BATCH * each


def test_qr_of_every_mode_and_shape_matches_its_routines() -> None:
    tall, wide = torch.rand(7, 3), torch.rand(3, 7)
    assert flops_of(lambda: torch.linalg.qr(tall)) == (
        sum(_lapack.geqrf(7, 3)) + sum(_lapack.orgqr(7, 3, 3))
    )
    assert flops_of(lambda: torch.linalg.qr(tall, mode="complete")) == (
        sum(_lapack.geqrf(7, 3)) + sum(_lapack.orgqr(7, 7, 3))
    )
    assert flops_of(lambda: torch.linalg.qr(wide)) == (
        sum(_lapack.geqrf(3, 7)) + sum(_lapack.orgqr(3, 3, 3))
    )


def test_svd_of_a_tall_matrix_takes_the_cheaper_algorithm() -> None:
    tall = torch.rand(100, 3)
    assert flops_of(lambda: torch.linalg.svd(tall, full_matrices=False)) == (6 * 100 * 9 + 20 * 27)
    assert flops_of(lambda: torch.linalg.svd(tall.mT, full_matrices=False)) == (
        6 * 100 * 9 + 20 * 27
    )
    assert flops_of(lambda: torch.linalg.svd(tall)) == 4 * 100**2 * 3 + 22 * 27


@pytest.mark.parametrize("driver", ["gels", "gelsy", "gelsd"])
@pytest.mark.parametrize(("m", "n"), [(7, 5), (5, 7)])
def test_least_squares_matches_the_drivers_routines(driver: str, m: int, n: int) -> None:
    a, b = torch.rand(m, n), torch.rand(m, R)
    if driver == "gelsd":
        expected = sum(_lapack.gesvd(m, n, vectors=True, full=False))
        expected += 2 * 5 * R * (m + n) + 5 * R
    else:
        expected = sum(_lapack.geqrf(7, 5)) + sum(_lapack.ormqr(7, R, 5)) + 5 * 5 * R
    assert flops_of(lambda: torch.linalg.lstsq(a, b, driver=driver).solution) == expected


def test_complex_factorisation_counts_six_per_product_and_two_per_sum() -> None:
    a = torch.eye(N, dtype=torch.complex64)
    mults, adds = _lapack.potrf(N)
    assert flops_of(lambda: torch.linalg.cholesky_ex(a)) == 6 * mults + 2 * adds
    mults, adds = _lapack.getrf(N, N)
    assert flops_of(lambda: torch.linalg.lu_factor_ex(a)) == 6 * mults + 2 * adds


def test_ormqr_counts_each_reflector() -> None:
    """k reflectors of length L = m, m-1, ...; each is a product w = C^H v, a scaling by tau (of w
    from the left, of v from the right) and an update C - v w: L products each, and L sums.
    """
    m, n, k = 7, 3, 5
    lengths = sum(range(m - k + 1, m + 1))
    left = (2 * n * lengths + n * k) + 2 * n * lengths
    right = (2 * n * lengths + lengths) + 2 * n * lengths
    reflectors, tau = torch.rand(m, k), torch.rand(k)
    assert flops_of(lambda: torch.ormqr(reflectors, tau, torch.rand(m, n))) == left
    assert flops_of(lambda: torch.ormqr(reflectors, tau, torch.rand(n, m), left=False)) == right
    batch = flops_of(
        lambda: torch.ormqr(reflectors.repeat(2, 1, 1), tau.repeat(2, 1), torch.rand(2, m, n))
    )
    assert batch == 2 * left


def test_householder_product_matches_its_routine() -> None:
    reflectors, tau = torch.rand(2, 7, 5), torch.rand(2, 3)
    assert flops_of(lambda: torch.linalg.householder_product(reflectors, tau)) == (
        2 * sum(_lapack.orgqr(7, 5, 3))
    )


def test_matrix_exp_is_five_products() -> None:
    total = profile_of(torch.linalg.matrix_exp, A).total()
    assert (total.macs, total.flops) == (5 * BATCH * N**3, 2 * 5 * BATCH * N**3)
    assert flops_of(lambda: torch.linalg.matrix_exp(torch.ones(7, 1, 1))) == 7


def test_pinv_ends_in_a_product() -> None:
    """Of 3 singular values: the largest, 3 comparisons, 3 reciprocals; 3 * 3 to scale V."""
    total = profile_of(torch.linalg.pinv, torch.rand(2, 7, 3)).by_operator()
    cost = total["aten.linalg_pinv.atol_rtol_tensor"].cost
    assert cost is not None
    assert cost.macs == 2 * 7 * 3 * 3
    svd = sum(_lapack.gesvd(7, 3, vectors=True, full=False))
    assert cost.flops == 2 * cost.macs + 2 * (svd + 3 * 3 + 3 * 3)


def test_operator_on_empty_matrices_is_free() -> None:
    empty = torch.rand(0, N, N)
    assert flops_of(lambda: torch.linalg.cholesky_ex(empty)) == 0
    assert flops_of(lambda: torch.linalg.solve_ex(torch.rand(0, 0), torch.rand(0, R))) == 0


def test_operator_on_meta_counts_as_on_cpu() -> None:
    a, b = A.to("meta"), B.to("meta")
    assert flops_of(lambda: torch.linalg.solve_ex(a, b)) == BATCH * (GETRF + GETRS)


@pytest.mark.skipif(not hasattr(aten, "linalg_polar"), reason="this torch lacks them")
@pytest.mark.parametrize("dtype", [torch.double, torch.complex128])
def test_hermitian_root_and_polar_cost_their_steps(dtype: torch.dtype) -> None:
    """The steps are those of ATen's kernels."""
    tall = torch.rand(2, 7, 5, dtype=dtype)
    hermitian = tall.mH @ tall

    def mean_with_adjoint(x: torch.Tensor) -> torch.Tensor:
        return (x + x.mH) * torch.tensor(0.5, dtype=dtype)

    def root() -> torch.Tensor:
        values, vectors = torch.linalg.eigh(hermitian)
        scaled = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)
        return mean_with_adjoint(scaled @ vectors.mH)

    def polar() -> tuple[torch.Tensor, torch.Tensor]:
        u, s, vh = torch.linalg.svd(tall, full_matrices=False)
        return u @ vh, mean_with_adjoint((vh.mH * s.unsqueeze(-2)) @ vh)

    for op, args, steps in (
        (aten.linalg_matrix_sqrth, (hermitian,), root),
        (aten.linalg_polar, (tall,), polar),
    ):
        whole, parts = profile_of(op, *args, strict=True).total(), profile_of(steps).total()
        assert (whole.macs, whole.flops) == (parts.macs, parts.flops)
