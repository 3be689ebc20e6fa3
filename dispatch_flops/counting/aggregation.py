"""Aggregate operator calls by module, phase and operator while a program runs."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from dispatch_flops.counting.module_tree import ModuleName, join
from dispatch_flops.counting.thread_state import NOT_CALLS, ModulePhase
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile import OpTotal, sum_known
from dispatch_flops.profile.cost import ZERO, OpCost, Phase, add_costs

_NOT_MEASURED: Mapping[CallCost, float] = {}


class _Key(NamedTuple):
    """What the calls of one sum have in common.

    fqn: the module in which the operator ran. child: the module below it to which a share of the
    cost belongs; "" for the operator's own cost.
    """

    fqn: str
    child: str
    phase: Phase
    op: str
    dtype: str | None
    kind: str
    error: str | None


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    uncounted: int = 0
    cost: OpCost = ZERO
    latency_s: float | None = None

    def add_latency(self, seconds: float | None) -> None:
        if seconds is not None:
            self.latency_s = (self.latency_s or 0.0) + seconds


_Totals = dict[_Key, OpTotal]  # of one module, whose fqn the keys leave out


class CallAggregator:
    """Sums of operator calls by module, phase and operator."""

    def __init__(self) -> None:
        self._sums: defaultdict[_Key, _Sum] = defaultdict(_Sum)
        self._lock = threading.Lock()

    def aggregate(self, module_phases: Iterable[ModulePhase]) -> None:
        """Add the calls recorded in ``module_phases``, of the calling thread, and clear them."""
        with self._lock:
            for found in module_phases:
                counts, found.counts = found.counts, defaultdict(int)
                seconds, found.seconds = found.seconds, None
                _add_calls(
                    self._sums, _Calls(found.fqn, found.phase, counts, seconds or _NOT_MEASURED)
                )

    def including(self, module_phases: Iterable[ModulePhase]) -> RecordedCalls:
        """Return the calls aggregated so far and those recorded in ``module_phases``.

        Calls that are recorded later, perhaps by other threads, do not change the result.
        """
        with self._lock:
            sums = {key: replace(total) for key, total in self._sums.items()}
            calls = [
                _calls(
                    (
                        found.fqn,
                        found.phase,
                        {**found.counts},
                        {**found.seconds} if found.seconds else _NOT_MEASURED,
                        found.entered,
                    )
                )
                for found in module_phases
                if found.counts or found.entered or found.seconds
            ]
        return RecordedCalls(sums, calls)


class _Calls(NamedTuple):
    """The calls recorded for one module in one phase: their number and seconds by cost.

    entered: times that the module's forward started in that phase.
    """

    fqn: str
    phase: Phase
    counts: Mapping[CallCost, int]
    seconds: Mapping[CallCost, float]
    entered: int = 0


_no_calls: Callable[[], defaultdict[CallCost, int]] = partial(defaultdict, int)
_calls = partial(tuple.__new__, _Calls)  # takes half of the constructor's time


class RecordedCalls:
    """Snapshot of the recorded operator calls, from which a profile is built.

    Totals need no tree of modules; a tree is built from ``op_totals``.
    """

    def __init__(self, sums: Mapping[_Key, _Sum], calls: Sequence[_Calls]) -> None:
        self._sums = sums
        self._calls = calls

    def totals(self) -> dict[Phase, OpCost]:
        """Return the cost of all calls in each phase."""
        costs: defaultdict[Phase, list[OpCost]] = defaultdict(list)
        for key, total in self._sums.items():
            costs[key.phase].append(total.cost)
        for phase, numbers in self._by_phase.items():
            for call, calls in numbers.items():
                for _, charged, cost in call.parts(phase):
                    costs[charged].append(cost * calls)
        return {phase: add_costs(parts) for phase, parts in costs.items()}

    def total(self) -> OpCost:
        """Return the cost of all calls in all phases."""
        return add_costs(self.totals().values())

    def uncounted_ops(self) -> dict[str, int]:
        """Return ``{overload: calls}`` of the operators that have no known cost."""
        found: Counter[str] = Counter()
        for key, total in self._sums.items():
            found[key.op] += total.uncounted
        for numbers in self._by_phase.values():
            for call, calls in numbers.items():
                if call.cost is None:
                    found[call.op] += calls
        return {op: found[op] for op in sorted(found) if found[op]}

    def formula_errors(self) -> dict[str, str]:
        """Return ``{overload: error}`` of the operators whose formula raised."""
        errors = [(key.op, key.error) for key in self._sums]
        errors += [(call.op, call.error) for numbers in self._by_phase.values() for call in numbers]
        return {op: error for op, error in errors if error is not None}

    def ran(self, op: str) -> bool:
        """Return True if this overload of an operator ran."""
        return any(key.op == op for key in self._sums) or any(
            call.op == op for found in self._calls for call in found.counts
        )

    def computing_modules(self) -> set[str]:
        """Return the fqns whose forward, first or again, ran an operator that is not free.

        A hook may call a module in a backward pass, whose operators are of that phase then.
        """
        called = {(found.fqn, found.phase) for found in self._calls if found.entered}
        ran = {(key.fqn, key.phase) for key in self._sums if key.kind != "free"}
        ran |= {
            (found.fqn, found.phase)
            for found in self._calls
            if any(call.kind != "free" for call in found.counts)
        }
        return {
            fqn for fqn, phase in ran if phase in ("forward", "recompute") or (fqn, phase) in called
        }

    def module_calls(self) -> dict[str, int]:
        """Return ``{fqn: times its forward ran}``."""
        found: defaultdict[str, int] = defaultdict(int)
        for fqn, phase, _, _, entered in self._calls:
            if entered and phase not in NOT_CALLS:
                found[fqn] += entered
        return found

    @cached_property
    def _by_phase(self) -> Mapping[Phase, Mapping[CallCost, int]]:
        """The number of calls of each cost in each phase, in all modules."""
        found: defaultdict[Phase, defaultdict[CallCost, int]] = defaultdict(_no_calls)
        for _, phase, counts, _, _ in self._calls:
            numbers = found[phase]
            for call, calls in counts.items():
                numbers[call] += calls
        return found

    def op_totals(self, names: Mapping[str, ModuleName]) -> dict[str, tuple[OpTotal, ...]]:
        """Return the operator totals of each fqn, by phase, operator and dtype.

        names: the known modules by fqn. A share of a cost goes to its child if that is known.
        """
        found: defaultdict[str, list[_Totals]] = defaultdict(list)

        def add(fqn: str, child: str, totals: _Totals) -> None:
            below = join(fqn, child) if child else fqn
            found[below if below in names else fqn].append(totals)

        for key, total in self._sums.items():
            add(key.fqn, key.child, {key._replace(fqn="", child=""): _op_total(key, total)})
        # Most modules make the same calls as another one: they share these totals.
        of_calls: dict[Any, dict[str, _Totals]] = {}
        for fqn, phase, counts, seconds, _ in self._calls:
            same = phase, tuple(counts.items()), tuple(seconds.items())
            if same not in of_calls:
                of_calls[same] = _totals_by_child(phase, counts, seconds)
            for child, totals in of_calls[same].items():
                add(fqn, child, totals)
        merged: dict[tuple[int, ...], tuple[OpTotal, ...]] = {}
        result = {}
        for fqn, parts in found.items():
            together = tuple(map(id, parts))
            if together not in merged:
                merged[together] = _merge(parts)
            result[fqn] = merged[together]
        return result


def _add_calls(sums: defaultdict[_Key, _Sum], recorded: _Calls) -> None:
    counts, seconds = recorded.counts, recorded.seconds
    for call in {**counts, **seconds}:  # events tell the time of a call later
        _add_call(sums, recorded.fqn, recorded.phase, call, counts.get(call, 0), seconds.get(call))


def _add_call(
    sums: defaultdict[_Key, _Sum],
    fqn: str,
    phase: Phase,
    call: CallCost,
    calls: int,
    seconds: float | None,
) -> None:
    key = _key(fqn, "", phase, call)
    total = sums[key]
    total.calls += calls
    total.add_latency(seconds)
    if call.cost is None:
        total.uncounted += calls
    for child, charged, cost in call.parts(phase):
        part = sums[key if charged == phase and not child else _key(fqn, child, charged, call)]
        part.cost += cost * calls


def _op_total(key: _Key, total: _Sum) -> OpTotal:
    is_unknown = total.calls > 0 and total.uncounted == total.calls
    return OpTotal(
        op=key.op,
        phase=key.phase,
        dtype=key.dtype,
        kind=key.kind,
        calls=total.calls,
        cost=None if is_unknown else total.cost,
        uncounted=total.uncounted,
        error=key.error,
        latency_s=total.latency_s,
    )


def _totals_by_child(
    phase: Phase, counts: Mapping[CallCost, int], seconds: Mapping[CallCost, float]
) -> dict[str, _Totals]:
    """Return the totals of a module's calls in a phase: by its child, and "" for its own."""
    sums: defaultdict[_Key, _Sum] = defaultdict(_Sum)
    _add_calls(sums, _Calls("", phase, counts, seconds))
    found: defaultdict[str, _Totals] = defaultdict(dict)
    for key, total in sums.items():
        found[key.child][key._replace(child="") if key.child else key] = _op_total(key, total)
    return found


def _merge(parts: Iterable[_Totals]) -> tuple[OpTotal, ...]:
    """Return the totals of all parts in order, each key once."""
    merged: _Totals = {}
    for totals in parts:
        for key, total in totals.items():
            merged[key] = _add(merged[key], total) if key in merged else total
    return tuple(sorted(merged.values(), key=_order))


def _order(op: OpTotal) -> tuple[str, ...]:
    return str(op.phase), op.op, str(op.dtype)


def _add(a: OpTotal, b: OpTotal) -> OpTotal:
    """Return two totals of one key as one; the time of a call may come without its number."""
    calls, uncounted = a.calls + b.calls, a.uncounted + b.uncounted
    return replace(
        a,
        calls=calls,
        uncounted=uncounted,
        cost=None if calls > 0 and uncounted == calls else add_costs((a.cost, b.cost)),
        latency_s=sum_known((a.latency_s, b.latency_s)),
    )


def _key(fqn: str, child: str, phase: Phase, call: CallCost) -> _Key:
    return _Key(fqn, child, phase, call.op, call.dtype, call.kind, call.error)
