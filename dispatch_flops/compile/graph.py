"""Costs of one run of a compiled graph, by module, phase and operator.

The cost of a node with fixed shapes is computed once. Nodes with symbolic shapes are kept as
templates. Their costs are computed once for each set of sizes that runs have, on meta tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dispatch_flops._torch import HigherOrderOperator, OpOverload, map_aggregate
from dispatch_flops.compile.attribution import NodeAttribution, phase_of
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost, cost_of_call
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import ZERO, OpCost, Phase

Sizes = tuple[int, ...]
Costs = Counter[tuple[str, Phase, CallCost]]
_INLINED = ("invoke_subgraph", "strict_mode", "hints_wrapper", "local_map_hop", "foreach_map")
_UNKNOWN_SIZE = "a size depends on data: it is known only inside the compiled code"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Operator call of one node; tensors in it may have symbolic sizes."""

    fqn: str
    phase: Phase
    op: Any
    rule: Rule
    args: Any
    kwargs: Any
    out: Any


@dataclass(frozen=True, slots=True)
class _TensorTemplate:
    shape: tuple[Any, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _SizeTemplate:
    expression: Any


class GraphCost:
    """Cost and number of runs of one graph that AOTAutograd partitioned.

    function: the compiled function of which the graph is a part, as ``(fqn, function_id)``.
    module_calls: ``{fqn: its calls in one run}``; empty for a backward graph.
    runs: number of runs by the sizes that ``read_sizes`` returned; () if all shapes are fixed.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        attribution: NodeAttribution,
        *,
        is_backward: bool,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
    ) -> None:
        self.is_backward = is_backward
        self.function = (attribution.fqn, attribution.function_id)
        self.module_calls = {} if is_backward else attribution.module_calls(graph.graph)
        self.runs: Counter[Sizes] = Counter()
        self._conventions = conventions
        self._own_rules = own_rules
        self._fixed: Costs = Counter()
        self._templates: list[_Call] = []
        self._costs: dict[Sizes, Costs] = {}
        self._costs_by_phase: dict[Sizes, dict[Phase, OpCost]] = {}
        for node in _operator_nodes(graph):
            self._add(node, attribution.fqn_of(node), phase_of(node, is_backward=is_backward))
        self._symbols = _symbols(graph) if self._templates else {}

    @property
    def read_sizes(self) -> Callable[[Sequence[Any]], Sizes] | None:
        """Function that reads the sizes from a run's inputs; None if the cost never varies."""
        if not self._symbols:
            return None
        positions = tuple(self._symbols.values())
        return lambda inputs: tuple(
            inputs[index] if dim is None else inputs[index].shape[dim] for index, dim in positions
        )

    def costs(self, sizes: Sizes) -> Costs:
        """Return ``{(fqn, phase, cost): calls}`` of one run with these sizes."""
        if not self._templates:
            return self._fixed
        if sizes not in self._costs:
            self._costs[sizes] = self._compute_costs(sizes)
        return self._costs[sizes]

    def costs_by_phase(self, sizes: Sizes) -> Mapping[Phase, OpCost]:
        """Return the cost of one run with these sizes in each phase."""
        if sizes not in self._costs_by_phase:
            totals: dict[Phase, OpCost] = {}
            for (_, phase, call_cost), calls in self.costs(sizes).items():
                for _, part_phase, cost in call_cost.parts(phase):
                    totals[part_phase] = totals.get(part_phase, ZERO) + cost * calls
            self._costs_by_phase[sizes] = totals
        return self._costs_by_phase[sizes]

    def _add(self, node: fx.Node, fqn: str, phase: Phase) -> None:
        op = node.target
        name = registry.name_of(op)
        rule = registry.lookup(op, self._own_rules)
        if rule is not None and not rule.is_recorded:
            return
        if rule is None:
            self._fixed[fqn, phase, CallCost(name, "unknown")] += 1
            return
        call = _Call(
            fqn=fqn,
            phase=phase,
            op=op,
            rule=rule,
            args=_as_called(node.args),
            kwargs=_as_called(node.kwargs),
            out=node.meta.get("val"),
        )
        if any(_is_symbolic(v) for v in _leaves((call.args, call.kwargs, call.out))):
            self._templates.append(_make_template(call))
        else:
            cost = self._cost_of(call, call.args, call.kwargs, call.out)
            self._fixed[fqn, phase, cost] += 1

    def _compute_costs(self, sizes: Sizes) -> Costs:
        values = {symbol: int(size) for symbol, size in zip(self._symbols, sizes, strict=True)}
        costs = self._fixed.copy()
        for call in self._templates:
            try:
                args, kwargs, out = (
                    _fill_in(part, values) for part in (call.args, call.kwargs, call.out)
                )
            except TypeError:
                cost = CallCost(registry.name_of(call.op), "unknown", error=_UNKNOWN_SIZE)
            else:
                cost = self._cost_of(call, args, kwargs, out)
            costs[call.fqn, call.phase, cost] += 1
        return costs

    def _cost_of(self, call: _Call, args: Any, kwargs: Any, out: Any) -> CallCost:
        name = registry.name_of(call.op)
        return cost_of_call(name, call.op, call.rule, args, kwargs, out, self._conventions)


def _operator_nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield the nodes that run operators, including those of subgraphs that run exactly once."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(
            node.target, (OpOverload, HigherOrderOperator)
        ):
            continue
        body = node.args[0] if node.args else None
        if (
            isinstance(node.target, HigherOrderOperator)
            and node.target.name() in _INLINED
            and isinstance(body, fx.Node)
            and body.op == "get_attr"
        ):
            yield from _operator_nodes(getattr(graph, str(body.target)))
        else:
            yield node


def _as_called(argument: Any) -> Any:
    """Return a node's argument as the operator receives it, with fake tensors."""
    return map_aggregate(argument, lambda a: a.meta.get("val") if isinstance(a, fx.Node) else a)


def _symbols(graph: fx.GraphModule) -> dict[Any, tuple[int, int | None]]:
    """Return ``{symbol: (position of an input, dimension)}``; None if the input is the size."""
    sizes: dict[Any, tuple[int, int | None]] = {}
    in_shapes: dict[Any, tuple[int, int | None]] = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            sizes.setdefault(value.node.expr, (index, None))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    in_shapes.setdefault(size.node.expr, (index, dim))
    found = in_shapes | sizes
    return {symbol: position for symbol, position in found.items() if symbol.is_Symbol}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _map(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_map(item, change) for item in value)
    return change(value)


def _make_template(call: _Call) -> _Call:
    return _Call(
        fqn=call.fqn,
        phase=call.phase,
        op=call.op,
        rule=call.rule,
        args=_map(call.args, _as_template),
        kwargs=_map(call.kwargs, _as_template),
        out=_map(call.out, _as_template),
    )


def _as_template(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _TensorTemplate(tuple(_as_template(size) for size in value.shape), value.dtype)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _SizeTemplate(value.node.expr)
    return value


def _fill_in(value: Any, values: Mapping[Any, Any]) -> Any:
    """Fill the sizes into templates; raise TypeError if one depends on other symbols."""

    def fill(part: Any) -> Any:
        if isinstance(part, _SizeTemplate):
            expression = part.expression
            number = expression.subs(values) if hasattr(expression, "subs") else expression
            return int(number) if getattr(number, "is_integer", True) else float(number)
        if isinstance(part, _TensorTemplate):
            sizes = [fill(size) for size in part.shape]
            return torch.empty(sizes, dtype=part.dtype, device="meta")
        return part

    return _map(value, fill)
