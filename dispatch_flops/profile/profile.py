"""The frozen result: the model's tree, what ran outside it, the timing and the run."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, overload

from dispatch_flops.errors import InconsistentProfileError, ProfileFormatError
from dispatch_flops.profile.communication import (
    CommBy,
    CommCost,
    CommGroup,
    CommTotal,
    sum_by,
)
from dispatch_flops.profile.cost import (
    MODEL_PHASES,
    PHASES,
    ZERO,
    OpCost,
    Phase,
    add_costs,
    check_phase,
)
from dispatch_flops.profile.cost_maps import CostMap
from dispatch_flops.profile.fields import texts
from dispatch_flops.profile.json_data import parse_saved
from dispatch_flops.profile.memory import MemoryProfile
from dispatch_flops.profile.memory_rows import memory_from_row, memory_to_row
from dispatch_flops.profile.merging import merge_ops
from dispatch_flops.profile.run_info import RunInfo, run_from_row, run_to_row
from dispatch_flops.profile.seconds import PhaseSeconds
from dispatch_flops.profile.serialization import (
    build_timed,
    communication_from_rows,
    communication_to_rows,
    node_from_rows,
    node_to_rows,
    to_row,
    upgraded_from_1,
)
from dispatch_flops.profile.suggestions import did_you_mean
from dispatch_flops.profile.tree import (
    NO_MODEL,
    ModuleNode,
    OpTotal,
    cost_in,
    flops_of,
    local_params_of,
    lower_bounds,
    map_tree,
)
from dispatch_flops.profile.validation import (
    communication_flaws,
    flaws,
    flaws_of_memory,
    flaws_of_run,
    flaws_of_seconds,
    params_outside,
)

SCHEMA = "dispatch_flops.profile"
CLUSTER_SCHEMA = "dispatch_flops.cluster"  # of a ``ClusterProfile``
SCHEMA_VERSION = 2
OUTSIDE = "<outside>"

_BUILDING = threading.RLock()

# What Python raises where a value of a saved profile is not what the code expects.
_OF_DAMAGED_DATA = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds of one step, or of one run of the model; None where not measured.

    seconds: per phase. "forward" is of the model, "backward" of all backward passes with the
        recomputation in them, "optimizer" of the optimizer's steps and of the other operators of
        that phase, such as those that clip gradients.
    iteration_s: of everything that ran, other code included.
    iteration_step: the step that ``iteration_s`` is of, where it is not the profiled one. It ran
        without the profiler, so its time is not combined with that of a phase.
    spread_s: median distance of the runs from their median; repeats: number of runs.
    method: how the latencies of this profile were taken, in words for the reader.
    resolution_s, operator_resolution_s: a module's latency is exact to 10 % if it is at least
        (calls of it and of modules in it) x resolution_s + (operators in it) x
        operator_resolution_s.
    """

    seconds: PhaseSeconds = field(default_factory=PhaseSeconds)
    iteration_s: float | None = None
    iteration_step: int | None = None
    spread_s: float | None = None
    repeats: int = 1
    method: str | None = None
    resolution_s: float | None = None
    operator_resolution_s: float | None = None

    def latency(self, phase: Phase) -> float | None:
        """Return the seconds of a phase; None where not measured.

        Raises ConfigError for a phase that is neither a standard one nor a measured one.
        """
        check_phase(phase, self.seconds)
        return self.seconds.get(phase)


