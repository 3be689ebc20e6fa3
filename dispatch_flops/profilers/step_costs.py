"""Costs of the segments of steps, by what happened before and after each of them.

A step consists of segments. Each ends with an event: a call of the root, the start or the end of
an optimizer's step, or the end of the step. What a segment costs depends on its ``State``, which
is what led to it, and on the event that ends it. Together they make a ``Segment``, whose cost is
counted once and is then added for each run.

What follows an event may also depend on what came before it in the step: a target that an earlier
call computed, or the outputs of all micro-batches. So a state has a key, which is what the cost
nearly always depends on, such as the last call, and a history, which is all events. Each history is
counted, until as many as ``_ALIKE`` of one key have cost the same. From then on the key alone tells
the cost: micro-batches of varying shapes make new histories in every step. For the same reason what
runs before a later call than the first is not told apart by the inputs of that call, unless work
before the first calls of steps shows that data are prepared there.

A run that was counted costs what was counted. The others cost what a sample of the counted ones
tells. The first run may do what no later one does, such as fill a cache: it leaves the sample if a
later one costs something else. Until ``_SURE`` runs have cost the same, data may be the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, TypeGuard

from dispatch_flops.counting.amounts import UNCOUNTED, Amounts, flops_of, has_backward
from dispatch_flops.counting.meter_totals import ExactPart

BEGIN, CALL, STEPPING, STEPPED, END = "begin", "call", "stepping", "stepped", "end"
ANY: Final = "any history"
_COMPARED: Final = ("macs", "flops", UNCOUNTED)
# A state whose segment ended in an unknown way is counted this many times to find its cost.
_TRIES: Final = 10
_LIMIT: Final = 4096  # states before all are forgotten; each takes about 2 KB
_ALIKE: Final = 3  # histories that are counted before others are taken to cost the same
# Of two costs that data choose between, one is chosen so often in a row, after the other, in at
# most 4 % of cases: (1 - p) * p**10 is greatest at p = 10/11.
_SURE: Final = 10


def call_of_any_inputs(event: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Return what stands for a call, ``(CALL, signature)``, and for others with other inputs.

    It shows of the work before the call what the model shows, such as which parameters have
    gradients. The inputs are of the work to come, and micro-batches of varying shapes follow in any
    order. Only where data are prepared in the step is work before the call on them, too.
    """
    signature = event[1]
    return (CALL, *signature[1:]) if isinstance(signature, tuple) else (CALL,)


def _is_call(event: Hashable) -> TypeGuard[tuple[Hashable, ...]]:
    return isinstance(event, tuple) and event[0] == CALL


@dataclass(slots=True, eq=False, kw_only=True)
class CountedRun(ExactPart):
    """One run of a segment that was counted, as a part of the step in which it ran."""

    segment: Segment


