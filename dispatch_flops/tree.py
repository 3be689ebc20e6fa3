"""The frozen result of a profile: plain data, standard library only.

A ``Profile`` can be saved, loaded, compared and rendered where neither torch nor the model
is. Every count is an exact int; ``None`` always means "not known" or "not measured".
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from dispatch_flops.cost import MODEL_PHASES, PHASES, ZERO, OpCost, Phase
from dispatch_flops.errors import InconsistentProfileError, ProfileFormatError
from dispatch_flops.plain import build

if TYPE_CHECKING:
    from dispatch_flops.analysis import Diff

SCHEMA = "dispatch_flops.profile"
SCHEMA_VERSION = 1
OUTSIDE = "<outside>"


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
            parts = [_costs_by_phase(node.ops), *(c.__dict__["_totals"] for c in node.children)]
            known["_totals"] = (
                parts[0]
                if len(parts) == 1
                else {phase: add_costs(part[phase] for part in parts) for phase in PHASES}
            )
            known["_unknown"] = any(op.uncounted for op in node.ops) or any(
                child.__dict__["_unknown"] for child in node.children
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds of one step's parts; None where not measured.

    method: how the latencies of this profile were taken, in words for the reader.
    resolution_s, operator_resolution_s: a module's latency is exact to 10 % where it is at least
        this for every call of a module in it, and this for every operator (where these were timed
        in the same pass).
    """

    forward_s: float | None = None
    backward_s: float | None = None
    step_s: float | None = None
    iteration_s: float | None = None
    spread_s: float | None = None
    repeats: int = 1
    method: str | None = None
    resolution_s: float | None = None
    operator_resolution_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Where and how the run took place: what the numbers are numbers of.

    Every count is of this rank. batch_size: samples per rank and step, where known.
    expert_params: of ``total_params``, those of experts; model_expert_params: experts'
    parameters over all ranks. Both where an engine knows them.
    """

    device: str = "cpu"
    device_name: str | None = None
    torch_version: str | None = None
    rank: int = 0
    world_size: int | None = None
    data_parallel_size: int | None = None
    model_parallel_size: int = 1
    expert_params: int | None = None
    model_expert_params: int | None = None
    expert_tensor_parallel: bool | None = None
    batch_size: int | None = None
    step: int = 1
    causal: str = "full"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a run cost: the model's tree, and what ran outside the model.

    root: the model (fqn ``""``). outside: operators that ran in no module of the model: loss
    functions, data preparation, gradient accumulation and clipping, optimizer steps; its
    children name the parts that are known. ran_elsewhere: names of modules under which these
    never ran, while they did under another: a module that several parents hold has several.
    """

    root: ModuleNode
    outside: ModuleNode = field(
        default_factory=lambda: ModuleNode(fqn=OUTSIDE, name=OUTSIDE, class_name="outside")
    )
    timing: StepTiming = field(default_factory=StepTiming)
    scope: Scope = field(default_factory=Scope)
    notes: tuple[str, ...] = ()
    ran_elsewhere: tuple[str, ...] = ()

    # -- totals ---------------------------------------------------------------------------

    def total(self, phase: Phase | None = None) -> OpCost:
        """Cost of everything that ran, model and outside, in one phase or in all."""
        return self.root.total(phase) + self.outside.total(phase)

    def model_total(self) -> OpCost:
        """Model cost: forward and backward of everything that ran."""
        return self.root.model_total() + self.outside.model_total()

    @property
    def total_params(self) -> int:
        """Elements of the model's distinct parameters."""
        return self.root.total_params

    @property
    def is_lower_bound(self) -> bool:
        """True if at least one operator that ran has no known cost."""
        return self.root.is_lower_bound or self.outside.is_lower_bound

    def nodes(self) -> Iterator[ModuleNode]:
        """Every node of the model, then every node outside it."""
        yield from self.root.walk()
        yield from self.outside.walk()

    def node(self, fqn: str) -> ModuleNode:
        """The module of that name; raises KeyError naming it."""
        for node in self.nodes():
            if node.fqn == fqn:
                return node
        raise KeyError(f"no module {fqn!r} in this profile")

    def by_module(self, phase: Phase | None = None) -> dict[str, OpCost]:
        """``{fqn: inclusive cost}`` of the model's modules, parents first."""
        return {node.fqn: node.total(phase) for node in self.root.walk()}

    def by_operator(self, phase: Phase | None = None) -> dict[str, OpTotal]:
        """``{overload: totals}`` over all modules; phases and dtypes merged, most FLOPs first.

        A merged entry keeps its phase and dtype where all parts agree; else they are None.
        """
        merged: dict[str, OpTotal] = {}
        for op in self.op_totals():
            if phase is None or op.phase == phase:
                merged[op.op] = merge(merged[op.op], op) if op.op in merged else op
        return dict(sorted(merged.items(), key=lambda item: (-flops_of(item[1]), item[0])))

    def op_totals(self) -> Iterator[OpTotal]:
        """Every ``OpTotal`` of every node."""
        for node in self.nodes():
            yield from node.ops

    def uncounted_ops(self) -> dict[str, int]:
        """``{overload: calls}`` of the operators that ran and have no known cost."""
        calls: dict[str, int] = {}
        for op in self.op_totals():
            if op.uncounted:
                calls[op.op] = calls.get(op.op, 0) + op.uncounted
        return dict(sorted(calls.items()))

    def formula_errors(self) -> dict[str, str]:
        """``{overload: what its formula raised}``."""
        return {op.op: op.error for op in self.op_totals() if op.error is not None}

    def uncalled_modules(self) -> list[str]:
        """Modules that hold parameters or have no children, and whose forward never ran.

        A module that ran under another of its names is none of them.

        Their parameters may have worked all the same, where another module passed them on:
        ``active_params`` says it.
        """
        elsewhere = set(self.ran_elsewhere)
        return [
            node.fqn
            for node in self.root.walk()
            if not node.calls
            and (node.own_params or not node.children)
            and node.fqn not in elsewhere
        ]

    def map_nodes(self, change: Callable[[ModuleNode], ModuleNode]) -> Profile:
        """The profile with every node replaced by ``change(node)``, children first."""
        return dataclasses.replace(
            self, root=_map_tree(self.root, change), outside=_map_tree(self.outside, change)
        )

    def check(self) -> Profile:
        """This profile, if every total is the sum of its parts and every count is sane.

        Raises InconsistentProfileError naming the first module that is wrong.
        """
        seen: set[str] = set()
        beside = _params_beside(self.root, self.outside)
        for node in self.nodes():
            known = node.fqn in seen
            flaws = ["another module has that name"] if known else _flaws(node, beside[id(node)])
            for flaw in flaws:
                raise InconsistentProfileError(f"{node.fqn!r}: {flaw}")
            seen.add(node.fqn)
        return self

    if TYPE_CHECKING:  # attached by the package, which knows analysis and renderers

        def diff(self, other: Profile, phase: Phase | None = None) -> Diff: ...
        def _repr_html_(self) -> str: ...

    # -- saving ---------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied flat, as it is saved: a tree may be deeper than Python's stack."""
        return Profile.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "scope": dataclasses.asdict(self.scope),
            "timing": dataclasses.asdict(self.timing),
            "notes": list(self.notes),
            **({"ran_elsewhere": list(self.ran_elsewhere)} if self.ran_elsewhere else {}),
            "root": _node_to_dict(self.root),
            "outside": _node_to_dict(self.outside),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """The profile as JSON text; ``from_json`` gives back an equal profile."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        """The profile that ``to_dict`` wrote; raises ProfileFormatError on anything else."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ProfileFormatError(
                f'this is no saved profile: the key "schema" is not "{SCHEMA}"'
            )
        if data.get("version") != SCHEMA_VERSION:
            raise ProfileFormatError(
                f"saved with schema version {data.get('version')!r}; this release reads version "
                f"{SCHEMA_VERSION}: read it with the release that wrote it, or profile again"
            )
        try:
            return cls(
                root=_node_from_dict(data["root"]),
                outside=_node_from_dict(data["outside"]),
                timing=build(StepTiming, data["timing"]),
                scope=build(Scope, data["scope"]),
                notes=tuple(str(note) for note in data["notes"]),
                ran_elsewhere=tuple(str(name) for name in data.get("ran_elsewhere", ())),
            ).check()
        except (KeyError, TypeError, ValueError, InconsistentProfileError) as error:
            raise ProfileFormatError(f"the saved profile is damaged: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """The profile that ``to_json`` wrote; raises ProfileFormatError on anything else."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ProfileFormatError(f"this is no JSON: {error}") from error
        return cls.from_dict(data)


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


def _costs_by_phase(ops: tuple[OpTotal, ...]) -> dict[Phase, OpCost]:
    """What some operators cost together, phase by phase."""
    costs: dict[Phase | None, list[OpCost | None]] = {}
    for op in ops:
        costs.setdefault(op.phase, []).append(op.cost)
    return {phase: add_costs(costs.get(phase, ())) for phase in PHASES}


def flops_of(op: OpTotal) -> int:
    """FLOPs of all its calls, 0 where unknown (for sorting)."""
    return op.cost.flops if op.cost else 0


def merge(a: OpTotal, b: OpTotal) -> OpTotal:
    """Two totals of the same operator as one."""
    timed = a.latency_s is not None and b.latency_s is not None
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


def _map_tree(root: ModuleNode, change: Callable[[ModuleNode], ModuleNode]) -> ModuleNode:
    changed: dict[int, ModuleNode] = {}
    for node in reversed(list(root.walk())):
        children = tuple(changed.pop(id(child)) for child in node.children)
        changed[id(node)] = change(dataclasses.replace(node, children=children))
    return changed[id(root)]


def _params_beside(*roots: ModuleNode) -> dict[int, int]:
    """``{id of a node: own parameters of all nodes that are not at or below it}``."""
    within: dict[int, int] = {}
    for root in roots:
        for node in reversed(list(root.walk())):
            below = (within[id(child)] for child in node.children)
            within[id(node)] = sum(below, start=_count_or_0(node.own_params))
    everywhere = sum(within[id(root)] for root in roots)
    return {node: everywhere - params for node, params in within.items()}


def _flaws(node: ModuleNode, beside: int) -> Iterator[str]:
    """What is wrong with the node by itself, against its children, and what lies beside it."""
    own = _costs_by_phase(node.ops)
    for phase in PHASES:
        parts = [own[phase], *(child.total(phase) for child in node.children)]
        if node.total(phase) != (parts[0] if len(parts) == 1 else add_costs(parts)):
            yield f"{phase}: total {node.total(phase)} is not the sum of {parts}"
    for name in ("calls", "own_params", "total_params", "active_params", "trainable_params"):
        if not _is_count(getattr(node, name)):
            yield f"{name} = {getattr(node, name)!r} is no count"
    below = [child.total_params for child in node.children]
    # What a node has beyond its own and its children's is a shared module's, whose line in the
    # tree is another parent's: then it lies beside this node.
    most = node.own_params + sum(below) + beside
    if not max(node.own_params, *below, 0) <= node.total_params <= most:
        yield f"total_params = {node.total_params} are not its own {node.own_params} and {below}"
    if max(node.active_params, node.trainable_params) > node.total_params:
        yield "more active or trainable parameters than parameters"
    for seconds in (node.latency_s, node.latency_spread_s, node.backward_latency_s):
        if seconds is not None and not 0 <= seconds < math.inf:
            yield f"a latency of {seconds} s"
    for op in node.ops:
        cost = op.cost or ZERO
        numbers = (
            op.calls, op.uncounted, cost.macs, cost.flops, cost.bytes_read, cost.bytes_written
        )  # fmt: skip
        if not all(map(_is_count, numbers)) or op.uncounted > op.calls:
            yield f"{op} has a count that is no count"
        if op.phase not in PHASES:
            yield f"{op} is of no phase"
        if (op.cost is None) != (op.uncounted == op.calls > 0):
            yield f"{op} has a cost but no counted call, or counted calls but no cost"


def _count_or_0(number: object) -> int:
    return number if isinstance(number, int) else 0


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


# One flat list of nodes per tree, each naming its children by position: nesting would meet
# the recursion limits of json on deep models.
def _node_to_dict(root: ModuleNode) -> list[dict[str, Any]]:
    nodes = list(root.walk())
    position = {id(node): index for index, node in enumerate(nodes)}
    rows = []
    for node in nodes:
        row: dict[str, Any] = {
            f.name: getattr(node, f.name)
            for f in dataclasses.fields(node)
            if f.name not in ("ops", "children")
        }
        row["ops"] = [dataclasses.asdict(op) for op in node.ops]
        row["children"] = [position[id(child)] for child in node.children]
        rows.append(row)
    return rows


def _node_from_dict(rows: list[dict[str, Any]]) -> ModuleNode:
    built: dict[int, ModuleNode] = {}
    for index in reversed(range(len(rows))):
        row = dict(rows[index])
        ops = tuple(_op_from_dict(op) for op in row.pop("ops"))
        below = row.pop("children")
        if not built.keys() >= set(below) or len(set(below)) < len(below):
            raise ValueError(f"the children {below} of node {index} are no later nodes of its own")
        children = tuple(built.pop(child) for child in below)
        built[index] = build(ModuleNode, row, ops=ops, children=children)
    root = built.pop(0)
    if built:
        raise ValueError(f"the nodes {sorted(built)} are nobody's children")
    return root


def _op_from_dict(row: dict[str, Any]) -> OpTotal:
    values = dict(row)
    cost = values.pop("cost")
    return build(OpTotal, values, cost=None if cost is None else build(OpCost, cost))
