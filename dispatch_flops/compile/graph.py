"""Costs of one run of a compiled graph, by module, phase and operator.

A cost is computed when it is asked for, from the shapes of the node's arguments, and kept until a
rule changes. Nodes with symbolic shapes have a cost for each set of sizes that runs have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from dispatch_flops import _torch
from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.instances import Instances
from dispatch_flops.compile.node_calls import NodeCall, calls_of
from dispatch_flops.compile.opaque_costs import Costs, OpaqueCosts
from dispatch_flops.compile.opaque_regions import OpaqueRegions
from dispatch_flops.compile.subgraphs import count_functions, runs_functions
from dispatch_flops.compile.templates import (
    UNKNOWN_SIZE,
    Sizes,
    Values,
    fill_in,
    find_symbols,
    size_reader,
)
from dispatch_flops.counting.module_tree import join
from dispatch_flops.counting.python_frames import ACCUMULATION
from dispatch_flops.counting.thread_state import NO_TASK
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import ZERO, OpCost, Phase

# The fqn of the module that ran a shared graph, whether it was for recomputation, and the sizes.
Run = tuple[str | None, bool, Sizes]
_NOTE_OF_COMPILED_AUTOGRAD = "compiled autograd: backward is in no module"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Cost of one run of a graph.

    costs: ``{(fqn, phase, cost): calls}``. by_phase: their sums. uncounted: the calls of each
    operator without a known cost. notes: what a reader of the costs must know.
    """

    costs: Costs
    by_phase: Mapping[Phase, OpCost]
    uncounted: Mapping[CallCost, int]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, costs: Costs, notes: tuple[str, ...]) -> RunCost:
        """Return these costs with their sums."""
        by_phase: dict[Phase, OpCost] = {}
        uncounted: Counter[CallCost] = Counter()
        for (_, phase, call_cost), calls in costs.items():
            if call_cost.cost is None:
                uncounted[call_cost] += calls
            for _, part_phase, cost in call_cost.parts(phase):
                by_phase[part_phase] = by_phase.get(part_phase, ZERO) + cost * calls
        return cls(costs=costs, by_phase=by_phase, uncounted=uncounted, notes=notes)


