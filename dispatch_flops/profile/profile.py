"""The frozen result: the model's tree, what ran outside it, when and where."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from dispatch_flops.errors import InconsistentProfileError, ProfileFormatError
from dispatch_flops.profile.cost import OpCost, Phase
from dispatch_flops.profile.serialization import (
    build,
    node_from_rows,
    node_to_rows,
    upgraded_from_1,
)
from dispatch_flops.profile.tree import ModuleNode, OpTotal, flops_of, map_tree, merge
from dispatch_flops.profile.validation import flaws, params_beside

SCHEMA = "dispatch_flops.profile"
SCHEMA_VERSION = 2
OUTSIDE = "<outside>"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds of one step's parts; None where not measured.

    forward_s: of the model; backward_s, step_s: of backward passes and optimizer steps;
        iteration_s: of everything that ran, other code included.
    method: how the latencies of this profile were taken, in words for the reader.
    resolution_s, operator_resolution_s: a module's latency is exact to 10 % from (calls of it and
        of modules in it) x resolution_s + (operators in it) x operator_resolution_s on.
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
class RunInfo:
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
    children name the parts that are known. ran_elsewhere: unused names of modules that several
    parents hold: these ran under another of their names.
    """

    root: ModuleNode
    outside: ModuleNode = field(
        default_factory=lambda: ModuleNode(fqn=OUTSIDE, name=OUTSIDE, class_name="outside")
    )
    timing: StepTiming = field(default_factory=StepTiming)
    run: RunInfo = field(default_factory=RunInfo)
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
            self, root=map_tree(self.root, change), outside=map_tree(self.outside, change)
        )

    def check(self) -> Profile:
        """This profile, if every total is the sum of its parts and every count is sane.

        Raises InconsistentProfileError naming the first module that is wrong.
        """
        seen: set[str] = set()
        beside = params_beside(self.root, self.outside)
        for node in self.nodes():
            known = node.fqn in seen
            wrong = ["another module has that name"] if known else flaws(node, beside[id(node)])
            for flaw in wrong:
                raise InconsistentProfileError(f"{node.fqn!r}: {flaw}")
            seen.add(node.fqn)
        return self

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows in place of the object."""
        from dispatch_flops.renderers import notebook  # shown in notebooks run_in_fresh_thread

        return notebook.render(self)

    # -- saving ---------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied flat, as it is saved: a tree may be deeper than Python's stack."""
        return Profile.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "run": dataclasses.asdict(self.run),
            "timing": dataclasses.asdict(self.timing),
            "notes": list(self.notes),
            **({"ran_elsewhere": list(self.ran_elsewhere)} if self.ran_elsewhere else {}),
            "root": node_to_rows(self.root),
            "outside": node_to_rows(self.outside),
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
        version = data.get("version")
        if version not in range(1, SCHEMA_VERSION + 1):
            raise ProfileFormatError(
                f"saved with schema version {version!r}; this release reads versions 1 to "
                f"{SCHEMA_VERSION}: read it with the release that wrote it, or profile again"
            )
        try:
            if version == 1:
                data = upgraded_from_1(data)
            return cls(
                root=node_from_rows(data["root"]),
                outside=node_from_rows(data["outside"]),
                timing=build(StepTiming, data["timing"]),
                run=build(RunInfo, data["run"]),
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
