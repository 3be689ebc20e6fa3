"""Costs of the runs of several compiled graphs, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dispatch_flops.compile.graph import GraphCost, Run
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import STEP_PHASES, ZERO, OpCost, Phase

Graphs = Sequence[GraphCost]
GraphRun = tuple[int, Run]  # the index of a graph, and what it ran for
Runs = Mapping[GraphRun, int]  # how often
ModulePhases = dict[tuple[str, Phase], ModulePhase]


def runs_of(graphs: Graphs) -> Counter[GraphRun]:
    """Return how often each graph has run so far."""
    return Counter(
        {
            (index, run): times
            for index, graph in enumerate(graphs)
            for run, times in graph.runs.items()
        }
    )


def costs_by_phase(graphs: Graphs, runs: Runs) -> dict[Phase, OpCost]:
    """Return the costs of all runs by phase."""
    costs = dict.fromkeys(STEP_PHASES, ZERO)
    for (index, run), times in runs.items():
        graph = graphs[index]
        for phase, cost in graph.cost(run).by_phase.items():
            _, shown = graph.attribution_of(run, "", phase)
            costs[shown] += cost * times
    return costs


def uncounted_calls(graphs: Graphs, runs: Runs) -> Counter[CallCost]:
    """Return the calls of operators without a known cost."""
    calls: Counter[CallCost] = Counter()
    for (index, run), times in runs.items():
        for cost, number in graphs[index].cost(run).uncounted.items():
            calls[cost] += number * times
    return calls


def module_phases_of(graphs: Graphs, runs: Runs) -> tuple[ModulePhases, dict[str, None]]:
    """Return the calls of all runs by module and phase, and the notes on them."""
    found: ModulePhases = {}
    notes: dict[str, None] = {}
    for (index, run), times in runs.items():
        graph = graphs[index]
        run_cost = graph.cost(run)
        notes |= dict.fromkeys(run_cost.notes)
        for (fqn, phase, cost), calls in run_cost.costs.items():
            key = graph.attribution_of(run, fqn, phase)
            found.setdefault(key, ModulePhase(*key)).counts[cost] += calls * times
    return found, notes


def module_calls_of(graphs: Graphs) -> dict[str, int]:
    """Return ``{fqn: times its forward ran}``."""
    calls: Counter[str] = Counter()
    function_runs: Counter[tuple[str, str]] = Counter()
    for graph in graphs:
        if not graph.is_backward:
            own_fqn, function = graph.function
            for (module, is_recomputation, _), times in graph.runs.items():
                if is_recomputation:
                    continue
                if graph.is_forward:
                    function_runs[graph.fqn_in(module, own_fqn), function] += times
                for fqn, count in graph.module_calls.items():
                    calls[graph.fqn_in(module, fqn)] += count * times
    # Graph breaks split a forward into several functions, of which each runs once per call.
    own: dict[str, int] = {}
    for (fqn, _), times in function_runs.items():
        own[fqn] = max(own.get(fqn, 0), times)
    found = calls + Counter(own)
    del found[OUTSIDE]
    return found
