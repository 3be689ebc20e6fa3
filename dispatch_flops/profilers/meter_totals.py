"""Sums over the steps of a meter: the last one, a window and the whole run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import ConfigError
from dispatch_flops.profilers.meter_reading import MeterReading
from dispatch_flops.profilers.step_costs import UNCOUNTED, Amounts, Segment, as_operators

_NUMBERS = ("steps", "samples", "tokens", "timed_steps", "timed_tokens", "seconds")


# One step: what ran, its wall time unless the counter ran in it, its samples and its tokens.
StepRecord = tuple[tuple[Segment, ...], float | None, int, int]


class MeterTotals:
    """The steps so far; a segment holds how often it ran.

    window: number of steps that are kept one by one. The other figures are of the run.
    """

    def __init__(self, window: int) -> None:
        self.recent: deque[StepRecord] = deque(maxlen=window)
        self.steps = self.samples = self.tokens = self.timed_steps = self.timed_tokens = 0
        self.seconds = 0.0
        # Of the runs that this one resumes.
        self._earlier: Amounts = Counter()
        self._earlier_timed: Amounts = Counter()
        self._earlier_is_estimate = False

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        segments, seconds, samples, tokens = record
        self.recent.append(record)
        self.steps += 1
        self.samples += samples
        self.tokens += tokens
        is_timed = seconds is not None
        if seconds is not None:
            self.timed_steps += 1
            self.timed_tokens += tokens
            self.seconds += seconds
        for segment in segments:
            segment.runs += 1
            segment.timed_runs += is_timed

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
            Counter(segment for segments, *_ in records for segment in segments)
            for records in (found, timed)
        )
        is_estimate = any(segment.is_estimate for segment in runs)
        return _reading(numbers, _sum(runs), _sum(timed_runs), machine, is_estimate=is_estimate)

    def reading(self, segments: Iterable[Segment], machine: Machine | None) -> MeterReading:
        """Return the reading of the whole run."""
        amounts, timed, is_estimate = self._sums(segments)
        return _reading(self._numbers(), amounts, timed, machine, is_estimate=is_estimate)

    def state_dict(self, segments: Iterable[Segment]) -> dict[str, Any]:
        """Return the totals of the run as plain numbers, texts and lists."""
        amounts, timed, is_estimate = self._sums(segments)
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
            numbers = {name: state[name] for name in _NUMBERS}
            amounts, timed = (
                Counter({(phase, dtype, name): amount for phase, dtype, name, amount in state[key]})
                for key in ("amounts", "timed_amounts")
            )
            is_estimate = bool(state["is_estimate"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the state of a FlopMeter is damaged: {error!r}") from None
        vars(self).update(numbers)
        self._earlier, self._earlier_timed = amounts, timed
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
