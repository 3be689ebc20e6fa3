"""Build the frozen ``Profile`` from aggregated calls and the tree of modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from dispatch_flops.counting.aggregation import RecordedCalls
from dispatch_flops.counting.communication import CountedCalls, communication_totals
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tree import ModuleName
from dispatch_flops.counting.output_shapes import Shapes
from dispatch_flops.counting.parameters import ParameterCounts, ParameterFacts, count_held
from dispatch_flops.profile import (
    OUTSIDE,
    ModuleNode,
    OpTotal,
    PhaseSeconds,
    Profile,
    RunInfo,
    sum_known,
)
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.seconds import timed_phase
from dispatch_flops.profile.tree import NO_MODEL, SEVERAL_MODELS, new_node

_NOT_MEASURED = PhaseSeconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What ``build_profile`` needs besides the operators; keys are fqns.

    calls: times that forward ran. used_params: ids of the parameters that took part in an operator.
    latency_s: seconds in forward; None if modules take as long as their operators.
    tokens: rows that entered the experts of mixtures that were called; None where not followed.
    output_shapes: of the tensors that the first call returned.
    communication: number of calls by module, phase and what is sent; keys are not fqns.
    mesh_dims: ``{ranks of a group: name of the mesh dimension}``.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    used_params: Collection[int] = ()
    latency_s: Mapping[str, float] | None = None
    tokens: Mapping[str, int] | None = None
    output_shapes: Mapping[str, Shapes] = field(default_factory=dict)
    communication: CountedCalls = field(default_factory=dict)
    mesh_dims: Mapping[tuple[int, ...], str] = field(default_factory=dict)


def build_profile(
    calls: RecordedCalls,
    names: ModuleNames,
    observed: Observed,
    run: RunInfo,
    notes: tuple[str, ...] = (),
) -> Profile:
    """Return the checked profile of these calls.

    It reads nothing of the modules but the facts that ``names.read_facts`` has read.
    """
    builder = ProfileBuilder(names, calls.op_totals(names.by_fqn), observed)
    return Profile(
        root=builder.build_model(),
        outside=builder.build_tree(OUTSIDE),
        run=run,
        notes=notes,
        ran_elsewhere=builder.ran_elsewhere(),
        communication=communication_totals(
            observed.communication, builder.shown, observed.mesh_dims
        ),
    ).check()


class ProfileBuilder:
    """Builds the trees of modules, the model's and the outside's, from the leaves up."""

    def __init__(
        self, names: ModuleNames, ops: Mapping[str, tuple[OpTotal, ...]], observed: Observed
    ) -> None:
        self._names = names
        self._ops = ops
        self._observed = observed
        self._is_timed = observed.latency_s is not None or any(
            op.latency_s is not None for totals in ops.values() for op in totals
        )
        self._used_params = {*observed.used_params, *self._used_hidden_params()}
        self._children = names.children()
        self.shown = names.shown
        for fqn in ops:  # named parts of the outside that are not modules
            if fqn not in self._children:
                self._children[fqn] = []
        self._children.setdefault(OUTSIDE, [])
        self._children[OUTSIDE] += [
            fqn
            for fqn in self._children
            if fqn.startswith(f"{OUTSIDE}.")
            and (fqn not in names.by_fqn or names.by_fqn[fqn].parent is None)
        ]
        self._canonical = {fqn: named.canonical() for fqn, named in list(names.by_fqn.items())}
        # A module has the same parameters under all its names: the canonical name holds them.
        self._holders: dict[str, ModuleName | str] = {
            fqn: self._canonical.get(fqn, fqn) for fqn in self._children
        }
        self._params = self._count_params()

    def _count_params(self) -> dict[ModuleName | str, ParameterCounts]:
        """Return the counts of every module, and of parts of the outside that are not modules."""
        holders = self._holders
        held: dict[ModuleName | str, dict[ModuleName | str, None]] = {
            holder: {} for holder in holders.values()
        }
        own: dict[ModuleName | str, tuple[ParameterFacts, ...]] = {}
        for fqn, children in self._children.items():
            held[holders[fqn]].update((holders[child], None) for child in children)
        for holder, below in held.items():
            if isinstance(holder, ModuleName):
                own[holder] = holder.facts.parameters
                held_elsewhere = (named.canonical() for named in holder.held_elsewhere)
                below.update((named, None) for named in held_elsewhere if named in held)
        for module in self._stand_ins():
            own[module] = ()
        if not self._names.has_single_root:
            held[""] = {holders[root.fqn]: None for root in self._names.roots}
        return count_held(held, own, self._used_params)

    def _stand_ins(self) -> Iterator[ModuleName]:
        """Yield the modules whose parameters only stand for others, as for ``functional_call``.

        Such a module is called by one that does not hold it, and none of its parameters, or of
        those below it, takes part.
        """
        for fqn, named in list(self._names.by_fqn.items()):
            if named.parent is not None and not named.holders and named.same_as is None:
                below = [self._names.by_fqn[one] for one in self._order(fqn)]
                modules = [module for module in below if module.same_as is None]
                keys = {one.key for module in modules for one in module.facts.parameters}
                if keys.isdisjoint(self._used_params):
                    yield from modules

    def ran_elsewhere(self) -> tuple[str, ...]:
        """Return the fqns that were not called, of modules that took part under another fqn.

        They were called by another fqn, or hold the packed weights of a module that was called.
        """
        calls = self._observed.calls
        called = {named for fqn, named in self._canonical.items() if calls.get(fqn)}
        return tuple(
            self.shown(fqn)
            for fqn, named in self._canonical.items()
            if not calls.get(fqn)
            and (named in called or (named.facts.packed and self._is_used_above(named)))
        )

    def _is_used_above(self, named: ModuleName) -> bool:
        """Return True if the module that computes with this one's packed weights was called."""
        above = named.parent
        while above is not None and above.facts.class_name == "ModuleList":  # as that of an LSTM
            above = above.parent
        return above is not None and bool(self._observed.calls.get(above.fqn))

    def _used_hidden_params(self) -> Iterator[int]:
        """Yield the keys of parameters that operators do not see, of modules that ran."""
        for fqn, named in list(self._names.by_fqn.items()):
            if self._observed.calls.get(fqn):
                for facts in named.facts.parameters:
                    if facts.is_hidden:
                        yield facts.key

    def build_model(self) -> ModuleNode:
        """Return the tree of the model, or of all models below a root without a module."""
        roots = self._names.roots
        if self._names.has_single_root:
            return self.build_tree(roots[0].fqn)
        params = self._params[""]
        return ModuleNode(
            fqn="",
            class_name=SEVERAL_MODELS if roots else NO_MODEL,
            children=tuple(self.build_tree(root.fqn) for root in roots),
            total_params=params.total,
            active_params=params.active,
            trainable_params=params.trainable,
            local_params=_local_params(params),
        )

    def _order(self, top: str) -> list[str]:
        """Return ``top`` and all fqns below it, parents first."""
        order = [top]
        for fqn in order:
            order.extend(self._children.get(fqn, ()))
        return order

    def build_tree(self, top: str) -> ModuleNode:
        """Return the tree from ``top`` down."""
        built: dict[str, ModuleNode] = {}
        for fqn in reversed(self._order(top)):
            children = tuple([built.pop(child) for child in self._children.get(fqn, ())])
            built[fqn] = self._build_node(fqn, self._names.by_fqn.get(fqn), children)
        return built[top]

    def _build_node(
        self, fqn: str, named: ModuleName | None, children: tuple[ModuleNode, ...]
    ) -> ModuleNode:
        ops = self._ops.get(fqn, ())
        shown = self.shown(fqn)
        params = self._params[self._holders[fqn]]
        parent = named.parent.fqn if named is not None and named.parent is not None else OUTSIDE
        name = fqn[len(parent) + 1 :] if fqn.startswith(f"{parent}.") else shown
        return new_node(
            fqn=shown,
            name=name if shown else "",
            class_name=_class_name(fqn, named),
            extra_repr=named.facts.extra_repr if named is not None else "",
            calls=self._observed.calls.get(fqn, 0),
            own_params=params.own,
            total_params=params.total,
            active_params=params.active,
            trainable_params=params.trainable,
            local_params=_local_params(params),
            ops=ops,
            children=children,
            seconds=self._seconds(fqn, ops, children),
            tokens=self._tokens(fqn, named),
            output_shapes=self._observed.output_shapes.get(fqn),
        )

    def _tokens(self, fqn: str, named: ModuleName | None) -> int | None:
        """Return the rows that entered an expert; None for a call that tells no rows."""
        rows = self._observed.tokens
        if rows is None or named is None or not named.is_expert:
            return None
        return rows.get(fqn, None if self._observed.calls.get(fqn) else 0)

    def _seconds(
        self, fqn: str, ops: tuple[OpTotal, ...], children: tuple[ModuleNode, ...]
    ) -> PhaseSeconds:
        if not self._is_timed:
            return _NOT_MEASURED
        return PhaseSeconds(
            {
                "forward": self._latency_s(fqn, _seconds("forward", ops, children)),
                "backward": _seconds("backward", ops, children),
            }
        )

    def _latency_s(self, fqn: str, in_operators: float | None) -> float | None:
        """Return the measured seconds in forward, at least those of the operators in it."""
        if self._observed.latency_s is None:
            return in_operators
        measured = self._observed.latency_s.get(fqn)
        return None if measured is None else max(measured, in_operators or 0.0)


