"""Costs of the opaque calls of one graph, and which operators they include."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.formula_calls import FormulaCall
from dispatch_flops.compile.node_calls import NodeCall, Opaque
from dispatch_flops.compile.opaque_calls import OpaqueCall
from dispatch_flops.compile.templates import Values
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import Phase

Costs = Counter[tuple[str, Phase, CallCost]]


class OpaqueCosts:
    """Costs of the opaque calls of one graph.

    The formulas in force decide which calls are opaque: of a call without one any more, the
    operators are counted.
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
        self._counted = {call.call for call in calls}
        self._is_backward = is_backward
        self.rules_changed()
        # Now, for the module may not exist any more when costs are asked for.
        for call in calls:
            if self._has_formula(call.call) and not call.call.has_symbols:
                self._cost(call.call, {}, None)

    @property
    def has_symbols(self) -> bool:
        """True if the values of a call have symbolic sizes."""
        return any(call.call.has_symbols for call in self.calls)

    def rules_changed(self) -> None:
        """Ask for the rules again."""
        self._rules: dict[Any, Rule | None] = {}

    def includes(self, node_call: NodeCall) -> bool:
        """Return True if the cost of an opaque call includes that operator call."""
        return any(self._is_opaque(call) for call, _ in node_call.around)

    def costs(self, values: Values, fqn_in_run: Callable[[str], str]) -> Costs:
        """Return the costs of the calls in one run.

        values: of the symbols. fqn_in_run: what a traced fqn is in the run.
        """
        costs: Costs = Counter()
        for one in self.calls:
            if not self._has_formula(one.call) or any(map(self._is_opaque, one.around)):
                continue
            fqn = fqn_in_run(one.fqn)
            cost = self._cost(one.call, values, None if fqn == one.fqn else fqn)
            costs[one.fqn, one.phase, cost] += one.times
        return costs

    def _cost(self, call: Opaque, values: Values, sibling: str | None) -> CallCost:
        rule = self._rules[call.target]
        assert rule is not None
        return call.cost(
            rule,
            values if call.has_symbols else {},
            self._conventions,
            module=None if sibling is None else self._attribution.module_named(sibling),
        )

    def _is_opaque(self, call: Opaque) -> bool:
        # DDP splits a call of a module; one of the forward graphs counts it.
        is_elsewhere = isinstance(call, OpaqueCall) and not self._is_backward
        return (is_elsewhere or call in self._counted) and self._has_formula(call)

    def _has_formula(self, call: Opaque) -> bool:
        if call.target not in self._rules:
            self._rules[call.target] = registry.formula_of(call.target, self._own_rules)
        return self._rules[call.target] is not None
