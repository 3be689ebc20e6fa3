"""Sums over the steps of a meter: the last one, a window and the whole run."""

from __future__ import annotations

import math
import operator
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


# One step: its parts, its wall time if the time counts, its samples and its tokens.
StepRecord = tuple[tuple[Part, ...], float | None, int, int]


class MeterTotals:
    """The steps so far.

    window: number of steps that are kept one by one. The other figures are of the run;
    a part holds how often it ran.
    """

    def __init__(self, window: int) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=window)
        self.steps = self.samples = self.tokens = self.timed_steps = self.timed_tokens = 0
        self.seconds = 0.0
        # Of the runs that this one resumes, and of parts that were forgotten.
        self._earlier: Amounts = Counter()
        self._earlier_timed: Amounts = Counter()
        self._earlier_is_estimate = False

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
        self._earlier, self._earlier_timed, self._earlier_is_estimate = self._sums(parts)

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
        is_estimate = any(part.is_estimate for part in runs)
        return _reading(numbers, _sum(runs), _sum(timed_runs), machine, is_estimate=is_estimate)

    def reading(self, parts: Iterable[Part], machine: Machine | None) -> MeterReading:
        """Return the reading of the whole run."""
        amounts, timed, is_estimate = self._sums(parts)
        return _reading(self._numbers(), amounts, timed, machine, is_estimate=is_estimate)

    def state_dict(self, parts: Iterable[Part]) -> dict[str, Any]:
        """Return the totals of the run as plain numbers, texts and lists."""
        amounts, timed, is_estimate = self._sums(parts)
        return {
            **self._numbers(),
            "amounts": [[*key, amount] for key, amount in amounts.items()],
            "timed_amounts": [[*key, amount] for key, amount in timed.items()],
            "is_estimate": is_estimate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the totals that ``state_dict`` returned.

        Raises ConfigError for other data.
        """
        try:
            numbers: dict[str, Any] = {name: _count(state[name]) for name in _COUNTS}
            numbers["seconds"] = _seconds(state["seconds"])
            amounts, timed = _amounts(state["amounts"]), _amounts(state["timed_amounts"])
            is_estimate = bool(state["is_estimate"])
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(f"the state of a meter is damaged: {error!r}") from None
        vars(self).update(numbers)
        self._earlier, self._earlier_timed = amounts, timed
        self._earlier_is_estimate = is_estimate
        self.recent.clear()

    def _sums(self, parts: Iterable[Part]) -> tuple[Amounts, Amounts, bool]:
        ran = [part for part in parts if part.runs]
        amounts, timed = self._earlier.copy(), self._earlier_timed.copy()
        for part in ran:
            amounts.update(part.total())
            timed.update(part.amounts(part.runs - part.untimed_runs))
        is_estimate = self._earlier_is_estimate or any(part.is_estimate for part in ran)
        return amounts, timed, is_estimate


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


def _seconds(number: Any) -> float:
    seconds = float(number)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{number!r} are not seconds")
    return seconds


def _sum(runs: Mapping[Part, int]) -> Amounts:
    total: Amounts = Counter()
    for part, times in runs.items():
        total.update(part.amounts(times))
    return total


def _reading(
    numbers: Mapping[str, Any],
    amounts: Amounts,
    timed: Amounts,
    machine: Machine | None,
    *,
    is_estimate: bool,
) -> MeterReading:
    return MeterReading(
        **numbers,
        operators=as_operators(amounts),
        timed_operators=as_operators(timed),
        uncounted={
            op: calls for (_, op, _, name), calls in amounts.items() if name == UNCOUNTED and op
        },
        is_estimate=is_estimate,
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
        raise ConfigError(f"{name}={samples!r}: pass the number of {name} in the block, an int")
    return count