class GraphCost:
    """Cost and number of runs of one graph that AOTAutograd partitioned.

    regions: opaque calls of the compiled function.
    function: the compiled function of which the graph is a part, as ``(fqn, function_id)``.
    is_forward: that function is the forward of the module of that fqn.
    module_calls: ``{fqn: its calls in one run}``; empty for a backward graph.
    used_params: ids of the parameters that take part. on_first_run: called before the first run.
    runs: number of runs by what ``run_reader()`` read.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        attribution: NodeAttribution,
        *,
        regions: OpaqueRegions,
        is_backward: bool,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
        on_first_run: Callable[[], None] | None = None,
    ) -> None:
        self._on_first_run = on_first_run
        self.is_backward = is_backward
        self.function = (attribution.fqn, attribution.function_id)
        self.is_forward = attribution.is_forward
        self.module_calls = {} if is_backward else attribution.module_calls(graph.graph)
        self.used_params = attribution.used_params
        self.runs: Counter[Run] = Counter()
        self._notes = (_NOTE_OF_COMPILED_AUTOGRAD,) if attribution.is_of_compiled_autograd else ()
        self._instances: Instances | None = None
        self._called_fqn = attribution.called_fqn
        if attribution.may_be_shared:
            self._instances = Instances(attribution, graph, is_backward=is_backward)
        self._conventions = conventions
        self._own_rules = own_rules
        self._calls = list(calls_of(graph, attribution, regions.around, is_backward=is_backward))
        self._opaque = OpaqueCosts(
            regions.formula_calls(graph, self._calls, is_backward=is_backward),
            attribution,
            conventions,
            own_rules,
            is_backward=is_backward,
        )
        has_symbols = self._opaque.has_symbols or any(call.has_symbols for call in self._calls)
        self._symbols = find_symbols(graph) if has_symbols else {}
        self._fixed: tuple[Costs, tuple[str, ...]] | None = None
        self._by_run: dict[Run, RunCost] = {}
        registry.watch(self)

    def run_reader(self) -> Callable[[Sequence[Any]], Run]:
        """Return a function that reads from a run's inputs what its cost and attribution depend on.

        A forward graph that runs in a backward pass of autograd recomputes a checkpoint.
        """
        read_sizes = size_reader(tuple(self._symbols.values())) if self._symbols else None
        running = self._instances.running if self._instances is not None else None
        is_backward, graph_task = self.is_backward, _torch.graph_task_id
        runs, on_first_run = self.runs, self._on_first_run

        def read(inputs: Sequence[Any]) -> Run:
            if on_first_run is not None and not runs:
                on_first_run()
            return (
                running(inputs) if running is not None else None,
                not is_backward and graph_task() != NO_TASK,
                read_sizes(inputs) if read_sizes is not None else (),
            )

        return read

    def attribution_of(self, run: Run, fqn: str, phase: Phase) -> tuple[str, Phase]:
        """Return the fqn and phase, in this run, of a node that was traced with these."""
        module, is_recomputation, _ = run
        return self.fqn_in(module, fqn), "recompute" if is_recomputation else phase

    def fqn_in(self, module: str | None, fqn: str) -> str:
        """Return the fqn that a node of ``fqn`` has in a run of ``module``.

        module: the fqn of a sibling of the module that was traced, "outside" for a module of no
            model, or None.
        """
        traced = self._called_fqn
        if module is None or module == traced or OUTSIDE in (traced, fqn) or fqn == ACCUMULATION:
            return fqn
        if fqn == traced or module == OUTSIDE:
            return module
        below = f"{traced}." if traced else ""
        if fqn.startswith(below):
            return join(module, fqn[len(below) :])
        if not fqn or not traced.startswith(f"{fqn}."):
            return fqn
        levels = traced.count(".") - fqn.count(".")  # from the function's own module to the called
        return ".".join(module.split(".")[:-levels])

    def rules_changed(self) -> None:
        """Drop the computed costs: rules were added or removed."""
        self._fixed = None
        self._by_run = {}
        self._opaque.rules_changed()

    def cost(self, run: Run) -> RunCost:
        """Return the cost of one run, with fqns and phases as they were traced."""
        module, _, sizes = run
        key = module if self._opaque.calls else None, False, sizes
        found = self._by_run.get(key)
        if found is None:
            found = self._by_run[key] = self._compute(key)
        return found

    def _compute(self, run: Run) -> RunCost:
        module, _, sizes = run
        values = {symbol: int(size) for symbol, size in zip(self._symbols, sizes, strict=True)}
        if self._fixed is None:
            self._fixed = self._sum(call for call in self._calls if not call.has_symbols)
        costs, notes = self._fixed
        more, more_notes = self._sum((call for call in self._calls if call.has_symbols), values)
        more += self._opaque.costs(values, lambda fqn: self.fqn_in(module, fqn))
        return RunCost.of(costs + more, tuple(dict.fromkeys((*self._notes, *notes, *more_notes))))

    def _sum(
        self, calls: Iterator[NodeCall], values: Values | None = None
    ) -> tuple[Costs, tuple[str, ...]]:
        costs: Costs = Counter()
        notes: dict[str, None] = {}
        for call in calls:
            if self._opaque.includes(call):
                continue
            found, found_notes = self._cost_of(call, values or {})
            notes |= dict.fromkeys(found_notes)
            for cost, times in found.items():
                costs[call.fqn, call.phase, cost] += times
        return costs, tuple(notes)

    def _cost_of(
        self, call: NodeCall, values: Values
    ) -> tuple[Mapping[CallCost, int], tuple[str, ...]]:
        """Return the operator calls of a node with their number, and notes on them."""
        name, op = name_of(call.op), call.op
        rule = call.rule or registry.lookup(op, self._own_rules)
        if rule is not None and not rule.is_recorded:
            return {}, ()
        if rule is None and not runs_functions(op):
            return {CallCost(name, "unknown"): 1}, ()
        fakes = _torch.fake_mode() if rule is None else None
        try:
            args, kwargs, out = fill_in((call.args, call.kwargs, call.out), values, fakes=fakes)
        except TypeError:
            return {CallCost(name, "unknown", error=UNKNOWN_SIZE): 1}, ()
        if rule is None:
            return count_functions(op, args, kwargs, fakes, self._conventions, self._own_rules)
        return {cost_of_call(name, op, rule, args, kwargs, out, self._conventions): 1}, ()
