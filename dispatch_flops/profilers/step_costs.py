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

The first run of a segment may do what no later one does, such as fill a cache. It is a segment of
its own as soon as a second run is met, which is taken to cost the same until one is counted. If that
one costs something else, data may decide, too: ``_SURE`` runs that cost the same tell that they do
not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeGuard

from dispatch_flops.counting.amounts import UNCOUNTED, Amounts, flops_of, has_backward

BEGIN, CALL, STEPPING, STEPPED, END = "begin", "call", "stepping", "stepped", "end"
ANY: Final = "any history"
_COMPARED: Final = ("macs", "flops", UNCOUNTED)
# A state whose segment ended in an unknown way is counted this many times to find its cost.
_TRIES: Final = 10
_LIMIT: Final = 4096  # states before all are forgotten; each takes about 2 KB
_ALIKE: Final = 3  # histories that are counted before others are taken to cost the same
# Of two costs that data choose between, one is chosen so often in a row, after the other, in at most
# 4 % of cases: (1 - p) * p**10 is greatest at p = 10/11.
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


@dataclass(slots=True, eq=False)
class Segment:
    """What runs between a state and one of the events that can end it.

    first: the segment of the first runs, if these are later ones; they were counted.
    whole: the segment of all runs, if this is one of those that cost what no other tells.
    runs: how often it ran; timed_runs: of these, the ones in steps that were not counted at all.
    counted: amounts of the runs that were counted, of which there are ``counted_runs``.
    varies: two counted runs had different costs. is_sample: the counted runs are those after that.
    runs_backward: a counted run had a backward pass. last_unknown: the last step that ran it while
    its cost was not known; 0 if none.
    """

    state: State
    event: Hashable
    first: Segment | None = None
    whole: Segment | None = None
    runs: int = 0
    timed_runs: int = 0
    counted: Amounts = field(default_factory=Counter)
    counted_runs: int = 0
    varies: bool = False
    is_sample: bool = False
    runs_backward: bool = False
    last_unknown: int = 0

    def add_counted(self, amounts: Amounts) -> None:
        """Add a run that was counted."""
        if self.varies and not self.is_sample and not self.state.is_opaque:
            # Runs at fixed steps, such as the first, say little of the others.
            self.counted, self.counted_runs, self.is_sample = Counter(), 0, True
        elif self.counted_runs and not self.varies:
            self.varies = not self.costs(amounts, runs=1)
        self.counted.update(amounts)
        self.counted_runs += 1
        self.runs_backward = has_backward(self.counted)

    def apart(self) -> Segment:
        """Return a segment for one run of this one; ``whole.add_runs_of`` adds it."""
        return Segment(self.state, self.event, whole=self)

    def add_runs_of(self, other: Segment) -> None:
        """Add the runs of another segment, which costs the same or is one counted run."""
        self.runs += other.runs
        self.timed_runs += other.timed_runs
        self.counted.update(other.counted)
        self.counted_runs += other.counted_runs
        self.varies = self.varies or other.varies
        self.is_sample = self.is_sample or other.is_sample
        self.runs_backward = has_backward(self.counted)

    def costs(self, amounts: Amounts, runs: int) -> bool:
        """Return True if so many runs of these amounts cost as much for each run as the counted."""
        return all(
            self.counted[key] * runs == amounts[key] * self.counted_runs
            for key in self.counted.keys() | amounts.keys()
            if key[-1] in _COMPARED
        )

    @property
    def is_exact(self) -> bool:
        """True if every run was counted, and none of them is in a segment of its own."""
        return self.first is None and self.runs == self.counted_runs > 0

    @property
    def known(self) -> Segment:
        """What tells the cost of a run: this segment, or the first until this one is counted."""
        return self if self.counted_runs or self.first is None else self.first

    @property
    def differs(self) -> bool:
        """True if the first runs had another cost, and too few others were counted to tell why."""
        first = self.first
        return (
            first is not None
            and 0 < self.counted_runs < _SURE
            and not self.costs(first.counted, first.counted_runs)
        )

    @property
    def is_estimate(self) -> bool:
        """True if ``amounts`` may be wrong: a cost that varies, or that was never counted."""
        is_doubtful = self.varies or (self.differs and self.runs > self.counted_runs)
        return (is_doubtful and not self.state.is_opaque) or self.is_inferred

    def amounts(self, runs: int) -> Amounts:
        """Return the amounts of so many runs: the mean of the counted ones times ``runs``.

        While the counted runs are equal, the division leaves no remainder.
        """
        known = self.known
        total, counted = (
            (known.counted, known.counted_runs) if known.counted_runs else self._inferred()
        )
        return Counter({key: amount * runs // counted for key, amount in total.items()})

    @property
    def is_inferred(self) -> bool:
        """True if the cost was never counted and is not taken as 0.

        What runs before the first call, such as the preparation of data, is taken as 0 for a new
        signature if it was 0 for all others, and these were as many as ``_TRIES``.
        """
        is_preparation = self.state.key == BEGIN and _is_call(self.event)
        return not self.known.counted_runs and not (
            is_preparation and self.state.free_segments >= _TRIES
        )

    def _inferred(self) -> tuple[Amounts, int]:
        """Return amounts, and a number of runs, of what is most like this segment."""
        if self.event == END:
            for skipped in self.state.segments.values():
                # The optimizer did not step, as with infinite gradients under a GradScaler: the
                # work before its step and the work after it still ran.
                after = skipped.state.after_skipping.get(skipped.event)
                tail = after.segments.get(END) if after is not None else None
                if skipped.known.counted_runs and tail is not None and tail.known.counted_runs:
                    amounts = skipped.amounts(1)
                    amounts.update(tail.amounts(1))
                    return amounts, 1
        known = self.state.known_segments()
        total: Amounts = Counter()
        for one in known:
            total.update(one.counted)
        return total, max(1, sum(one.counted_runs for one in known))


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
        """Return the segment that ``event`` ends, for one more run."""
        found = self.segments.get(event)
        if found is None or found.is_exact:
            found = self.segments[event] = Segment(self, event, first=found)
        return found

    def known_segments(self) -> list[Segment]:
        """Return what tells the cost of each segment whose cost is known."""
        known = [one.known for one in self.segments.values()]
        return [one for one in known if one.counted_runs]

    def all_segments(self) -> Iterable[Segment]:
        """Yield all segments, those of first runs before the later ones."""
        for segment in self.segments.values():
            if segment.first is not None:
                yield segment.first
            yield segment

    def prepares(self, counted: Iterable[tuple[Segment, Amounts]]) -> bool:
        """Return True if data may be prepared in this state, the one before the first call.

        It then costs something, and not the same for all calls. counted: segments of the step that
        runs, of which nothing else is known yet.
        """
        if self.free_segments:
            return False
        known = [one for one in self.known_segments() if _is_call(one.event)]
        if not known:
            return any(one.state is self and flops_of(amounts) for one, amounts in counted)
        first, *others = known
        return not others or not all(one.costs(first.counted, first.counted_runs) for one in others)

    def add_runs_of(self, other: State) -> None:
        """Add the runs of a state that costs the same."""
        for segment in other.all_segments():
            own = self.ended_by(segment.event)
            own = own.first if segment.is_exact and own.first is not None else own
            own.add_runs_of(segment)
        self.tries = max(self.tries, other.tries)
        self.after_skipping.update(other.after_skipping)
        other.segments = self.segments

    def note_counted(self, segment: Segment) -> None:
        """Note that a segment was counted: more is asked for if it, or another one, is not clear.

        If a run cost something else than the first one, the next ones tell whether that was special.
        """
        self._merge_calls_like(segment)
        segments, known = self.segments.values(), self.known_segments()
        is_known = all(one.known.counted_runs or not one.runs for one in segments)
        self.free_segments = 0 if any(flops_of(one.counted) for one in known) else len(known)
        self.tries = 0 if is_known else max(0, self.tries - 1)
        if segment.differs:
            self.tries = max(_SURE - segment.counted_runs, self.tries)

    def _merge_calls_like(self, segment: Segment) -> None:
        """Add runs that calls of one kind ended while these were told apart by their inputs."""
        if not _is_call(segment.event) or len(segment.event) == 2:
            return
        for event, other in [*self.segments.items()]:
            if (
                _is_call(event)
                and len(event) == 2
                and call_of_any_inputs(event) == segment.event
                and not other.known.counted_runs
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

    def __init__(self, *, varies: bool = False) -> None:
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
                yield from state.all_segments()


def _cost_the_same(states: Iterable[State]) -> bool:
    """Return True if ``_ALIKE`` of the states have cost the same, and none anything else."""
    known: dict[Hashable, list[Segment]] = {}  # by the event that ended them
    for state in states:
        for segment in state.known_segments():
            alike = known.setdefault(segment.event, [])
            if alike and not alike[0].costs(segment.counted, segment.counted_runs):
                return False
            alike.append(segment)
    return any(len(alike) >= _ALIKE for alike in known.values())
