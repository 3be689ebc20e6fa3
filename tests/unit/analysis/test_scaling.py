"""Exponents of counts over sizes."""

from __future__ import annotations

import math

import pytest

from dispatch_flops.analysis.scaling import exponent, exponents
from dispatch_flops.errors import ConfigError


def test_exponents_of_powers_are_exact() -> None:
    grid = [{"b": b, "s": s} for b in (1, 2, 4) for s in (16, 64)]
    found = exponents(grid, [11 * p["b"] * p["s"] ** 2 for p in grid])
    assert [(e.name, round(e.overall, 9), round(e.last, 9)) for e in found] == [
        ("b", 1, 1), ("s", 2, 2)
    ]  # fmt: skip
    assert [(e.smallest, e.largest) for e in found] == [(1, 4), (16, 64)]


def test_exponents_at_the_upper_end_are_nearer_to_the_limit() -> None:
    sizes = [1, 10, 100, 1000]
    (found,) = exponents([{"s": s} for s in sizes], [100 * s + s * s for s in sizes])
    assert 1 < found.overall < found.last < 2


def test_exponents_of_a_size_that_does_not_vary_are_omitted() -> None:
    assert exponents([], []) == []
    assert exponents([{"s": 1}, {"s": 2}], [0, 3]) == []
    assert exponents([{"s": 0}, {"s": 2}], [1, 3]) == []
    assert exponents([{"s": 1}, {"s": math.inf}], [1, 3]) == []
    assert exponents([{"s": 2, "b": 1}], [3]) == []


@pytest.mark.parametrize("counts", [[], [1], [1, 2, 3]])
def test_exponents_of_counts_that_are_not_one_for_each_point_raise(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"{len(counts)} counts of 2 points: pass one for each"):
        exponents([{"s": 1}, {"s": 2}], counts)


def test_exponent_of_a_power_is_its_exponent() -> None:
    sizes = [2, 4, 8, 8]
    assert exponent(sizes, [7 * size**3 for size in sizes]) == pytest.approx(3)


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [([], []), ([2, 4], [1]), ([2, 2], [1, 1]), ([0, 1], [1, 1]), ([1, 2], [0, 1])],
)
def test_exponent_of_a_curve_without_one_raises(sizes: list[int], counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="positive count for each size"):
        exponent(sizes, counts)
