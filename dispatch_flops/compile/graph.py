"""What one run of a compiled graph costs, by place, phase and operator.

Nodes with fixed shapes are priced once. Nodes with symbolic shapes are kept as templates: for
every set of sizes that a run is met with they are priced on stand-ins on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dispatch_flops._torch import HigherOrderOperator, OpOverload, map_aggregate
from dispatch_flops.compile.attribution import Places, phase_of
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import METADATA, CallCost, price
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import ZERO, OpCost, Phase

Sizes = tuple[int, ...]
Costs = Counter[tuple[str, Phase, CallCost]]
_INLINED = ("invoke_subgraph", "strict_mode", "hints_wrapper", "local_map_hop", "foreach_map")
_UNKNOWN_SIZE = "a size hangs on data: it is known only inside the compiled code"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One node: ``op`` called with ``args``, in which tensors may have symbolic sizes."""

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
    """The cost of one graph after AOTAutograd's partitioning, and how often it ran.

    part_of: the module whose forward the graph is a part of, and which part.
    runs: by the sizes that ``read_sizes`` found in the inputs; () where all shapes are fixed.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        places: Places,
        *,
        is_backward: bool,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
    ) -> None:
        self.is_backward = is_backward
        self.part_of = (places.own, places.function)
        self.module_calls = {} if is_backward else places.calls(graph.graph)
        self.runs: Counter[Sizes] = Counter()
        self._conventions = conventions
        self._own_rules = own_rules
        self._fixed: Costs = Counter()
        self._templates: list[_Call] = []
        self._priced: dict[Sizes, Costs] = {}
        self._by_phase: dict[Sizes, dict[Phase, OpCost]] = {}
        for node in _nodes(graph):
            self._add(node, places.of(node), phase_of(node, is_backward=is_backward))
        self._symbols = _symbols(graph) if self._templates else {}

    @property
    def read_sizes(self) -> Callable[[Sequence[Any]], Sizes] | None:
        """Reads from a run's inputs what the cost hangs on; None where it is always the same."""
        if not self._symbols:
            return None
        plan = tuple(self._symbols.values())
        return lambda inputs: tuple(
            inputs[index] if dim is None else inputs[index].shape[dim] for index, dim in plan
        )

    def costs(self, sizes: Sizes) -> Costs:
        """Calls by place, phase and entry of one run with these sizes."""
        if not self._templates:
            return self._fixed
        if sizes not in self._priced:
            self._priced[sizes] = self._price_all(sizes)
        return self._priced[sizes]

    def by_phase(self, sizes: Sizes) -> Mapping[Phase, OpCost]:
        """The cost of one run with these sizes."""
        if sizes not in self._by_phase:
            totals: dict[Phase, OpCost] = {}
            for (_, phase, entry), times in self.costs(sizes).items():
                for _, own, cost in entry.parts(phase):
                    totals[own] = totals.get(own, ZERO) + cost * times
            self._by_phase[sizes] = totals
        return self._by_phase[sizes]

    def _add(self, node: fx.Node, fqn: str, phase: Phase) -> None:
        op = node.target
        name = registry.name_of(op)
        rule = registry.lookup(op, self._own_rules)
        if name in METADATA:
            return
        if rule is None:
            self._fixed[fqn, phase, CallCost(name, "unknown")] += 1
            return
        call = _Call(
            fqn=fqn,
            phase=phase,
            op=op,
            rule=rule,
            args=_value(node.args),
            kwargs=_value(node.kwargs),
            out=node.meta.get("val"),
        )
        if any(_is_symbolic(v) for v in _leaves((call.args, call.kwargs, call.out))):
            self._templates.append(_template(call))
        else:
            self._fixed[fqn, phase, self._price(call, call.args, call.kwargs, call.out)] += 1

    def _price_all(self, sizes: Sizes) -> Costs:
        values = {symbol: int(size) for symbol, size in zip(self._symbols, sizes, strict=True)}
        costs = self._fixed.copy()
        for call in self._templates:
            try:
                args, kwargs, out = (
                    _concrete(part, values) for part in (call.args, call.kwargs, call.out)
                )
            except TypeError:
                entry = CallCost(registry.name_of(call.op), "unknown", error=_UNKNOWN_SIZE)
            else:
                entry = self._price(call, args, kwargs, out)
            costs[call.fqn, call.phase, entry] += 1
        return costs

    def _price(self, call: _Call, args: Any, kwargs: Any, out: Any) -> CallCost:
        name = registry.name_of(call.op)
        return price(name, call.op, call.rule, args, kwargs, out, self._conventions)


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Nodes that run operators, also those of subgraphs that run exactly once."""
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
            yield from _nodes(getattr(graph, str(body.target)))
        else:
            yield node


def _value(argument: Any) -> Any:
    """A node's argument as the operator gets it, tensors as fakes."""
    return map_aggregate(argument, lambda a: a.meta.get("val") if isinstance(a, fx.Node) else a)


def _symbols(graph: fx.GraphModule) -> dict[Any, tuple[int, int | None]]:
    """``{symbol: (input, dimension, or None for an input that is a size)}``."""
    found: dict[Any, tuple[int, int | None]] = {}
    in_shapes: dict[Any, tuple[int, int | None]] = {}
    for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found.setdefault(value.node.expr, (index, None))
        elif isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    in_shapes.setdefault(size.node.expr, (index, dim))
    both = {**in_shapes, **found}
    return {symbol: where for symbol, where in both.items() if symbol.is_Symbol}


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


def _template(call: _Call) -> _Call:
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


def _concrete(value: Any, values: Mapping[Any, Any]) -> Any:
    """Templates with sizes put in; TypeError where a size is not among ``values``."""

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
