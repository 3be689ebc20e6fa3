"""The tree of modules, each with the operators that ran in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any, cast

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.cost import (
    MODEL_PHASES,
    PHASES,
    ZERO,
    OpCost,
    Phase,
    add_costs,
    check_phase,
)
from dispatch_flops.profile.memory import ModuleMemory
from dispatch_flops.profile.seconds import PhaseSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTotal:
    """All calls of one operator overload in one module, phase and compute dtype.

    op: the overload that ran, such as ``"aten.addmm.default"``.
    phase: None where calls of several phases are merged.
    dtype: what the kernel computes in, such as ``"float32"``; None without tensors.
    kind: "formula", "pointwise", "reduction", "free" or "unknown".
    cost: of the calls whose cost is known; None if no call's cost is known.
    uncounted: number of calls whose cost is not known.
    error: why the cost is not known, where a formula raised.
    latency_s: seconds of all calls together; None where not measured.

    Example::

        for total in profile.by_operator("forward").values():
            print(total.op, total.calls, total.cost.flops if total.cost else "not known")
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


SEVERAL_MODELS = "models"  # class name of a root that holds several models
NO_MODEL = "no model"  # class name of a root where no module was called


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ModuleNode:
    """One module of the model, or (fqn ``""``) the model itself.

        for node in profile.root.walk():
            print(node.fqn, node.class_name, node.total("forward").flops)

    fqn: as in ``named_modules()``. name: its last component (``""`` for the root).
    extra_repr: the module's own description, such as ``in_features=4, out_features=8``.
    calls: number of times its forward ran, without recomputation.
    own_params: elements of the parameters that the module itself holds.
    total_params: elements of the distinct parameters at or below it. active_params: of these,
        the ones that took part in an operator. trainable_params: the ones with requires_grad.
    local_params: of these, the ones that this rank holds, where parameters are sharded over ranks;
        None where it holds all. See ``Profile.local_params``.
    ops: operators of the module itself, without those of its children.
    seconds: per phase, of all calls and of everything below. "backward" includes the
        recomputation within the backward pass.
    latency_spread_s: median distance of the runs from their median ``latency_s``; None where
        there was one run.
    tokens: rows that entered the forward of an expert in a mixture of experts; else None.
    output_shapes: of the first tensors that its first call returned, with -1 for a size that is a
        symbol and None for a nested tensor; None where no call was seen to return.
    memory: bytes that it holds, and the most while it ran; None where memory was not followed.
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
    local_params: int | None = None
    ops: tuple[OpTotal, ...] = ()
    children: tuple[ModuleNode, ...] = ()
    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)
    latency_spread_s: float | None = None
    tokens: int | None = None
    output_shapes: tuple[tuple[int, ...] | None, ...] | None = None
    memory: ModuleMemory | None = None

    # Written out because the generated methods recurse, and a model may be deeper than
    # Python's stack.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ModuleNode):
            return NotImplemented
        # Where one tree ends first, an earlier pair has different numbers of children.
        pairs = zip(self.walk(), other.walk(), strict=False)
        return all(a._without_children() == b._without_children() for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.fqn, self.class_name, self.total_params, self.calls, len(self.children)))

    def __repr__(self) -> str:
        return (
            f"ModuleNode(fqn={self.fqn!r}, class_name={self.class_name!r}, calls={self.calls}, "
            f"total_params={self.total_params}, children={len(self.children)})"
        )

    def __str__(self) -> str:
        """Return the printout of this module and those below it."""
        from dispatch_flops.renderers import overview  # above this room: imported when shown

        return overview.render_module(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows in place of the object."""
        from dispatch_flops.renderers import notebook  # above this room: imported when shown

        return notebook.render_module(self)

    def _without_children(self) -> tuple[Any, ...]:
        """Return the values of the fields, with the number of children in place of them."""
        values = [getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "children"]
        return (*values, len(self.children))

    def walk(self) -> Iterator[ModuleNode]:
        """Yield this node and all below it, parents first, without recursion."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))

    @property
    def is_several_models(self) -> bool:
        """True for a root that stands for several models and is not a module itself."""
        return not self.fqn and self.class_name == SEVERAL_MODELS and not self.calls

    def own(self, phase: Phase | None = None) -> OpCost:
        """Return the exclusive cost, of the module's own operators, in one phase or in all.

        Raises ConfigError, as ``total`` and ``latency`` do, for a phase that is neither a standard
        one nor one of the module's or of those below.
        """
        self._check_phase(phase)
        return own_cost_in(self, phase)

    def total(self, phase: Phase | None = None) -> OpCost:
        """Return the inclusive cost, of the module and all below, in one phase or in all."""
        self._check_phase(phase)
        return cost_in(self, phase)

    def model_total(self) -> OpCost:
        """Return the inclusive cost of forward and backward, without recomputation."""
        return add_costs(map(self.total, MODEL_PHASES))

    def latency(self, phase: Phase = "forward") -> float | None:
        """Return the seconds of all calls in a phase; None where not measured."""
        self._check_phase(phase)
        return self.seconds.get(phase)

    def _check_phase(self, phase: Phase | None) -> None:
        if phase is not None and phase not in PHASES:
            timed = (timed for node in self.walk() for timed in node.seconds)
            check_phase(phase, (*self._totals, *timed))

    @property
    def latency_s(self) -> float | None:
        """Seconds in forward, of all calls; None where not measured."""
        return self.latency("forward")

    # Both are computed bottom-up for the whole tree and kept: a node is frozen, and a walk per
    # question would make rendering quadratic in depth.
    @cached_property
    def is_lower_bound(self) -> bool:
        """True if an operator at or below this node has no known cost."""
        self._compute_totals()
        return cast(bool, self.__dict__["is_lower_bound"])

    @cached_property
    def _totals(self) -> dict[Phase | None, OpCost]:
        self._compute_totals()
        return cast("dict[Phase | None, OpCost]", self.__dict__["_totals"])

    def _compute_totals(self) -> None:
        for node in reversed(list(self.walk())):
            known = node.__dict__
            if "_totals" not in known:
                known["_totals"] = sum_of_parts(node)
                known["is_lower_bound"] = any(op.uncounted for op in node.ops) or any(
                    child.is_lower_bound for child in node.children
                )


def new_node(**fields: Any) -> ModuleNode:
    """Return a node of these fields, ``seconds`` among them, as its constructor does.

    That one writes the fields of a frozen class one by one, which takes four times as long.
    """
    node = ModuleNode.__new__(ModuleNode)
    vars(node).update(fields)
    return node


def cost_in(node: ModuleNode, phase: Phase | None) -> OpCost:
    """Return the inclusive cost; nothing for a phase that occurs elsewhere, if at all."""
    totals = node._totals
    return add_costs(totals.values()) if phase is None else totals.get(phase, ZERO)


def own_cost_in(node: ModuleNode, phase: Phase | None) -> OpCost:
    """Return the exclusive cost; nothing for a phase that occurs elsewhere, if at all."""
    return add_costs(op.cost for op in node.ops if phase is None or op.phase == phase)


def local_params_of(node: ModuleNode) -> int:
    """Return the elements of its parameters that this rank holds: all of them unless sharded."""
    return node.total_params if node.local_params is None else node.local_params


def sum_of_parts(node: ModuleNode) -> dict[Phase | None, OpCost]:
    """Return the cost of its own operators and of all below it, for each phase that occurs."""
    costs: dict[Phase | None, list[OpCost | None]] = {}
    for op in node.ops:
        costs.setdefault(op.phase, []).append(op.cost)
    for child in node.children:
        for phase, total in child._totals.items():
            costs.setdefault(phase, []).append(total)
    return {phase: add_costs(parts) for phase, parts in costs.items()}


def lower_bounds(root: ModuleNode, phase: Phase | None) -> set[str]:
    """Return the fqns of the modules whose inclusive cost leaves out an operator."""
    found: set[str] = set()
    for node in reversed(list(root.walk())) if root.is_lower_bound else ():
        own = any(op.uncounted and phase in (None, op.phase) for op in node.ops)
        if own or any(child.fqn in found for child in node.children):
            found.add(node.fqn)
    return found


def flops_of(op: OpTotal) -> int:
    """Return the FLOPs of all its calls, 0 where unknown, for sorting."""
    return op.cost.flops if op.cost else 0


def map_tree(root: ModuleNode, change: Callable[[ModuleNode], ModuleNode]) -> ModuleNode:
    """Return the tree with every node replaced by ``change(node)``, children first."""
    changed: dict[int, ModuleNode] = {}
    for node in reversed(list(root.walk())):
        children = tuple(changed.pop(id(child)) for child in node.children)
        changed[id(node)] = change(dataclasses.replace(node, children=children))
    return changed[id(root)]


def check_depth(depth: Any) -> None:
    """Raise ConfigError if ``depth`` is neither a level of a tree, from 0 on, nor None for all."""
    if depth is not None and not is_int_of(0, depth):
        raise ConfigError(f"depth={depth!r:.60}: pass an int of at least 0, or None for all levels")


def is_int_of(least: int, value: Any) -> bool:
    """Return True if ``value`` is an int of at least ``least``, of Python or of NumPy."""
    try:
        return index(value) >= least
    except TypeError:  # a class has the method, and a tensor of several elements refuses it
        return False
