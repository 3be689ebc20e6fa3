"""Costs of the opaque calls of one graph, and which operators they include."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.node_calls import NodeCall
from dispatch_flops.compile.opaque_calls import OpaqueCall
from dispatch_flops.compile.opaque_regions import FormulaCall
from dispatch_flops.compile.templates import Values
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import Phase

Costs = Counter[tuple[str, Phase, CallCost]]


class OpaqueCosts:
    """Costs of the opaque calls of one graph.

    The formulas in force decide which calls are opaque: of a call whose class has none any more,
    the operators are counted.
    """

    def __init__(
        self,
        calls: Sequence[FormulaCall],
        attribution: NodeAttribution,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
        *,
        is_backward: bool,
    ) -> None:
        self.calls = calls
        self._attribution = attribution
        self._conventions = conventions
        self._own_rules = own_rules
        # Of a call that a backward graph recomputes in part, the operators are counted.
        self._recomputed = {call.call for call in calls} if is_backward else None
        self.rules_changed()
        # Now, for the module may not exist any more when costs are asked for.
        for call in calls:
            if call.call.cls in self._rules and not call.call.has_symbols:
                self._cost(call.call, {}, None)

    @property
    def has_symbols(self) -> bool:
        """True if the values of a call have symbolic sizes."""
        return any(call.call.has_symbols for call in self.calls)

    def rules_changed(self) -> None:
        """Ask for the rules again."""
        self._rules = registry.module_rules(self._own_rules)

    def includes(self, node_call: NodeCall) -> bool:
        """Return True if the cost of an opaque call includes that operator call."""
        return any(self._is_opaque(call) for call, _ in node_call.around)

    def costs(self, values: Values, fqn_in_run: Callable[[str], str]) -> Costs:
        """Return the costs of the calls in one run.

        values: of the symbols. fqn_in_run: what a traced fqn is in the run.
        """
        costs: Costs = Counter()
        for one in self.calls:
            if one.call.cls not in self._rules or any(map(self._is_opaque, one.around)):
                continue
            fqn = fqn_in_run(one.fqn)
            cost = self._cost(one.call, values, None if fqn == one.fqn else fqn)
            costs[one.fqn, one.phase, cost] += one.times
        return costs

    def _cost(self, call: OpaqueCall, values: Values, sibling: str | None) -> CallCost:
        return call.cost(
            self._rules[call.cls],
            values if call.has_symbols else {},
            self._conventions,
            module=None if sibling is None else self._attribution.module_named(sibling),
        )

    def _is_opaque(self, call: OpaqueCall) -> bool:
        is_counted = self._recomputed is None or call in self._recomputed
        return is_counted and call.cls in self._rules
