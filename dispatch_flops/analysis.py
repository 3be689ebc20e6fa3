"""Questions to a ``Profile``: pure functions from the frozen tree to small frozen results.

Costs are exact ints. *Inclusive* figures are of a module and all below it, *exclusive* ones
of the module alone; exclusive figures of all modules add up to the total.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from dispatch_flops.cost import PHASES, ZERO, OpCost, Phase
from dispatch_flops.errors import ConfigError
from dispatch_flops.tree import (
    ModuleNode,
    OpTotal,
    Profile,
    StepTiming,
    add_costs,
    flops_of,
    merge,
)
from dispatch_flops.units import ratio

Key = Literal["params", "macs", "flops", "bytes", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a module, or a group of ``modules`` of them, costs.

    lower_bound: an operator among them has no known cost.
    latency_s: of the forward, or of the backward where that phase was asked for; ``None``
        where not measured.
    """

    modules: int = 1
    params: int = 0
    cost: OpCost = ZERO
    latency_s: float | None = None
    lower_bound: bool = False

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            modules=self.modules + other.modules,
            params=self.params + other.params,
            cost=self.cost + other.cost,
            latency_s=sum_known((self.latency_s, other.latency_s)),
            lower_bound=self.lower_bound or other.lower_bound,
        )

    def value(self, key: Key) -> int | float | None:
        """The figure of that name."""
        match key:
            case "params":
                return self.params
            case "macs":
                return self.cost.macs
            case "flops":
                return self.cost.flops
            case "bytes":
                return self.cost.bytes_total
            case "latency":
                return self.latency_s
            case _:
                keys = ", ".join(map(repr, get_args(Key)))
                raise ConfigError(f"{key!r} is no figure of a module: choose one of {keys}")

    @property
    def flops_per_s(self) -> float | None:
        """FLOPs over latency; meaningful where both are of the same phase."""
        return ratio(self.cost.flops, self.latency_s)