@dataclass(frozen=True, kw_only=True, repr=False)
class Profile:
    """Cost of a run: the model's tree, and what ran outside the model.

    root: the model (fqn ``""``).
    outside: operators that ran in no module of the model, such as loss functions, data
        preparation, gradient accumulation and clipping, and optimizer steps. Its children are
        the parts that have a name.
    ran_elsewhere: unused names of modules that several parents hold. These modules ran under
        another of their names.
    communication: what this rank sent and received, by module, phase, operator, dtype and group.
    memory: what the run allocated; None where memory was not followed.

    Example::

        with FlopCounterMode(model, display=False) as counter:
            model(x).sum().backward()
        profile = counter.profile
        profile.total("backward").flops  # an exact int
        profile.by_module()[""].macs  # of the whole model
    """

    root: ModuleNode
    outside: ModuleNode = field(
        default_factory=lambda: ModuleNode(fqn=OUTSIDE, name=OUTSIDE, class_name="outside")
    )
    timing: StepTiming = field(default_factory=StepTiming)
    run: RunInfo = field(default_factory=RunInfo)
    # Factories leave no attributes on the class, which would hide what is not built yet.
    notes: tuple[str, ...] = field(default_factory=tuple)
    ran_elsewhere: tuple[str, ...] = field(default_factory=tuple)
    communication: tuple[CommTotal, ...] = field(default_factory=tuple)
    memory: MemoryProfile | None = field(default_factory=lambda: None)

    if not TYPE_CHECKING:  # where there is ``__getattr__``, mypy accepts every attribute

        def __getattr__(self, name: str) -> Any:
            """Build the fields of a profile that ``deferred_profile`` returned."""
            known = self.__dict__
            if name in _FIELDS:
                with _BUILDING:
                    if "_build" in known:
                        known.update(vars(known["_build"]()))
                        del known["_build"]
            if name not in known:
                raise AttributeError(f"a Profile has no attribute {name!r}")
            return known[name]

    # -- totals ---------------------------------------------------------------------------

    def total(self, phase: Phase | None = None) -> OpCost:
        """Return the cost of everything that ran, model and outside, in one phase or in all.

        Raises ConfigError, as ``by_module`` and ``by_operator`` do, for a phase that is neither a
        standard one nor one of the profile's.
        """
        self._check_phase(phase)
        return add_costs(self._totals.values()) if phase is None else self._totals.get(phase, ZERO)

    @cached_property
    def _totals(self) -> Mapping[Phase | None, OpCost]:
        phases = {**self.root._totals, **self.outside._totals}
        return {phase: cost_in(self.root, phase) + cost_in(self.outside, phase) for phase in phases}

    def model_total(self) -> OpCost:
        """Return the cost of forward and backward of everything that ran."""
        return add_costs(map(self.total, MODEL_PHASES))

    @property
    def total_params(self) -> int:
        """Elements of the model's distinct parameters."""
        return self.root.total_params

    @property
    def local_params(self) -> int:
        """Of ``total_params``, the elements that this rank holds; all of them unless sharded."""
        return local_params_of(self.root)

    @property
    def is_lower_bound(self) -> bool:
        """True if at least one operator that ran has no known cost."""
        return self.root.is_lower_bound or self.outside.is_lower_bound

    def nodes(self) -> Iterator[ModuleNode]:
        """Yield every node of the model, then every node outside it."""
        yield from self.root.walk()
        yield from self.outside.walk()

    def node(self, fqn: str) -> ModuleNode:
        """Return the module of that name; raises KeyError if there is none."""
        for node in self.nodes():
            if node.fqn == fqn:
                return node
        known = did_you_mean(str(fqn), (node.fqn for node in self.nodes() if node.fqn))
        raise KeyError(f"no module {fqn!r:.200} in this profile{known}")

    def by_module(self, phase: Phase | None = None) -> CostMap[OpCost]:
        """Return ``{fqn: inclusive cost}`` of the model's modules, parents first.

        It is a dict that ``print`` shows as a table.
        """
        self._check_phase(phase)
        costs = {node.fqn: cost_in(node, phase) for node in self.root.walk()}
        return CostMap(costs, lower_bounds(self.root, phase))

    def by_operator(self, phase: Phase | None = None) -> CostMap[OpTotal]:
        """Return ``{overload: total}`` over all modules, most FLOPs first.

        It is a dict that ``print`` shows as a table.

        Phases and dtypes are merged. A merged total keeps its phase and its dtype where all
        parts agree; else they are None.
        """
        self._check_phase(phase)
        merged: dict[str, OpTotal] = {}
        for op in self.op_totals():
            if phase is None or op.phase == phase:
                merged[op.op] = merge_ops(merged[op.op], op) if op.op in merged else op
        ranked = sorted(merged.items(), key=lambda item: (-flops_of(item[1]), item[0]))
        return CostMap(dict(ranked))

    def _check_phase(self, phase: Phase | None) -> None:
        if phase is not None and phase not in PHASES:
            check_phase(phase, (*(op.phase for op in self.op_totals()), *self.timing.seconds))

    def op_totals(self) -> Iterator[OpTotal]:
        """Yield every ``OpTotal`` of every node."""
        yield from self._op_totals

    @cached_property
    def _op_totals(self) -> tuple[OpTotal, ...]:
        return tuple(op for node in self.nodes() for op in node.ops)

    @overload
    def comm_by(self, by: Literal["module", "phase", "kind"]) -> dict[str, CommCost]: ...
    @overload
    def comm_by(self, by: Literal["group"]) -> dict[CommGroup, CommCost]: ...
    def comm_by(self, by: CommBy) -> dict[str, CommCost] | dict[CommGroup, CommCost]:
        """Return calls and bytes of communication by module, group, phase or kind.

        The parts add up to the total. Those of a module are its own, without its children's.
        Most payload comes first, phases in their order. Raises ConfigError for another ``by``.

            profile.comm_by("kind")["all_reduce"].bus_bytes
        """
        return sum_by(self.communication, by)

    def uncounted_ops(self) -> dict[str, int]:
        """Return ``{overload: calls}`` of the operators that ran and have no known cost."""
        calls: dict[str, int] = {}
        for op in self.op_totals():
            if op.uncounted:
                calls[op.op] = calls.get(op.op, 0) + op.uncounted
        return dict(sorted(calls.items()))

    def formula_errors(self) -> dict[str, str]:
        """Return ``{overload: error}`` of the operators whose formula raised."""
        return {op.op: op.error for op in self.op_totals() if op.error is not None}

    def uncalled_modules(self) -> list[str]:
        """Return the modules that took no part in the run and hold parameters or have no children.

        Their forward never ran, under no name of theirs, and none of their parameters took part
        in an operator, as those of an attention's ``out_proj`` do that is never called.
        """
        elsewhere = set(self.ran_elsewhere)
        return [
            node.fqn
            for node in self.root.walk()
            if not node.calls
            and not node.active_params
            and (node.own_params or not node.children)
            and node.fqn not in elsewhere
            and node.class_name != NO_MODEL
        ]

    def map_nodes(self, change: Callable[[ModuleNode], ModuleNode]) -> Profile:
        """Return the profile with every node replaced by ``change(node)``, children first."""
        return dataclasses.replace(
            self, root=map_tree(self.root, change), outside=map_tree(self.outside, change)
        )

    def check(self) -> Profile:
        """Return this profile, if every total is the sum of its parts and every count is valid.

        Raises InconsistentProfileError naming the first module that is wrong.
        """
        seen: set[str] = set()
        checked: set[int] = set()
        elsewhere = params_outside(self.root, self.outside)
        for node in self.nodes():
            known = node.fqn in seen
            wrong = (
                ["another module has that name"]
                if known
                else flaws(node, elsewhere[id(node)], checked)
            )
            for flaw in wrong:
                raise InconsistentProfileError(f"{node.fqn!r}: {flaw}")
            seen.add(node.fqn)
        for total in self.communication:
            for flaw in communication_flaws(total, seen):
                raise InconsistentProfileError(f"{total.fqn!r}: {flaw}")
        for flaw in (
            *flaws_of_memory(self.memory),
            *flaws_of_run(self.run),
            *flaws_of_seconds(_readings(self.timing)),
        ):
            raise InconsistentProfileError(flaw)
        return self

    def __repr__(self) -> str:
        total, bound = self.total(), " at least" if self.is_lower_bound else ""
        return (
            f"<Profile of {self.root.class_name}:{bound} {total.macs} MACs, {total.flops} FLOPs, "
            f"{self.total_params} parameters>"
        )

    def __str__(self) -> str:
        """Return the printout of the profile: totals, modules, operators and remarks."""
        from dispatch_flops.renderers import overview  # above this room: imported when shown

        return overview.render(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows in place of the object."""
        from dispatch_flops.renderers import notebook  # above this room: imported when shown

        return notebook.render(self)

    # -- saving ---------------------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the saved form, for a tree may be deeper than Python's stack."""
        return Profile.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain dicts, lists, strings and numbers."""
        return {
            "schema": SCHEMA,
            "version": SCHEMA_VERSION,
            "run": run_to_row(self.run),
            "timing": _timing_to_row(self.timing),
            "notes": list(self.notes),
            **({"ran_elsewhere": list(self.ran_elsewhere)} if self.ran_elsewhere else {}),
            **communication_to_rows(self.communication),
            "root": node_to_rows(self.root),
            "outside": node_to_rows(self.outside),
            **({"memory": memory_to_row(self.memory)} if self.memory is not None else {}),
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the profile as JSON text; ``from_json`` gives back an equal profile.

        indent: spaces of each level; None (the default) for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> Profile:
        """Return the profile that ``to_dict`` wrote; raises ProfileFormatError on other data."""
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            if isinstance(data, dict) and data.get("schema") == CLUSTER_SCHEMA:
                raise ProfileFormatError(
                    "these are the profiles of several ranks; read them with "
                    "distributed.ClusterProfile"
                )
            raise ProfileFormatError(
                f'this is not a dispatch_flops profile: the key "schema" is not "{SCHEMA}"'
            )
        version = data.get("version")
        if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
            raise ProfileFormatError(
                f"saved with schema version {version!r:.60}; this release reads versions 1 to "
                f"{SCHEMA_VERSION}: read it with the release that wrote it, or profile again"
            )
        try:
            if version == 1:
                data = upgraded_from_1(data)
            return cls(
                root=node_from_rows(data["root"]),
                outside=node_from_rows(data["outside"]),
                timing=build_timed(StepTiming, data["timing"]),
                run=run_from_row(data["run"]),
                notes=texts(data["notes"]),
                ran_elsewhere=texts(data.get("ran_elsewhere", [])),
                communication=communication_from_rows(data.get("communication")),
                memory=memory_from_row(data["memory"]) if "memory" in data else None,
            ).check()
        except RecursionError:
            raise ProfileFormatError(
                "the saved profile is damaged: it is nested too deep"
            ) from None
        except KeyError as error:
            raise ProfileFormatError(
                f"the saved profile is damaged: the key {error} is missing"
            ) from error
        except (*_OF_DAMAGED_DATA, InconsistentProfileError) as error:
            raise ProfileFormatError(f"the saved profile is damaged: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile that ``to_json`` wrote; raises ProfileFormatError on other text."""
        return cls.from_dict(parse_saved(text, "saved"))


_FIELDS = frozenset(known.name for known in dataclasses.fields(Profile))


def deferred_profile(build: Callable[[], Profile], totals: Mapping[Phase, OpCost]) -> Profile:
    """Return a profile whose fields are built when one of them is read for the first time.

    build: returns the profile. totals: its cost in each phase, which ``total`` returns before.
    """
    profile = Profile.__new__(Profile)
    vars(profile).update(_build=build, _totals=totals)
    return profile


def _readings(timing: StepTiming) -> tuple[float | None, ...]:
    return (
        *timing.seconds.values(),
        timing.iteration_s,
        timing.spread_s,
        timing.resolution_s,
        timing.operator_resolution_s,
    )


def _timing_to_row(timing: StepTiming) -> dict[str, Any]:
    row = to_row(timing)
    if timing.iteration_step is None:
        del row["iteration_step"]
    return row
