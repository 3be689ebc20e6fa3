"""Sums over the steps of a meter: the last one, a window and the whole run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import ConfigError
from dispatch_flops.profilers.meter_reading import MeterReading
from dispatch_flops.profilers.step_costs import UNCOUNTED, Amounts, Segment, as_operators

_NUMBERS = ("steps", "samples", "tokens", "timed_steps", "timed_tokens", "seconds")


class StepRecord(NamedTuple):
    """One step: what ran, and its wall time unless the counter ran in it."""

    segments: tuple[Segment, ...]
    seconds: float | None
    samples: int
    tokens: int


class MeterTotals:
    """The steps so far; a segment holds how often it ran.

    window: number of steps that are kept one by one.
    """

    def __init__(self, window: int) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=window)
        self._numbers: dict[str, Any] = dict.fromkeys(_NUMBERS, 0)
        # Of the runs that this one resumes.
        self._earlier: Amounts = Counter()
        self._earlier_timed: Amounts = Counter()
        self._earlier_is_estimate = False

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(self._numbers["steps"])

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        segments, seconds, samples, tokens = record
        numbers = self._numbers
        numbers["steps"] += 1
        numbers["samples"] += samples
        numbers["tokens"] += tokens
        is_timed = seconds is not None
        if seconds is not None:
            numbers["timed_steps"] += 1
            numbers["timed_tokens"] += tokens
            numbers["seconds"] += seconds
        for segment in segments:
            segment.runs += 1
            segment.timed_runs += is_timed
        self.recent.append(record)

    def reading_of(self, records: Iterable[StepRecord], machine: Machine | None) -> MeterReading:
        """Return the reading of some recent steps."""
        found = list(records)
        timed = [one for one in found if one.seconds is not None]
        numbers = {
            "steps": len(found),
            "samples": sum(one.samples for one in found),
            "tokens": sum(one.tokens for one in found),
            "timed_steps": len(timed),
            "timed_tokens": sum(one.tokens for one in timed),
            "seconds": sum(one.seconds or 0.0 for one in timed),
        }
        runs = Counter(segment for one in found for segment in one.segments)
        timed_runs = Counter(segment for one in timed for segment in one.segments)
        is_estimate = any(segment.is_estimate for segment in runs)
        return _reading(numbers, _sum(runs), _sum(timed_runs), machine, is_estimate=is_estimate)

    def reading(self, segments: Iterable[Segment], machine: Machine | None) -> MeterReading:
        """Return the reading of the whole run."""
        amounts, timed, is_estimate = self._sums(segments)
        return _reading(self._numbers, amounts, timed, machine, is_estimate=is_estimate)

    def state_dict(self, segments: Iterable[Segment]) -> dict[str, Any]:
        """Return the totals of the run as plain numbers, texts and lists."""
        amounts, timed, is_estimate = self._sums(segments)
        return {
            **self._numbers,
            "amounts": [[*key, amount] for key, amount in amounts.items()],
            "timed_amounts": [[*key, amount] for key, amount in timed.items()],
            "is_estimate": is_estimate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the totals that ``state_dict`` returned.

        Raises ConfigError for other data.
        """
        try:
            numbers = {name: state[name] for name in _NUMBERS}
            amounts, timed = (
                Counter({(phase, dtype, name): amount for phase, dtype, name, amount in state[key]})
                for key in ("amounts", "timed_amounts")
            )
            is_estimate = bool(state["is_estimate"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the state of a FlopMeter is damaged: {error!r}") from None
        self._numbers, self._earlier, self._earlier_timed = numbers, amounts, timed
        self._earlier_is_estimate = is_estimate
        self.recent.clear()

    def _sums(self, segments: Iterable[Segment]) -> tuple[Amounts, Amounts, bool]:
        ran = [segment for segment in segments if segment.runs]
        amounts = self._earlier + _sum({segment: segment.runs for segment in ran})
        timed = self._earlier_timed + _sum({segment: segment.timed_runs for segment in ran})
        is_estimate = self._earlier_is_estimate or any(segment.is_estimate for segment in ran)
        return amounts, timed, is_estimate


def _sum(runs: Mapping[Segment, int]) -> Amounts:
    total: Amounts = Counter()
    for segment, times in runs.items():
        if times:
            total.update(segment.amounts(times))
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
            op: calls for (_, op, name), calls in amounts.items() if name == UNCOUNTED and op
        },
        is_estimate=is_estimate,
        machine=machine,
    )
