"""Aggregate operator calls by module, phase and operator while a program runs."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dispatch_flops.counting.module_names import ModuleName, join
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile import OpTotal
from dispatch_flops.profile.cost import ZERO, OpCost, Phase, add_costs


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
                seconds, found.seconds = found.seconds, defaultdict(float)
                _add_calls(self._sums, _Calls(found.fqn, found.phase, counts, seconds))

    def including(self, module_phases: Iterable[ModulePhase]) -> RecordedCalls:
        """Return the calls aggregated so far and those recorded in ``module_phases``.

        Calls that are recorded later, perhaps by other threads, do not change the result.
        """
        with self._lock:
            sums = {key: replace(total) for key, total in self._sums.items()}
            calls = [
                _Calls(found.fqn, found.phase, found.counts.copy(), found.seconds.copy())
                for found in module_phases
            ]
        return RecordedCalls(sums, [found for found in calls if found.counts or found.seconds])


class _Calls(NamedTuple):
    """The calls recorded for one module in one phase: their number and seconds by cost."""

    fqn: str
    phase: Phase
    counts: Mapping[CallCost, int]
    seconds: Mapping[CallCost, float]


class RecordedCalls:
    """Operator calls as they were when they were taken: what a profile is built from.

    Totals need no tree of modules; ``op_totals`` is what a tree is built from.
    """

    def __init__(self, sums: Mapping[_Key, _Sum], calls: Sequence[_Calls]) -> None:
        self._sums = sums
        self._calls = calls

    def totals(self) -> dict[Phase, OpCost]:
        """Return the cost of all calls in each phase."""
        costs: defaultdict[Phase, list[OpCost]] = defaultdict(list)
        for key, total in self._sums.items():
            costs[key.phase].append(total.cost)
        for (phase, call), calls in self._by_cost().items():
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
        for (_, call), calls in self._by_cost().items():
            if call.cost is None:
                found[call.op] += calls
        return {op: found[op] for op in sorted(found) if found[op]}

    def formula_errors(self) -> dict[str, str]:
        """Return ``{overload: error}`` of the operators whose formula raised."""
        errors = [(key.op, key.error) for key in self._sums]
        errors += [(call.op, call.error) for _, call in self._by_cost()]
        return {op: error for op, error in errors if error is not None}

    def _by_cost(self) -> Mapping[tuple[Phase, CallCost], int]:
        """Return the number of calls of each cost in each phase, in all modules."""
        found: defaultdict[tuple[Phase, CallCost], int] = defaultdict(int)
        for _, phase, counts, _ in self._calls:
            for call, calls in counts.items():
                found[phase, call] += calls
        return found

    def op_totals(self, names: Mapping[str, ModuleName]) -> dict[str, list[OpTotal]]:
        """Return the operator totals of each fqn.

        names: the known modules by fqn. A share of a cost goes to its child if that is known.
        """
        sums = defaultdict(_Sum, {key: replace(total) for key, total in self._sums.items()})
        for calls in self._calls:
            _add_calls(sums, calls)
        merged: defaultdict[_Key, _Sum] = defaultdict(_Sum)
        for key, part in sums.items():
            child = join(key.fqn, key.child) if key.child else key.fqn
            fqn = child if child in names else key.fqn
            total = merged[key._replace(fqn=fqn, child="")]
            total.calls += part.calls
            total.uncounted += part.uncounted
            total.cost += part.cost
            total.add_latency(part.latency_s)
        by_fqn: defaultdict[str, list[OpTotal]] = defaultdict(list)
        for key, total in merged.items():
            is_unknown = total.calls > 0 and total.uncounted == total.calls
            by_fqn[key.fqn].append(
                OpTotal(
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
            )
        return by_fqn


def _add_calls(sums: defaultdict[_Key, _Sum], recorded: _Calls) -> None:
    counts, seconds = recorded.counts, recorded.seconds
    for call in {**counts, **seconds}:  # events tell the time of a call later
        calls = counts.get(call, 0)
        total = sums[_key(recorded.fqn, "", recorded.phase, call)]
        total.calls += calls
        total.add_latency(seconds.get(call))
        if call.cost is None:
            total.uncounted += calls
        for child, phase, cost in call.parts(recorded.phase):
            sums[_key(recorded.fqn, child, phase, call)].cost += cost * calls


def _key(fqn: str, child: str, phase: Phase, call: CallCost) -> _Key:
    return _Key(fqn, child, phase, call.op, call.dtype, call.kind, call.error)
