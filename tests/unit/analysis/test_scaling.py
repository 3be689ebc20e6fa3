"""Fitted exponents: how a count grows with each size of a grid."""

from __future__ import annotations

from dispatch_flops.analysis.scaling import exponents


def test_exponents_of_powers_are_exact() -> None:
    grid = [{"b": b, "s": s} for b in (1, 2, 4) for s in (16, 64)]
    found = exponents(grid, [11 * p["b"] * p["s"] ** 2 for p in grid])
    assert [(e.name, round(e.overall, 9), round(e.last, 9)) for e in found] == [
        ("b", 1, 1), ("s", 2, 2)
    ]  # fmt: skip
    assert [(e.smallest, e.largest) for e in found] == [(1, 4), (16, 64)]


def test_exponent_at_the_upper_end_is_nearer_to_the_asymptotic_one() -> None:
    sizes = [1, 10, 100, 1000]
    (found,) = exponents([{"s": s} for s in sizes], [100 * s + s * s for s in sizes])
    assert 1 < found.overall < found.last < 2


def test_exponents_need_a_size_that_varies_and_positive_numbers() -> None:
    assert exponents([], []) == []
    assert exponents([{"s": 1}, {"s": 2}], [0, 3]) == []
    assert exponents([{"s": 0}, {"s": 2}], [1, 3]) == []
    assert exponents([{"s": 2, "b": 1}], [3]) == []
