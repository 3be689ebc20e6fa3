"""Sums over the steps of a meter: the last one, a window and the whole run."""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.counting.amounts import OTHER, UNCOUNTED, Amounts, as_operators
from dispatch_flops.counting.meter_reading import MeterReading
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.cost import COST_FIELDS

_COUNTS = ("steps", "samples", "tokens", "timed_steps", "timed_tokens")
_NUMBERS = (*_COUNTS, "seconds")


class Part(Protocol):
    """What steps consist of.

    runs: how often it ran; untimed_runs: of these, the ones in steps whose time is not known.
    """

    runs: int
    untimed_runs: int

    @property
    def is_estimate(self) -> bool:
        """True if ``amounts`` may be wrong."""

    def amounts(self, runs: int) -> Amounts:
        """Return the amounts of so many runs, of which nothing else is known."""

    def total(self) -> Amounts:
        """Return the amounts of all runs."""

    def variance(self, runs: int) -> float | None:
        """Return that of the FLOPs of ``amounts`` about the true ones; None if it is not known."""

    def total_variance(self) -> float | None:
        """Return that of the FLOPs of ``total``."""


@dataclass(slots=True, eq=False)
class ExactPart:
    """A part that costs ``once`` whenever it runs."""

    once: Amounts
    runs: int = 0
    untimed_runs: int = 0

    @property
    def is_estimate(self) -> bool:
        """False: the amounts are known."""
        return False

    def amounts(self, runs: int) -> Amounts:
        """Return the amounts of so many runs."""
        return Counter({key: amount * runs for key, amount in self.once.items()})

    def total(self) -> Amounts:
        """Return the amounts of all runs."""
        return self.amounts(self.runs)

    def variance(self, runs: int) -> float | None:
        """Return 0: the amounts are known."""
        return 0.0

    def total_variance(self) -> float | None:
        """Return 0: the amounts are known."""
        return 0.0


# One step: its parts, its wall time if the time counts, its samples and its tokens.
StepRecord = tuple[tuple[Part, ...], float | None, int, int]


@dataclass(frozen=True, slots=True)
class _Sums:
    """What parts amount to: in all runs, and in those whose time is known.

    variance: that of the FLOPs about the true ones; None if it is not known.
    """

    amounts: Amounts = field(default_factory=Counter)
    timed: Amounts = field(default_factory=Counter)
    is_estimate: bool = False
    variance: float | None = 0.0