def sum_known(values: Iterable[float | None]) -> float | None:
    """The sum of the values that are known; ``None`` if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# -- modules ------------------------------------------------------------------------------------


def walk_with_depth(root: ModuleNode) -> Iterator[tuple[ModuleNode, int]]:
    """Every node with its depth (the root's is 0), parents first, without recursion."""
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack.extend((child, depth + 1) for child in reversed(node.children))


def inclusive(root: ModuleNode, phase: Phase | None = None) -> dict[str, Figures]:
    """``{fqn: figures}`` of each module and all below it, parents first.

    A module whose own latency was not measured, as a container that is never called, shows
    the sum of its children's.
    """
    root.total()  # from here on every node below knows its own
    nodes = list(root.walk())
    found: dict[str, Figures] = {}
    for node in reversed(nodes):
        below = [found[child.fqn] for child in node.children]
        latency_s = _measured_s(node, phase)
        found[node.fqn] = Figures(
            params=node.total_params,
            cost=node.total(phase),
            latency_s=sum_known(f.latency_s for f in below) if latency_s is None else latency_s,
            lower_bound=_lacks_cost(node, phase) or any(f.lower_bound for f in below),
        )
    return {node.fqn: found[node.fqn] for node in nodes}


def exclusive(root: ModuleNode, phase: Phase | None = None) -> dict[str, Figures]:
    """``{fqn: figures}`` of each module without what is below it, parents first.

    The latency of a module alone is its own less its children's, not below 0.
    """
    whole = inclusive(root, phase)
    return {
        node.fqn: Figures(
            params=node.own_params,
            cost=node.own(phase),
            latency_s=_alone_s(
                _measured_s(node, phase), (whole[child.fqn].latency_s for child in node.children)
            ),
            lower_bound=_lacks_cost(node, phase),
        )
        for node in root.walk()
    }


EXACT = 0.1  # a latency is called exact that is right to this share


def inexact_latencies(root: ModuleNode, timing: StepTiming) -> frozenset[str]:
    """The modules (fqn) whose latency is not exact to 10 %: calls in it are too short, or runs
    of it vary by more.

    The model's own is never too short where it was measured by itself.
    """
    least: dict[str, float] = {}
    inexact = set()
    for node in reversed([*root.walk()]):  # children first
        timed = (op for op in node.ops if op.phase == "forward" and op.latency_s is not None)
        operators = sum(op.calls for op in timed)
        least[node.fqn] = (
            node.calls * (timing.resolution_s or 0.0)
            + operators * (timing.operator_resolution_s or 0.0)
            + sum(least[child.fqn] for child in node.children)
        )
        if not node.latency_s:
            continue
        by_itself = node is root and timing.forward_s is not None
        too_short = node.latency_s < least[node.fqn] and not by_itself
        if too_short or (node.latency_spread_s or 0.0) > EXACT * node.latency_s:
            inexact.add(node.fqn)
    return frozenset(inexact)


def latency_of(node: ModuleNode, phase: Phase = "forward") -> float | None:
    """Seconds of the module, or of its children together where it was not measured itself."""
    return inclusive(node, phase)[node.fqn].latency_s


def by_depth(root: ModuleNode, phase: Phase | None = None) -> list[dict[str, Figures]]:
    """Per depth ``{class name: inclusive figures of its modules there}``, in tree order."""
    whole = inclusive(root, phase)
    levels: list[dict[str, Figures]] = []
    for node, depth in walk_with_depth(root):
        if depth == len(levels):
            levels.append({})
        _add_to(levels[depth], node.class_name, whole[node.fqn])
    return levels


def by_type(profile: Profile, phase: Phase | None = None) -> dict[str, Figures]:
    """``{class name: exclusive figures of its modules}``, most FLOPs first.

    The costs add up to the model's total; a parameter that several modules hold counts in each.
    """
    found: dict[str, Figures] = {}
    alone = exclusive(profile.root, phase)
    for node in profile.root.walk():
        _add_to(found, node.class_name, alone[node.fqn])
    return dict(top(found, "flops", len(found)))


def top(figures: dict[str, Figures], key: Key, k: int) -> list[tuple[str, Figures]]:
    """The ``k`` entries with the most of ``key``, equal ones in their order; unknown last."""

    def rank(item: tuple[str, Figures]) -> float:
        value = item[1].value(key)
        return -1 if value is None else value

    return sorted(figures.items(), key=rank, reverse=True)[: max(k, 0)]


def top_modules(
    profile: Profile, key: Key = "flops", k: int = 10, phase: Phase | None = None
) -> list[tuple[ModuleNode, Figures]]:
    """The ``k`` modules that themselves, without their children, have the most of ``key``.

    Modules that have none of it are left out.
    """
    nodes = {node.fqn: node for node in profile.root.walk()}
    ranked = top(exclusive(profile.root, phase), key, k)
    return [(nodes[fqn], figures) for fqn, figures in ranked if figures.value(key)]


def _add_to(groups: dict[str, Figures], name: str, figures: Figures) -> None:
    groups[name] = groups[name] + figures if name in groups else figures


def _measured_s(node: ModuleNode, phase: Phase | None) -> float | None:
    if phase in (None, "forward"):
        return node.latency_s
    return node.backward_latency_s if phase == "backward" else None


def _alone_s(own_s: float | None, children_s: Iterable[float | None]) -> float | None:
    return None if own_s is None else max(0.0, own_s - (sum_known(children_s) or 0.0))


def _lacks_cost(node: ModuleNode, phase: Phase | None) -> bool:
    return any(op.uncounted for op in node.ops if phase is None or op.phase == phase)


# -- time ---------------------------------------------------------------------------------------


def measured_seconds(profile: Profile) -> tuple[float | None, str]:
    """Seconds of all phases that ran, and the words for them; None if a phase lacks its time."""
    timing = profile.timing
    if timing.iteration_s is not None:
        return timing.iteration_s, "whole iteration"
    parts = {
        "forward": _forward_s(profile),
        "backward": timing.backward_s,
        "optimizer": timing.step_s,
    }
    # Recomputation takes place within the backward pass.
    ran = ["backward" if phase == "recompute" else phase for phase in phases_of(profile)]
    if not ran and profile.root.calls:  # a model of which no operator ran
        ran = ["forward"]
    names = [name for name in parts if name in ran]
    if not names or any(parts[name] is None for name in names):
        return None, "not measured"
    return sum_known(parts[name] for name in names), " + ".join(names)


def phase_seconds(profile: Profile) -> dict[str, float | None]:
    """Seconds per phase where the profile has them."""
    timing = profile.timing
    return {
        "forward": _forward_s(profile),
        "backward": timing.backward_s,
        "recompute": None,
        "optimizer": timing.step_s,
    }


def _forward_s(profile: Profile) -> float | None:
    forward_s = profile.timing.forward_s
    return latency_of(profile.root) if forward_s is None else forward_s


# -- operators ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """All calls of one operator with one compute dtype.

    cost: of the calls whose cost is known; ``None`` if that is none.
    share: of all known FLOPs, 0 to 1; ``None`` where the cost is unknown or the total is 0.
    bytes_per_call: mean over the calls whose cost is known.
    """

    op: str
    kind: str
    phases: tuple[Phase, ...]
    dtype: str | None
    calls: int
    uncounted: int = 0
    cost: OpCost | None
    share: float | None = None
    latency_s: float | None = None
    error: str | None = None

    @property
    def bytes_per_call(self) -> float | None:
        return ratio(self.cost.bytes_total, self.calls - self.uncounted) if self.cost else None

    @property
    def arithmetic_intensity(self) -> float | None:
        return self.cost.arithmetic_intensity if self.cost else None


def operator_rows(profile: Profile, phase: Phase | None = None) -> list[OperatorRow]:
    """Every operator that ran, in the model and outside it: most FLOPs first, then most bytes."""
    merged: dict[tuple[str, str | None], OpTotal] = {}
    phases: dict[tuple[str, str | None], set[Phase | None]] = {}
    for op in _ops(profile, phase):
        key = (op.op, op.dtype)
        merged[key] = merge(merged[key], op) if key in merged else op
        phases.setdefault(key, set()).add(op.phase)
    total = sum(flops_of(op) for op in merged.values())
    rows = [
        OperatorRow(
            op=op.op,
            kind=op.kind,
            phases=tuple(p for p in PHASES if p in phases[key]),
            dtype=op.dtype,
            calls=op.calls,
            uncounted=op.uncounted,
            cost=op.cost,
            share=ratio(op.cost.flops if op.cost else None, total),
            latency_s=op.latency_s,
            error=op.error,
        )
        for key, op in merged.items()
    ]
    return sorted(rows, key=_operator_rank)


def cost_by_dtype(profile: Profile, phase: Phase | None = None) -> dict[str | None, OpCost]:
    """``{compute dtype: known cost}``, most FLOPs first; ``None`` for operators without tensors."""
    groups: dict[str | None, list[OpCost | None]] = {}
    for op in _ops(profile, phase):
        groups.setdefault(op.dtype, []).append(op.cost)
    costs = {dtype: add_costs(parts) for dtype, parts in groups.items()}
    return dict(sorted(costs.items(), key=lambda item: (-item[1].flops, item[0] or "")))


def phases_of(profile: Profile) -> tuple[Phase, ...]:
    """The phases in which an operator ran, in their order."""
    seen = {op.phase for op in profile.op_totals()}
    return tuple(phase for phase in PHASES if phase in seen)


def _ops(profile: Profile, phase: Phase | None) -> Iterator[OpTotal]:
    return (op for op in profile.op_totals() if phase is None or op.phase == phase)


def _operator_rank(row: OperatorRow) -> tuple[int, int, str, str]:
    cost = row.cost or ZERO
    return (-cost.flops, -cost.bytes_total, row.op, row.dtype or "")


# -- comparison ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One module or operator in two profiles; ``None`` where a profile lacks it."""

    name: str
    before: Figures | None
    after: Figures | None
    calls_before: int = 0
    calls_after: int = 0

    @property
    def changed(self) -> bool:
        """True if a count differs; latencies, which never repeat, are no reason."""
        if self.before is None or self.after is None:
            return True
        return (self.before.params, self.before.cost, self.calls_before) != (
            self.after.params,
            self.after.cost,
            self.calls_after,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """Two profiles side by side: every module by fqn, every operator by overload, the whole."""

    total: Change
    modules: tuple[Change, ...] = field(default=())
    operators: tuple[Change, ...] = field(default=())

    def changed_modules(self) -> list[Change]:
        return [change for change in self.modules if change.changed]

    def changed_operators(self) -> list[Change]:
        return [change for change in self.operators if change.changed]


def diff(before: Profile, after: Profile, phase: Phase | None = None) -> Diff:
    """What changed from one profile to another; what only ``after`` has comes last."""
    return Diff(
        total=_changes({"": _whole(before, phase)}, {"": _whole(after, phase)})[0],
        modules=_changes(_modules(before, phase), _modules(after, phase)),
        operators=_changes(_operators(before, phase), _operators(after, phase)),
    )


_Side = dict[str, tuple[Figures, int]]


def _changes(before: _Side, after: _Side) -> tuple[Change, ...]:
    nothing = (None, 0)
    changes = []
    for name in dict.fromkeys((*before, *after)):
        (a, calls_a), (b, calls_b) = before.get(name, nothing), after.get(name, nothing)
        changes.append(
            Change(name=name, before=a, after=b, calls_before=calls_a, calls_after=calls_b)
        )
    return tuple(changes)


def _whole(profile: Profile, phase: Phase | None) -> tuple[Figures, int]:
    root = inclusive(profile.root, phase)[profile.root.fqn]
    outside = inclusive(profile.outside, phase)[profile.outside.fqn]
    return root + outside, profile.root.calls


def _modules(profile: Profile, phase: Phase | None) -> _Side:
    figures = inclusive(profile.root, phase) | inclusive(profile.outside, phase)
    return {node.fqn: (figures[node.fqn], node.calls) for node in profile.nodes()}


def _operators(profile: Profile, phase: Phase | None) -> _Side:
    return {
        name: (
            Figures(
                modules=0,
                cost=op.cost or ZERO,
                latency_s=op.latency_s,
                lower_bound=bool(op.uncounted),
            ),
            op.calls,
        )
        for name, op in profile.by_operator(phase).items()
    }
