"""One module of a profile, the operators that ran in it, and all that lies below it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from dispatch_flops.profile.cost import MODEL_PHASES, PHASES, ZERO, OpCost, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTotal:
    """All calls of one operator overload in one place, phase and compute dtype.

    op: the overload that ran, such as ``"aten.addmm.default"``.
    phase: None where calls of several phases are taken together.
    dtype: what the kernel computes in, such as ``"float32"``; None where no tensor takes part.
    kind: "formula", "pointwise", "reduction", "free" or "unknown".
    cost: of all calls whose cost is known; None if that is none of them.
    uncounted: how many of the calls have no known cost.
    error: why the cost is unknown, where a formula raised.
    latency_s: seconds of all calls together; None where not measured.
    """

    op: str
    phase: Phase | None
    dtype: str | None = None
    kind: str = "formula"
    calls: int
    cost: OpCost | None
    uncounted: int = 0
    error: str | None = None
    latency_s: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModuleNode:
    """One module of the model, or (fqn ``""``) the model itself.

    fqn: as ``named_modules()`` has it. name: its last component (``""`` for the root).
    extra_repr: what the module says of itself, such as ``in_features=4, out_features=8``.
    calls: times its forward ran (recomputation not counted).
    own_params: elements of the parameters it holds itself; total_params: of the distinct
        parameters at or below it; active_params: of those, the ones that took part in an op.
    ops: its own operators, not its children's.
    latency_s: seconds in forward, summed over calls; None where not measured.
    latency_spread_s: how far a run lies from ``latency_s``, the median of several, in the median;
        None where there was one.
    backward_latency_s: of its operators, and all below, in backward and what that runs again.
    tokens: rows that entered its forward, for the experts of a mixture; else None.
    """

    fqn: str
    class_name: str
    name: str = ""
    extra_repr: str = ""
    calls: int = 0
    own_params: int = 0
    total_params: int = 0
    active_params: int = 0
    trainable_params: int = 0
    ops: tuple[OpTotal, ...] = ()
    children: tuple[ModuleNode, ...] = ()
    latency_s: float | None = None
    latency_spread_s: float | None = None
    backward_latency_s: float | None = None
    tokens: int | None = None

    # Written out because the generated ones recurse, and models are deeper than Python's stack.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleNode):
            return NotImplemented
        pairs = itertools.zip_longest(self.walk(), other.walk())
        return all(a is not None and b is not None and a._alone() == b._alone() for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.fqn, self.class_name, self.total_params, self.calls, len(self.children)))

    def __repr__(self) -> str:
        return (
            f"ModuleNode(fqn={self.fqn!r}, class_name={self.class_name!r}, calls={self.calls}, "
            f"total_params={self.total_params}, children={len(self.children)})"
        )

    def _alone(self) -> tuple[Any, ...]:
        """Its fields, with the number of its children in place of them."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "children"]
        return (*values, len(self.children))

    def walk(self) -> Iterator[ModuleNode]:
        """This node and all below it, parents first, without recursion."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    def own(self, phase: Phase | None = None) -> OpCost:
        """Cost of its own operators (exclusive), in one phase or in all."""
        return add_costs(op.cost for op in self.ops if phase is None or op.phase == phase)

    def total(self, phase: Phase | None = None) -> OpCost:
        """Cost of this module and all below it (inclusive), in one phase or in all."""
        totals = self._totals
        return add_costs(totals.values()) if phase is None else totals[phase]

    def model_total(self) -> OpCost:
        """Forward and backward: what the model needs, recomputation aside."""
        return add_costs(self._totals[phase] for phase in MODEL_PHASES)

    @property
    def is_lower_bound(self) -> bool:
        """True if an operator at or below this node has no known cost."""
        return self._unknown

    # Both are built bottom-up and kept: a node is frozen, and a walk per question would make
    # rendering quadratic in depth.
    @cached_property
    def _totals(self) -> dict[Phase, OpCost]:
        self._prepare()
        return cast("dict[Phase, OpCost]", self.__dict__["_totals"])

    @cached_property
    def _unknown(self) -> bool:
        self._prepare()
        return cast(bool, self.__dict__["_unknown"])

    def _prepare(self) -> None:
        for node in reversed(list(self.walk())):
            known = node.__dict__
            if "_totals" in known:
                continue
            parts = [costs_by_phase(node.ops), *(c.__dict__["_totals"] for c in node.children)]
            known["_totals"] = (
                parts[0]
                if len(parts) == 1
                else {phase: add_costs(part[phase] for part in parts) for phase in PHASES}
            )
            known["_unknown"] = any(op.uncounted for op in node.ops) or any(
                child.__dict__["_unknown"] for child in node.children
            )


def add_costs(costs: Iterable[OpCost | None]) -> OpCost:
    """The sum of the known costs."""
    macs = flops = bytes_read = bytes_written = 0
    for cost in costs:
        if cost is not None:
            macs += cost.macs
            flops += cost.flops
            bytes_read += cost.bytes_read
            bytes_written += cost.bytes_written
    if not (macs or flops or bytes_read or bytes_written):
        return ZERO
    return OpCost(macs=macs, flops=flops, bytes_read=bytes_read, bytes_written=bytes_written)


def costs_by_phase(ops: tuple[OpTotal, ...]) -> dict[Phase, OpCost]:
    """What some operators cost together, phase by phase."""
    costs: dict[Phase | None, list[OpCost | None]] = {}
    for op in ops:
        costs.setdefault(op.phase, []).append(op.cost)
    return {phase: add_costs(costs.get(phase, ())) for phase in PHASES}


def flops_of(op: OpTotal) -> int:
    """FLOPs of all its calls, 0 where unknown (for sorting)."""
    return op.cost.flops if op.cost else 0


def merge(a: OpTotal, b: OpTotal) -> OpTotal:
    """Two totals of the same operator as one; what was never called (shares of a call that is
    booked elsewhere) took no time.
    """
    timed = all(op.latency_s is not None for op in (a, b) if op.calls) and a.calls + b.calls > 0
    return OpTotal(
        op=a.op,
        phase=a.phase if a.phase == b.phase else None,
        dtype=a.dtype if a.dtype == b.dtype else None,
        kind=b.kind if a.cost is None else a.kind,
        calls=a.calls + b.calls,
        cost=None if a.cost is None and b.cost is None else (a.cost or ZERO) + (b.cost or ZERO),
        uncounted=a.uncounted + b.uncounted,
        error=a.error or b.error,
        latency_s=(a.latency_s or 0.0) + (b.latency_s or 0.0) if timed else None,
    )


def map_tree(root: ModuleNode, change: Callable[[ModuleNode], ModuleNode]) -> ModuleNode:
    """The tree with every node replaced by ``change(node)``, children first."""
    changed: dict[int, ModuleNode] = {}
    for node in reversed(list(root.walk())):
        children = tuple(changed.pop(id(child)) for child in node.children)
        changed[id(node)] = change(dataclasses.replace(node, children=children))
    return changed[id(root)]
