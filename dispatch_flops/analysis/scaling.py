"""Scaling: how a count grows with a size, the k of count ~ size^k."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import linear_regression

from dispatch_flops.errors import ConfigError

Point = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exponent:
    """Growth of a count with one size, the other sizes fixed.

    name: of the size. smallest, largest: its values.
    overall: exponent fitted over all values. last: exponent between the two largest, which is
        closer to the limit for large sizes.

    Example::

        [growth] = exponents([{"seq": 8}, {"seq": 16}, {"seq": 32}], [80, 288, 1088])
        print(f"{growth.overall:.2f}, then {growth.last:.2f}")  # prints 1.88, then 1.92
    """

    name: str
    smallest: float
    largest: float
    overall: float
    last: float


def exponents(points: Sequence[Point], counts: Sequence[float]) -> list[Exponent]:
    """Return one exponent per size that varies over positive, finite values.

    The result is empty unless all counts are positive. Raises ConfigError unless there is one for
    each point.

    points: ``{size name: value}`` of each run. They must be the full grid of all sizes, so that
        the other sizes contribute the same average at each value of one.
    counts: one per point.

    Example::

        runs = [{"batch": 1, "seq": 2}, {"batch": 1, "seq": 4}, {"batch": 1, "seq": 8}]
        for growth in exponents(runs, [4, 16, 64]):
            print(f"{growth.name}^{growth.overall:.1f}")  # prints seq^2.0
    """
    if len(points) != len(counts):
        raise ConfigError(f"{len(counts)} counts of {len(points)} points: pass one for each point")
    if not points or min(counts) <= 0:
        return []
    found = []
    for name in points[0]:
        means = _mean_logs(name, points, counts)
        if len(means) > 1 and all(0 < size < math.inf for size in means):
            sizes = sorted(means)
            found.append(
                Exponent(
                    name=name,
                    smallest=sizes[0],
                    largest=sizes[-1],
                    overall=_log_slope(sizes, [means[size] for size in sizes]),
                    last=_log_slope(sizes[-2:], [means[size] for size in sizes[-2:]]),
                )
            )
    return found


def exponent(sizes: Sequence[float], counts: Sequence[float]) -> float:
    """Return the exponent of one curve, fitted by least squares in logarithms.

    sizes, counts: of the same length.

    Raises ConfigError unless there is a positive count for each positive size, and at least two
    different sizes.

    Example::

        print(f"{exponent([64, 128, 256], [4096, 16384, 65536]):.1f}")  # prints 2.0
    """
    if len(sizes) != len(counts) or len(set(sizes)) < 2 or min(*sizes, *counts) <= 0:
        raise ConfigError(
            "an exponent needs a positive count for each size; give at least two different sizes"
        )
    return _log_slope(sizes, [math.log(count) for count in counts])


def _mean_logs(name: str, points: Sequence[Point], counts: Sequence[float]) -> dict[float, float]:
    """Return ``{value: mean of log count}`` over all points with that value of one size."""
    logs: dict[float, list[float]] = {}
    for point, count in zip(points, counts, strict=True):
        logs.setdefault(point[name], []).append(math.log(count))
    return {size: sum(values) / len(values) for size, values in logs.items()}


def _log_slope(sizes: Sequence[float], log_counts: Sequence[float]) -> float:
    """Return the least-squares slope of log count over log size."""
    return linear_regression([math.log(size) for size in sizes], log_counts).slope