def _local_params(params: ParameterCounts) -> int | None:
    return None if params.local == params.total else params.local


def _seconds(phase: Phase, ops: Iterable[OpTotal], children: Iterable[ModuleNode]) -> float | None:
    """Return the seconds of operators and of the modules below in a phase; None if not timed."""
    own = (
        op.latency_s
        for op in ops
        if op.latency_s is not None and op.phase is not None and timed_phase(op.phase) == phase
    )
    return sum_known((*own, *_seconds_below(phase, children)))


def _seconds_below(phase: Phase, children: Iterable[ModuleNode]) -> Iterator[float]:
    """Yield the seconds of the modules; of a container that is not called, those of its parts."""
    waiting = list(children)
    while waiting:
        node = waiting.pop()
        seconds = node.seconds.get(phase)
        if seconds is not None:
            yield seconds
        elif not node.calls:  # what was called has the seconds of its parts
            waiting.extend(node.children)


def _class_name(fqn: str, named: ModuleName | None) -> str:
    if named is not None and named.facts.class_name:
        return named.facts.class_name
    # Parts of the outside: "<outside>.gradient clipping", "<outside>.AdamW.1"
    return "outside" if fqn == OUTSIDE else fqn.removeprefix(f"{OUTSIDE}.").partition(".")[0]
