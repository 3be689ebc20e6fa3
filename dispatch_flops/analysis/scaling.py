"""How a count grows with a size: the k of count ~ size^k, from a grid of runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression

Point = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponent:
    """The growth of a count with one size, the others held.

    overall: least-squares slope in logarithms over all sizes. last: between the two largest,
    which is nearer to what the count tends to.
    """

    name: str
    smallest: float
    largest: float
    overall: float
    last: float


def exponents(points: Sequence[Point], counts: Sequence[float]) -> list[Exponent]:
    """One exponent per size that varies over positive values; counts must be positive.

    points: the full grid of all sizes, so that what the others contribute averages out
    alike at each value of the one.
    """
    if not points or min(counts) <= 0:
        return []
    found = []
    for name in points[0]:
        means = _mean_logs(name, points, counts)
        if len(means) > 1 and min(means) > 0:
            sizes = sorted(means)
            found.append(
                Exponent(
                    name=name,
                    smallest=sizes[0],
                    largest=sizes[-1],
                    overall=_slope(means),
                    last=_slope({size: means[size] for size in sizes[-2:]}),
                )
            )
    return found


def _mean_logs(name: str, points: Sequence[Point], counts: Sequence[float]) -> dict[float, float]:
    """``{size: mean of log count}`` over all points of that size."""
    logs: dict[float, list[float]] = {}
    for point, count in zip(points, counts, strict=True):
        logs.setdefault(point[name], []).append(math.log(count))
    return {size: sum(values) / len(values) for size, values in logs.items()}


def _slope(means: Mapping[float, float]) -> float:
    """Of log count over log size, by least squares."""
    return linear_regression([math.log(size) for size in means], list(means.values())).slope
