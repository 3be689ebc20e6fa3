"""Timed calls, and latencies of modules put together from several passes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.timing.devices import CPU, Devices, Now


def time_call(
    run: Callable[[], Any], *, devices: Devices = CPU, repeats: int, now: Now | None = None
) -> tuple[float, float | None]:
    """Median seconds of some calls, devices synchronised, and half their range (of one: None)."""
    clock = now or devices.clock()
    taken = []
    for _ in range(repeats):
        start = clock()
        run()
        taken.append(clock() - start)
    spread = (max(taken) - min(taken)) / 2 if repeats > 1 else None
    return statistics.median(taken), spread


def fit_to_whole(seconds: dict[str, float], root: str, whole: float) -> dict[str, float]:
    """Module latencies brought to the scale of the model's own, measured without any hook.

    The pass with hooks is another run of the same model: its root takes a little more or less
    than ``whole``. Scaling by that one factor keeps every sum of children within its parent.
    """
    measured = seconds.get(root)
    if not measured:
        return seconds
    factor = whole / measured
    return {fqn: value * factor for fqn, value in seconds.items()}


def medians(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each module's median over the passes in which it ran."""
    taken: dict[str, list[float]] = {}
    for seconds in passes:
        for fqn, value in seconds.items():
            taken.setdefault(fqn, []).append(value)
    return {fqn: statistics.median(values) for fqn, values in taken.items()}


def spreads(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """How far passes lie from each module's median, in the median, as shares of it.

    Empty for one pass; a module that took no time has none.
    """
    middle = medians(passes)
    shares = [
        {fqn: abs(value / middle[fqn] - 1) for fqn, value in seconds.items() if middle[fqn]}
        for seconds in passes
    ]
    return medians(shares) if len(passes) > 1 else {}


def within_parents(seconds: Mapping[str, float], names: ModuleNames) -> dict[str, float]:
    """Latencies of which no module's children have more than itself.

    Medians of several passes are not of one and the same; where those of a module's children
    exceed its own, they are scaled to fit in, and what is below them with them.
    """
    fitted = dict(seconds)
    below: dict[str, list[str]] = {}
    for fqn in seconds:
        above = _nearest_above(fqn, fitted, names)
        if above is not None:
            below.setdefault(above, []).append(fqn)
    for parent in sorted(below, key=lambda fqn: fqn.count(".") + bool(fqn)):  # parents first
        together = sum(fitted[child] for child in below[parent])
        if together > fitted[parent]:
            for child in below[parent]:
                fitted[child] *= fitted[parent] / together
    return fitted


def _nearest_above(fqn: str, measured: Mapping[str, float], names: ModuleNames) -> str | None:
    """The nearest module above that was called itself, as a ModuleList is not."""
    named = names.nodes.get(fqn)
    while named is not None and (named := named.parent) is not None:
        if named.fqn in measured:
            return named.fqn
    return None
