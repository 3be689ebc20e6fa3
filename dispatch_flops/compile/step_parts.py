"""What the steps of a counting backend consist of, as parts that a meter's totals add up.

A part is some runs of a graph; or code that ``torch.compile`` left eager.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from dispatch_flops.compile.graph_runs import GraphRun, Graphs, Runs, module_phases_of
from dispatch_flops.counting.aggregation import CallAggregator
from dispatch_flops.counting.amounts import UNCOUNTED, amounts_of
from dispatch_flops.counting.meter_totals import ExactPart
from dispatch_flops.operators import registry
from dispatch_flops.operators.costing import CallCost


class StepParts:
    """Parts of all steps so far; steps that run the same, with the same formulas, share them."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._by_key: dict[Hashable, ExactPart] = {}

    def all(self) -> Iterable[ExactPart]:
        """Return all parts."""
        return self._by_key.values()

    def of(self, runs: Runs, left_eager: Iterable[CallCost]) -> tuple[ExactPart, ...]:
        """Return the parts of a step with these runs, and with that code among what runs."""
        return (
            *(self._of_runs(run, times) for run, times in runs.items()),
            *(self._of_eager(cost) for cost in left_eager),
        )

    def _of_runs(self, run: GraphRun, times: int) -> ExactPart:
        key = run, times, registry.formulas_in_force()
        found = self._by_key.get(key)
        if found is None:
            module_phases, _ = module_phases_of(self._graphs, {run: times})
            calls = CallAggregator().including(module_phases.values())
            found = self._by_key[key] = ExactPart(amounts_of(calls))
        return found

    def _of_eager(self, cost: CallCost) -> ExactPart:
        key = ("", cost.op, "", UNCOUNTED)
        return self._by_key.setdefault(key, ExactPart(Counter({key: 1})))
