"""Aggregate operator calls by module, phase and operator while a program runs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from dispatch_flops.counting.module_names import ModuleName, join
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile import OpTotal
from dispatch_flops.profile.cost import ZERO, OpCost, Phase


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
                self._add_all(found, counts, seconds)

    def including(self, module_phases: Iterable[ModulePhase]) -> CallAggregator:
        """Return a copy that includes the calls recorded in ``module_phases`` so far.

        Other threads may record calls there meanwhile.
        """
        copied = CallAggregator()
        with self._lock:
            for key, total in self._sums.items():
                copied._sums[key] = replace(total)
            for found in module_phases:
                copied._add_all(found, found.counts.copy(), found.seconds.copy())
        return copied

    def op_totals(self, names: Mapping[str, ModuleName]) -> dict[str, list[OpTotal]]:
        """Return the operator totals of each fqn.

        names: the known modules by fqn. A share of a cost goes to its child if that is known.
        """
        merged: defaultdict[_Key, _Sum] = defaultdict(_Sum)
        for key, part in self._sums.items():
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

    def _add_all(
        self,
        module_phase: ModulePhase,
        counts: Mapping[CallCost, int],
        seconds: Mapping[CallCost, float],
    ) -> None:
        for call_cost in {**counts, **seconds}:  # events tell the time of a call later
            calls = counts.get(call_cost, 0)
            self._add(module_phase, call_cost, calls, seconds.get(call_cost))

    def _add(
        self, module_phase: ModulePhase, call_cost: CallCost, calls: int, seconds: float | None
    ) -> None:
        total = self._sum(module_phase.fqn, "", module_phase.phase, call_cost)
        total.calls += calls
        total.add_latency(seconds)
        if call_cost.cost is None:
            total.uncounted += calls
        for child, phase, cost in call_cost.parts(module_phase.phase):
            self._sum(module_phase.fqn, child, phase, call_cost).cost += cost * calls

    def _sum(self, fqn: str, child: str, phase: Phase, call: CallCost) -> _Sum:
        return self._sums[_Key(fqn, child, phase, call.op, call.dtype, call.kind, call.error)]