@dataclass(slots=True, eq=False)
class Segment:
    """What runs between a state and one of the events that can end it.

    runs: how often it ran; untimed_runs: of these, the ones in steps whose time is not known.
    counted: amounts of the runs that were counted, of which there are ``counted_runs``.
    sample: amounts of those of them that tell the cost of the others, ``sample_runs``; squares: the
        sum of the squares of their FLOPs.
    varies: two runs of the sample had different costs. is_random: the sample are those after that.
    is_of_first: the sample is the first run alone. is_without_first: it has left the sample.
    last_unknown: the last step that ran it while its cost was not known; 0 if none.
    """

    state: State
    event: Hashable
    runs: int = 0
    untimed_runs: int = 0
    counted: Amounts = field(default_factory=Counter)
    counted_runs: int = 0
    sample: Amounts = field(default_factory=Counter)
    sample_runs: int = 0
    squares: int = 0
    varies: bool = False
    is_random: bool = False
    is_of_first: bool = False
    is_without_first: bool = False
    last_unknown: int = 0

    def add_counted(self, amounts: Amounts) -> None:
        """Add a run that was counted."""
        if self.varies and not self.is_random:
            # Runs at fixed steps, such as the first, say little of the others.
            self._begin_sample()
            self.is_random = True
        elif self.sample_runs and not self.varies and not self.costs(amounts, runs=1):
            if self.is_of_first:
                self._begin_sample()
                self.is_without_first = True
            else:
                self.varies = True
        self.is_of_first = not self.runs
        self.runs += 1
        self.untimed_runs += 1  # counting takes time
        self.counted.update(amounts)
        self.counted_runs += 1
        self.sample.update(amounts)
        self.sample_runs += 1
        self.squares += flops_of(amounts) ** 2

    def _begin_sample(self) -> None:
        self.sample, self.sample_runs, self.squares = Counter(), 0, 0

    def add_runs_of(self, other: Segment) -> None:
        """Add the runs of another segment, which costs the same."""
        self.is_of_first = other.is_of_first and (self.is_of_first or not self.runs)
        self.is_without_first |= other.is_without_first
        self.varies |= other.varies
        self.is_random |= other.is_random
        self.runs += other.runs
        self.untimed_runs += other.untimed_runs
        self.counted.update(other.counted)
        self.counted_runs += other.counted_runs
        self.sample.update(other.sample)
        self.sample_runs += other.sample_runs
        self.squares += other.squares

    def costs(self, amounts: Amounts, runs: int) -> bool:
        """Return True if so many runs of these amounts cost as much for each run as the sample."""
        return all(
            self.sample[key] * runs == amounts[key] * self.sample_runs
            for key in self.sample.keys() | amounts.keys()
            if key[-1] in _COMPARED
        )

    @property
    def runs_backward(self) -> bool:
        """True if a run of the sample had a backward pass."""
        return has_backward(self.sample)

    @property
    def is_unsure(self) -> bool:
        """True if the first run had another cost, and too few others were counted to tell why."""
        return self.is_without_first and not self.varies and self.sample_runs < _SURE

    @property
    def is_estimate(self) -> bool:
        """True if the cost of a run that was not counted may be wrong."""
        is_doubtful = self.varies or self.is_unsure or self.is_inferred
        return is_doubtful and self.runs > self.counted_runs

    def total(self) -> Amounts:
        """Return the amounts of all runs."""
        total = self.amounts(self.runs - self.counted_runs)
        total.update(self.counted)
        return total

    def amounts(self, runs: int) -> Amounts:
        """Return the amounts of so many runs that were not counted: the mean of the sample.

        While all of the sample are equal, the division leaves no remainder.
        """
        if not runs:
            return Counter()
        total, number = (self.sample, self.sample_runs) if self.sample_runs else self._inferred()
        return Counter({key: amount * runs // number for key, amount in total.items()})

    def total_variance(self) -> float | None:
        """Return the variance of the FLOPs of all runs about the true ones; see ``variance``."""
        return self.variance(self.runs - self.counted_runs)

    def variance(self, runs: int) -> float | None:
        """Return the variance of the FLOPs of so many runs that were not counted.

        They differ from their mean, and the mean of the sample, of n runs, differs from that: of
        ``runs`` runs of variance v it is v * runs * (1 + runs / n). None if the sample does not
        tell v.
        """
        if not (runs and self.is_estimate):
            return 0.0
        number = self.sample_runs
        if not self.varies or number < 2:
            return None
        deviations = self.squares - Fraction(flops_of(self.sample) ** 2, number)
        return float(deviations / (number - 1) * runs * (1 + Fraction(runs, number)))

    @property
    def is_inferred(self) -> bool:
        """True if the cost was never counted and is not taken as 0.

        What runs before the first call, such as the preparation of data, is taken as 0 for a new
        signature if it was 0 for all others, and these were as many as ``_TRIES``.
        """
        is_preparation = self.state.key == BEGIN and _is_call(self.event)
        return not self.counted_runs and not (is_preparation and self.state.free_segments >= _TRIES)

    def _inferred(self) -> tuple[Amounts, int]:
        """Return amounts, and a number of runs, of what is most like this segment."""
        if self.event == END:
            for skipped in self.state.segments.values():
                # The optimizer did not step, as with infinite gradients under a GradScaler: the
                # work before its step and the work after it still ran.
                after = skipped.state.after_skipping.get(skipped.event)
                tail = after.segments.get(END) if after is not None else None
                if skipped.counted_runs and tail is not None and tail.counted_runs:
                    amounts = skipped.amounts(1)
                    amounts.update(tail.amounts(1))
                    return amounts, 1
        known = self.state.known_segments()
        total: Amounts = Counter()
        for one in known:
            total.update(one.sample)
        return total, max(1, sum(one.sample_runs for one in known))


class State:
    """What has happened in a step so far, as far as the cost of what follows depends on it.

    key: what identifies it together with its history. segments: by the event that ended them.
    is_opaque: the inputs do not tell the cost, so every run is counted. tries: how many runs are
    counted to know a segment; tries_next: when one is met again that was not known then.
    free_segments: how many were counted without FLOPs; 0 if others had some.
    """

    __slots__ = (
        "after_skipping", "free_segments", "is_opaque", "key", "segments", "tries", "tries_next",
    )  # fmt: skip

    def __init__(self, key: Hashable, *, is_opaque: bool = False) -> None:
        self.key = key
        self.segments: dict[Hashable, Segment] = {}
        self.after_skipping: dict[Hashable, State] = {}  # of the optimizer whose start ends it
        self.is_opaque = is_opaque
        self.tries = 1
        self.tries_next = _TRIES
        self.free_segments = 0

    @property
    def must_be_counted(self) -> bool:
        """True if a segment of this state is not known yet."""
        return self.tries > 0 or self.is_opaque

    def ended_by(self, event: Hashable) -> Segment:
        """Return the segment that ``event`` ends."""
        found = self.segments.get(event)
        if found is None:
            found = self.segments[event] = Segment(self, event)
        return found

    def known_segments(self) -> list[Segment]:
        """Return the segments whose cost is known."""
        return [one for one in self.segments.values() if one.counted_runs]

    def prepares(self, counted: Iterable[CountedRun]) -> bool:
        """Return True if data may be prepared in this state, the one before the first call.

        It then costs something, and not the same for all calls. counted: the runs of the step that
        runs, which its segments do not hold yet.
        """
        if self.free_segments:
            return False
        known = [one for one in self.known_segments() if _is_call(one.event)]
        if not known:
            return any(run.segment.state is self and flops_of(run.once) for run in counted)
        first, *others = known
        return not others or not all(one.costs(first.sample, first.sample_runs) for one in others)

    def add_runs_of(self, other: State) -> None:
        """Add the runs of a state that costs the same."""
        for segment in other.segments.values():
            self.ended_by(segment.event).add_runs_of(segment)
        self.tries = max(self.tries, other.tries)
        self.after_skipping.update(other.after_skipping)
        other.segments = self.segments

    def note_counted(self, segment: Segment) -> None:
        """Note that a segment was counted: more is asked for if it, or another one, is not clear.

        If a run cost something else than the first one, the next tell whether that was special.
        """
        self._merge_calls_like(segment)
        segments, known = self.segments.values(), self.known_segments()
        is_known = all(one.counted_runs or not one.runs for one in segments)
        self.free_segments = 0 if any(flops_of(one.sample) for one in known) else len(known)
        self.tries = 0 if is_known else max(0, self.tries - 1)
        if segment.is_unsure:
            self.tries = max(_SURE - segment.sample_runs, self.tries)

    def _merge_calls_like(self, segment: Segment) -> None:
        """Add runs that calls of one kind ended while these were told apart by their inputs."""
        if not _is_call(segment.event) or len(segment.event) == 2:
            return
        for event, other in [*self.segments.items()]:
            if (
                _is_call(event)
                and len(event) == 2
                and call_of_any_inputs(event) == segment.event
                and not other.counted_runs
            ):
                del self.segments[event]
                segment.add_runs_of(other)

    def note_unknown(self) -> bool:
        """Note that a segment ran whose cost had to be inferred; return True if it is asked for.

        It may come again late. Where nothing was found so far, counting takes little time, so that
        more steps are counted each time.
        """
        if self.tries:
            return False
        self.tries = self.tries_next
        if self.free_segments:
            self.tries_next *= 4
        return True


class States:
    """All states that were met, by what identifies them.

    blocked: those that came where counting cannot start, such as a compiled call, or ended early.
    Until they are known, steps are counted from their beginning.
    varies: data or more than the inputs decide costs, so histories are not told apart any more.
    due: steps that may run a segment of unknown cost, and are to be counted from their beginning.
    """

    def __init__(self, *, varies: bool) -> None:
        self._by_key: dict[Hashable, dict[Hashable, State]] = {}  # and by history
        self.blocked: set[State] = set()
        self.due: set[int] = set()
        self.varies = varies
        self._tries = 0
        self._number = 0

    @property
    def is_full(self) -> bool:
        """True if there are so many that they had better be forgotten."""
        return self._number >= _LIMIT

    def find(self, key: Hashable, history: Hashable = (), *, is_opaque: bool = False) -> State:
        """Return the state of that key and history."""
        states = self._by_key.setdefault(key, {})
        found = states.get(ANY) or states.get(history)
        if found is None:
            found = states[history] = State(key, is_opaque=is_opaque)
            self._number += 1
        return found

    def note_counted(self, state: State) -> None:
        """Note that a segment of the state was counted: its key may tell the cost from now on."""
        states = self._by_key[state.key]
        if len(states) > 1 and (self.varies or _cost_the_same(states.values())):
            shared, *others = states.values()
            for other in others:
                shared.add_runs_of(other)
            self._by_key[state.key] = {ANY: shared}

    def note_unknown(self, segment: Segment, step: int) -> bool:
        """Note that a step ran a segment of unknown cost; return True if its state is asked for.

        What ends an epoch comes again at the same distance.
        """
        if segment.last_unknown:
            self.due.add(2 * step - segment.last_unknown)
        segment.last_unknown = step
        return segment.state.note_unknown()

    def note_blocked(self, state: State) -> None:
        """Note that a segment of the state was to be counted and could not be.

        In the steps to come the state may end in other ways first.
        """
        self.blocked.add(state)
        self._tries = state.tries = _TRIES

    def asks_for_whole_step(self) -> bool:
        """Return True if the step that begins now is to be counted from its beginning."""
        self.blocked = {one for one in self.blocked if one.must_be_counted}
        self._tries -= 1
        if self._tries < 0:
            self.blocked.clear()
        return bool(self.blocked)

    def segments(self) -> Iterable[Segment]:
        """Yield all segments."""
        for states in self._by_key.values():
            for state in states.values():
                yield from state.segments.values()


def _cost_the_same(states: Iterable[State]) -> bool:
    """Return True if ``_ALIKE`` of the states have cost the same, and none anything else."""
    known: dict[Hashable, list[Segment]] = {}  # by the event that ended them
    for state in states:
        for segment in state.known_segments():
            alike = known.setdefault(segment.event, [])
            if alike and not alike[0].costs(segment.sample, segment.sample_runs):
                return False
            alike.append(segment)
    return any(len(alike) >= _ALIKE for alike in known.values())
