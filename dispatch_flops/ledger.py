"""The books: calls by place and entry while the run goes on, a frozen ``Profile`` at its end.

An ``Entry`` stands for one operator overload at one signature; recording a call is one
dictionary increment. ``fold`` turns calls into costs, so that memory stays bounded by
modules x operators however many shapes a run goes through.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dispatch_flops.analysis import sum_known
from dispatch_flops.conventions import Causal
from dispatch_flops.cost import OpCost, Phase
from dispatch_flops.devices import device_name
from dispatch_flops.names import ModuleNames, Named, join
from dispatch_flops.parameters import ParameterCounts, ParameterFacts, count_held
from dispatch_flops.places import Entry, Place
from dispatch_flops.tree import OUTSIDE, ModuleNode, OpTotal, Profile, Scope


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
    macs: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    latency_s: float | None = None

    def add(self, cost: OpCost, times: int) -> None:
        self.macs += cost.macs * times
        self.flops += cost.flops * times
        self.bytes_read += cost.bytes_read * times
        self.bytes_written += cost.bytes_written * times


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What was seen beside the operators, for ``freeze``; keys are fqns.

    used_params: ids of the parameters that took part in an operator.
    latency_s: seconds in forward; None where modules take as long as their operators.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    used_params: Collection[int] = ()
    latency_s: Mapping[str, float] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)


class Ledger:
    """Costs by module, phase and operator."""

    def __init__(self) -> None:
        self._balances: defaultdict[_Account, _Balance] = defaultdict(_Balance)
        self._lock = threading.Lock()

    def fold(self, places: Iterable[Place]) -> None:
        """Book the calls that ``places``, of the calling thread, hold, and empty them."""
        with self._lock:
            for place in places:
                counts, place.counts = place.counts, defaultdict(int)
                seconds, place.seconds = place.seconds, defaultdict(float)
                self._book_all(place, counts, seconds)

    def with_open(self, places: Iterable[Place]) -> Ledger:
        """These books and what ``places`` hold just now; threads may go on counting there."""
        ledger = Ledger()
        with self._lock:
            for account, balance in self._balances.items():
                ledger._balances[account] = replace(balance)
            for place in places:
                ledger._book_all(place, place.counts.copy(), place.seconds.copy())
        return ledger

    def _book_all(
        self, place: Place, counts: Mapping[Any, int], seconds: Mapping[Any, float]
    ) -> None:
        for entry in {**counts, **seconds}:  # a time may be known later than its call
            self._book(place, entry, counts.get(entry, 0), seconds.get(entry))

    def _book(self, place: Place, entry: Entry, calls: int, seconds: float | None) -> None:
        balance = self._balance(place.fqn, "", place.phase, entry)
        balance.calls += calls
        if seconds is not None:
            balance.latency_s = (balance.latency_s or 0.0) + seconds
        if entry.cost is None:
            balance.uncounted += calls
        for child, phase, cost in entry.parts(place.phase):
            self._balance(place.fqn, child, phase, entry).add(cost, calls)

    def _balance(self, fqn: str, child: str, phase: Phase, entry: Entry) -> _Balance:
        account = _Account(fqn, child, phase, entry.op, entry.dtype, entry.kind, entry.error)
        return self._balances[account]

    def freeze(
        self,
        names: ModuleNames,
        seen: Observed,
        *,
        causal: Causal,
        notes: tuple[str, ...] = (),
    ) -> Profile:
        """The profile of everything booked so far, checked."""
        devices = names.devices()
        ops = self._by_fqn(names.nodes)
        forest = _Forest(names, ops, seen)
        return Profile(
            root=forest.model(),
            outside=forest.node(OUTSIDE),
            scope=Scope(
                device=devices.type,
                device_name=device_name(next(iter(devices.accelerators), devices.type)),
                torch_version=str(torch.__version__),
                causal=causal,
            ),
            notes=notes,
            ran_elsewhere=forest.ran_elsewhere(),
        ).check()

    def _by_fqn(self, nodes: Mapping[str, Named]) -> dict[str, list[OpTotal]]:
        """Operator totals of each place; shares go to the submodule they name, if it is there."""
        merged: defaultdict[_Account, _Balance] = defaultdict(_Balance)
        for account, balance in self._balances.items():
            child = join(account.fqn, account.child) if account.child else account.fqn
            fqn = child if child in nodes else account.fqn
            total = merged[account._replace(fqn=fqn, child="")]
            total.calls += balance.calls
            total.uncounted += balance.uncounted
            total.add(_cost(balance), 1)
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
                    cost=None if unknown else _cost(balance),
                    uncounted=balance.uncounted,
                    error=account.error,
                    latency_s=balance.latency_s,
                )
            )
        return by_fqn


def _cost(balance: _Balance) -> OpCost:
    return OpCost(
        macs=balance.macs,
        flops=balance.flops,
        bytes_read=balance.bytes_read,
        bytes_written=balance.bytes_written,
    )


class _Forest:
    """The trees of modules (the model's, and the outside's), built bottom-up."""

    def __init__(
        self, names: ModuleNames, ops: Mapping[str, list[OpTotal]], seen: Observed
    ) -> None:
        self._names = names
        self._ops = ops
        self._seen = seen
        self._used = {*seen.used_params, *self._sharded_and_called()}
        self._children = names.children()
        for fqn in ops:  # named parts of the outside that are no modules
            if fqn not in self._children:
                self._children[fqn] = []
        self._children.setdefault(OUTSIDE, [])
        self._children[OUTSIDE] += [
            fqn
            for fqn in self._children
            if fqn.startswith(f"{OUTSIDE}.")
            and (fqn not in names.nodes or names.nodes[fqn].parent is None)
        ]
        # A sole root that was found on the way is the model: its names lose their prefix.
        self._prefix = names.roots[0].fqn if len(names.roots) == 1 else ""
        self._modules = {fqn: named.itself() for fqn, named in list(names.nodes.items())}
        self._params = self._count_params()

    def _count_params(self) -> dict[Named | str, ParameterCounts]:
        """Of every module, and of every line that is no module."""
        # A module has the same parameters under all its names: they are one holder.
        held: dict[Named | str, dict[Named | str, None]] = {
            self._holder(fqn): {} for fqn in self._children
        }
        own: dict[Named | str, tuple[ParameterFacts, ...]] = {}
        for fqn, children in self._children.items():
            held[self._holder(fqn)].update((self._holder(child), None) for child in children)
        for holder, below in held.items():
            if isinstance(holder, Named):
                own[holder] = tuple(holder.parameters())
                also = (named.itself() for named in holder.also)
                below.update((named, None) for named in also if named in held)
        if len(self._names.roots) != 1:
            held[""] = {self._holder(root.fqn): None for root in self._names.roots}
        return count_held(held, own, self._used)

    def _holder(self, fqn: str) -> Named | str:
        return self._modules.get(fqn, fqn)

    def ran_elsewhere(self) -> tuple[str, ...]:
        """Names under which a module never ran that ran under another."""
        calls = self._seen.calls
        ran = {itself for fqn, itself in self._modules.items() if calls.get(fqn)}
        return tuple(
            self._shown(fqn)
            for fqn, itself in self._modules.items()
            if itself in ran and not calls.get(fqn)
        )

    def _sharded_and_called(self) -> Iterator[int]:
        """Keys of the parameters that stand for others in operators, of modules that ran."""
        for fqn, named in list(self._names.nodes.items()):
            if self._seen.calls.get(fqn):
                yield from (facts.key for facts in named.parameters() if facts.stands_in)

    def model(self) -> ModuleNode:
        roots = self._names.roots
        if len(roots) == 1:
            return self.node(roots[0].fqn)
        params = self._params[""]
        return ModuleNode(
            fqn="",
            class_name="models" if roots else "nothing",
            children=tuple(self.node(root.fqn) for root in roots),
            total_params=params.total,
            active_params=params.active,
            trainable_params=params.trainable,
        )

    def _order(self, top: str) -> list[str]:
        """``top`` and all fqns below it, parents first."""
        order = [top]
        for fqn in order:
            order.extend(self._children.get(fqn, ()))
        return order

    def node(self, top: str) -> ModuleNode:
        """The tree below ``top``."""
        built: dict[str, ModuleNode] = {}
        for fqn in reversed(self._order(top)):
            children = tuple(built.pop(child) for child in self._children.get(fqn, ()))
            built[fqn] = self._build(fqn, self._names.nodes.get(fqn), children)
        return built[top]

    def _build(self, fqn: str, named: Named | None, children: tuple[ModuleNode, ...]) -> ModuleNode:
        seen = self._seen
        module = named.module() if named is not None else None
        ops = tuple(sorted(self._ops.get(fqn, ()), key=lambda op: (op.phase, op.op, str(op.dtype))))
        shown = self._shown(fqn)
        params = self._params[self._holder(fqn)]
        parent = named.parent.fqn if named is not None and named.parent is not None else OUTSIDE
        name = fqn[len(parent) + 1 :] if fqn.startswith(f"{parent}.") else shown
        return ModuleNode(
            fqn=shown,
            name=name if shown else "",
            class_name=_class_name(fqn, named, module),
            extra_repr=_extra_repr(module),
            calls=seen.calls.get(fqn, 0),
            own_params=params.own,
            total_params=params.total,
            active_params=params.active,
            trainable_params=params.trainable,
            ops=ops,
            children=children,
            latency_s=self._latency_s(fqn, _seconds(ops, children, "forward")),
            backward_latency_s=_seconds(ops, children, "backward", "recompute"),
            tokens=seen.tokens.get(fqn),
        )

    def _latency_s(self, fqn: str, in_operators: float | None) -> float | None:
        """Seconds in forward: as measured, but no less than operators took in it."""
        if self._seen.latency_s is None:
            return in_operators
        measured = self._seen.latency_s.get(fqn)
        return None if measured is None else max(measured, in_operators or 0.0)

    def _shown(self, fqn: str) -> str:
        """The name that the profile gives it."""
        if self._prefix and (fqn == self._prefix or fqn.startswith(f"{self._prefix}.")):
            return fqn[len(self._prefix) + 1 :]
        return fqn


def _seconds(
    ops: Iterable[OpTotal], children: Iterable[ModuleNode], *phases: Phase
) -> float | None:
    """Seconds of a module's operators, with those of all below it; None if not timed."""
    own = [op.latency_s for op in ops if op.phase in phases]
    below = (c.latency_s if "forward" in phases else c.backward_latency_s for c in children)
    return sum_known((*own, *below))


def _class_name(fqn: str, named: Named | None, module: nn.Module | None) -> str:
    if module is not None:
        return type(module).__name__
    if named is not None and named.class_name:
        return named.class_name
    return "outside" if fqn == OUTSIDE else fqn.rsplit(".", 1)[-1]


def _extra_repr(module: nn.Module | None) -> str:
    """What the module says of itself; nothing where its own code fails."""
    if module is None or type(module).extra_repr is nn.Module.extra_repr:
        return ""
    try:
        return str(module.extra_repr())
    except Exception:
        return ""
