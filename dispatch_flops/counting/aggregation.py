"""Aggregate operator calls by module, phase and operator while a program runs."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dispatch_flops.counting.module_names import ModuleName, join
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile import OpTotal
from dispatch_flops.profile.cost import ZERO, OpCost, Phase


class _Account(NamedTuple):
    """What one line of the profile is about."""

    fqn: str
    child: str
    phase: Phase
    op: str
    dtype: str | None
    kind: str
    error: str | None


@dataclass(slots=True)
class _Balance:
    calls: int = 0
    uncounted: int = 0
    cost: OpCost = ZERO
    latency_s: float | None = None


class Ledger:
    """Costs by module, phase and operator."""

    def __init__(self) -> None:
        self._balances: defaultdict[_Account, _Balance] = defaultdict(_Balance)
        self._lock = threading.Lock()

    def fold(self, places: Iterable[ModulePhase]) -> None:
        """Book the calls that ``places``, of the calling thread, hold, and empty them."""
        with self._lock:
            for place in places:
                counts, place.counts = place.counts, defaultdict(int)
                seconds, place.seconds = place.seconds, defaultdict(float)
                self._book_all(place, counts, seconds)

    def with_open(self, places: Iterable[ModulePhase]) -> Ledger:
        """These books and what ``places`` hold just now; threads may go on counting there."""
        ledger = Ledger()
        with self._lock:
            for account, balance in self._balances.items():
                ledger._balances[account] = replace(balance)
            for place in places:
                ledger._book_all(place, place.counts.copy(), place.seconds.copy())
        return ledger

    def _book_all(
        self, place: ModulePhase, counts: Mapping[Any, int], seconds: Mapping[Any, float]
    ) -> None:
        for entry in {**counts, **seconds}:  # a time may be known later than its call
            self._book(place, entry, counts.get(entry, 0), seconds.get(entry))

    def _book(self, place: ModulePhase, entry: CallCost, calls: int, seconds: float | None) -> None:
        balance = self._balance(place.fqn, "", place.phase, entry)
        balance.calls += calls
        if seconds is not None:
            balance.latency_s = (balance.latency_s or 0.0) + seconds
        if entry.cost is None:
            balance.uncounted += calls
        for child, phase, cost in entry.parts(place.phase):
            self._balance(place.fqn, child, phase, entry).cost += cost * calls

    def _balance(self, fqn: str, child: str, phase: Phase, entry: CallCost) -> _Balance:
        account = _Account(fqn, child, phase, entry.op, entry.dtype, entry.kind, entry.error)
        return self._balances[account]

    def op_totals(self, nodes: Mapping[str, ModuleName]) -> dict[str, list[OpTotal]]:
        """Return the operator totals of each fqn; a share goes to the module it names."""
        merged: defaultdict[_Account, _Balance] = defaultdict(_Balance)
        for account, balance in self._balances.items():
            child = join(account.fqn, account.child) if account.child else account.fqn
            fqn = child if child in nodes else account.fqn
            total = merged[account._replace(fqn=fqn, child="")]
            total.calls += balance.calls
            total.uncounted += balance.uncounted
            total.cost += balance.cost
            if balance.latency_s is not None:
                total.latency_s = (total.latency_s or 0.0) + balance.latency_s
        by_fqn: defaultdict[str, list[OpTotal]] = defaultdict(list)
        for account, balance in merged.items():
            unknown = balance.calls > 0 and balance.uncounted == balance.calls
            by_fqn[account.fqn].append(
                OpTotal(
                    op=account.op,
                    phase=account.phase,
                    dtype=account.dtype,
                    kind=account.kind,
                    calls=balance.calls,
                    cost=None if unknown else balance.cost,
                    uncounted=balance.uncounted,
                    error=account.error,
                    latency_s=balance.latency_s,
                )
            )
        return by_fqn
