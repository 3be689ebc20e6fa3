"""Timed calls, and latencies of modules combined from several passes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.timing.devices import Now


def seconds_of(run: Callable[[], Any], now: Now) -> float:
    """Return the seconds of one call, by the clock ``now``."""
    begun = now()
    run()
    return now() - begun


def time_calls(run: Callable[[], Any], repeats: int, now: Now) -> tuple[float, float | None]:
    """Return the median seconds of ``repeats`` calls and half their range, None for one call."""
    taken = [seconds_of(run, now) for _ in range(repeats)]
    spread = (max(taken) - min(taken)) / 2 if repeats > 1 else None
    return statistics.median(taken), spread


def fit_to_whole(seconds: dict[str, float], whole: float) -> dict[str, float]:
    """Scale the latencies of modules so that the root takes ``whole``, its time without hooks.

    The pass with hooks is another run of the model, in which the root takes a little more or less.
    With one factor for all modules, the sum of children never exceeds their parent.
    """
    measured = seconds.get("")
    if not measured:
        return seconds
    factor = whole / measured
    return {fqn: value * factor for fqn, value in seconds.items()}


def medians(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each module's median over the passes in which it ran."""
    taken: dict[str, list[float]] = {}
    for seconds in passes:
        for fqn, value in seconds.items():
            taken.setdefault(fqn, []).append(value)
    return {fqn: statistics.median(values) for fqn, values in taken.items()}


def spreads(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each module's median absolute deviation over passes, as a share of its median.

    Empty for a single pass. A module that took no time has no entry.
    """
    middle = medians(passes)
    shares = [
        {fqn: abs(value / middle[fqn] - 1) for fqn, value in seconds.items() if middle[fqn]}
        for seconds in passes
    ]
    return medians(shares) if len(passes) > 1 else {}


def within_parents(seconds: Mapping[str, float], names: ModuleNames) -> dict[str, float]:
    """Scale latencies so that the children of a module do not take longer than the module.

    Medians may come from different passes. Where the medians of a module's children exceed its
    own, they are scaled down, and those of the modules below are scaled to fit in turn.
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
    """Return the nearest module above that was called; a ModuleList never is."""
    named = names.by_fqn.get(fqn)
    while named is not None and (named := named.parent) is not None:
        if named.fqn in measured:
            return named.fqn
    return None