class MeterTotals:
    """The steps so far.

    window: number of steps that are kept one by one. The other figures are of the run;
    a part holds how often it ran.
    """

    def __init__(self, window: int) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=window)
        self.steps = self.samples = self.tokens = self.timed_steps = self.timed_tokens = 0
        self.seconds = 0.0
        self._earlier = _Sums()  # of the runs that this one resumes, and of forgotten parts

    def add(
        self, parts: tuple[Part, ...], seconds: float | None, samples: int, tokens: int
    ) -> None:
        """Add a step; its time counts for nothing if the clock was set back in it."""
        self.steps += 1
        self.samples += samples
        self.tokens += tokens
        for part in parts:
            part.runs += 1
        if seconds is not None and seconds >= 0:  # not NaN
            self.timed_steps += 1
            self.timed_tokens += tokens
            self.seconds += seconds
        else:
            seconds = None
            for part in parts:
                part.untimed_runs += 1
        self.recent.append((parts, seconds, samples, tokens))

    def settle(self, parts: Iterable[Part]) -> None:
        """Add what the parts have cost for good: they are about to be forgotten."""
        self._earlier = self._sums(parts)

    def _numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _NUMBERS}

    def reading_of(self, records: Iterable[StepRecord], machine: Machine | None) -> MeterReading:
        """Return the reading of some recent steps."""
        found = list(records)
        timed = [one for one in found if one[1] is not None]
        numbers = {
            "steps": len(found),
            "samples": sum(samples for _, _, samples, _ in found),
            "tokens": sum(tokens for _, _, _, tokens in found),
            "timed_steps": len(timed),
            "timed_tokens": sum(tokens for _, _, _, tokens in timed),
            "seconds": sum(seconds or 0.0 for _, seconds, _, _ in timed),
        }
        runs, timed_runs = (
            Counter(part for parts, *_ in records for part in parts) for records in (found, timed)
        )
        sums = _Sums(
            amounts=_sum(runs),
            timed=_sum(timed_runs),
            is_estimate=any(part.is_estimate for part in runs),
            variance=_sum_if_known(part.variance(times) for part, times in runs.items()),
        )
        return _reading(numbers, sums, machine)

    def reading(self, parts: Iterable[Part], machine: Machine | None) -> MeterReading:
        """Return the reading of the whole run."""
        return _reading(self._numbers(), self._sums(parts), machine)

    def state_dict(self, parts: Iterable[Part]) -> dict[str, Any]:
        """Return the totals of the run as plain numbers, texts and lists."""
        sums = self._sums(parts)
        return {
            **self._numbers(),
            "amounts": [[*key, amount] for key, amount in sums.amounts.items()],
            "timed_amounts": [[*key, amount] for key, amount in sums.timed.items()],
            "is_estimate": sums.is_estimate,
            "variance": sums.variance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the totals that ``state_dict`` returned.

        Raises ConfigError for other data.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"the state of a meter is of type {type(state).__name__}; pass what state_dict() "
                "returned"
            )
        try:
            numbers: dict[str, Any] = {name: _count(state[name]) for name in _COUNTS}
            numbers["seconds"] = _not_negative(state["seconds"])
            is_estimate = bool(state["is_estimate"])
            variance = state.get("variance", None if is_estimate else 0.0)
            earlier = _Sums(
                amounts=_amounts(state["amounts"]),
                timed=_amounts(state["timed_amounts"]),
                is_estimate=is_estimate,
                variance=None if variance is None else _not_negative(variance),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"the state of a meter is damaged: {error!r}") from None
        vars(self).update(numbers)
        self._earlier = earlier
        self.recent.clear()

    def _sums(self, parts: Iterable[Part]) -> _Sums:
        ran = [part for part in parts if part.runs]
        earlier = self._earlier
        amounts, timed = earlier.amounts.copy(), earlier.timed.copy()
        for part in ran:
            amounts.update(part.total())
            timed.update(part.amounts(part.runs - part.untimed_runs))
        return _Sums(
            amounts=amounts,
            timed=timed,
            is_estimate=earlier.is_estimate or any(part.is_estimate for part in ran),
            variance=_sum_if_known((earlier.variance, *(part.total_variance() for part in ran))),
        )


def _amounts(rows: Iterable[Any]) -> Amounts:
    """Return the amounts that a state holds; those of older states have no family of kernels."""
    found: Amounts = Counter()
    for phase, dtype, *family, name, amount in rows:
        if name not in (*COST_FIELDS, UNCOUNTED):
            raise ValueError(f"{name!r} is not a figure")
        key = phase, dtype, (family or [OTHER])[0], name
        if not all(isinstance(text, str | None) for text in key):
            raise ValueError(f"{key!r} are not the names of a figure")
        found[key] = _count(amount)
    return found


def _count(number: Any) -> int:
    count = operator.index(number)
    if count < 0:
        raise ValueError(f"{number!r} is not a count")
    return count


def _not_negative(number: Any) -> float:
    found = float(number)
    if not 0 <= found < math.inf:
        raise ValueError(f"{number!r} is not a number of 0 or more")
    return found


def _sum_if_known(numbers: Iterable[float | None]) -> float | None:
    """Return the sum; None if one of them is not known."""
    total = 0.0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _sum(runs: Mapping[Part, int]) -> Amounts:
    total: Amounts = Counter()
    for part, times in runs.items():
        total.update(part.amounts(times))
    return total


def _reading(numbers: Mapping[str, Any], sums: _Sums, machine: Machine | None) -> MeterReading:
    return MeterReading(
        **numbers,
        operators=as_operators(sums.amounts),
        timed_operators=as_operators(sums.timed),
        uncounted={
            op: calls
            for (_, op, _, name), calls in sums.amounts.items()
            if name == UNCOUNTED and op
        },
        is_estimate=sums.is_estimate,
        standard_error=None if sums.variance is None else math.sqrt(sums.variance),
        machine=machine,
    )


def sample_count(samples: Any, name: str = "samples") -> int | None:
    """Return ``samples`` as an int; raise ConfigError if it is not a count."""
    if samples is None:
        return None
    if samples.__class__ is int and samples >= 0:
        return samples  # type: ignore[no-any-return]
    try:
        count = -1 if isinstance(samples, bool) else operator.index(samples)
    except TypeError:
        count = -1
    if count < 0:
        raise ConfigError(f"{name}={samples!r:.60}: pass the number of {name} in the block, an int")
    return count
