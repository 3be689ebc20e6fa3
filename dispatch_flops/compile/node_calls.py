"""Operator calls that the nodes of a compiled graph make in each run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from torch import fx

from dispatch_flops._torch import HigherOrderOperator, OpOverload
from dispatch_flops.compile import contractions
from dispatch_flops.compile.attribution import NodeAttribution, phase_of
from dispatch_flops.compile.opaque_calls import OpaqueCall
from dispatch_flops.compile.templates import Templates, arguments_of, is_symbolic
from dispatch_flops.operators import registry
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import Phase

CallsAround = Callable[[fx.Node], tuple[OpaqueCall, ...]]
INLINED = ("invoke_subgraph", "strict_mode", "hints_wrapper", "local_map_hop", "foreach_map")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """Operator call of one node, with templates in place of tensors.

    rule: how the cost is found; None: as registered for ``op``.
    around: opaque calls that it is a part of in forward or recomputation, outermost first, each
        with a key for each time that the graph runs the call.
    """

    fqn: str
    phase: Phase
    op: Any
    args: Any
    kwargs: Any
    out: Any
    has_symbols: bool
    rule: Rule | None = None
    around: tuple[tuple[OpaqueCall, Hashable], ...] = ()

    @property
    def arithmetic(self) -> tuple[str, ...]:
        """Name of the operator that does arithmetic, in a tuple; empty if the node does none."""
        inner = next((part for part in self.args if isinstance(part, OpOverload)), self.op)
        rule = registry.lookup(inner)
        return () if rule is not None and rule.kind == "free" else (name_of(inner),)


def calls_of(
    graph: fx.GraphModule,
    attribution: NodeAttribution,
    calls_around: CallsAround,
    *,
    is_backward: bool,
) -> Iterator[NodeCall]:
    """Yield the call that each node of a graph makes when the graph runs."""
    templates = Templates()
    for node, outer_nodes in _operator_nodes(graph):
        if contractions.is_remainder(node):
            continue
        args, kwargs = arguments_of(node)
        op, rule, out = node.target, None, node.meta.get("val")
        if contractions.is_product(node):
            op, rule = contractions.operator_of(node), contractions.RULE
            out = contractions.result_of(node)
        made = templates.of((args, kwargs, out))
        phase = phase_of(node, is_backward=is_backward)
        calls = calls_around(node) if phase in ("forward", "recompute") else ()
        yield NodeCall(
            fqn=attribution.fqn_of(node),
            phase=phase,
            op=op,
            args=made[0],
            kwargs=made[1],
            out=made[2],
            has_symbols=is_symbolic(made),
            rule=rule,
            around=tuple((call, _run_of(call, outer_nodes, calls_around)) for call in calls),
        )


def _run_of(call: OpaqueCall, outer_nodes: Iterable[fx.Node], calls_around: CallsAround) -> Any:
    """Return a key for the run of a call: which nodes run the subgraphs around it."""
    return tuple(
        node.name for node in takewhile(lambda node: call not in calls_around(node), outer_nodes)
    )


def _operator_nodes(
    graph: fx.GraphModule, outer_nodes: tuple[fx.Node, ...] = ()
) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Yield the nodes that run operators, including those of subgraphs that run exactly once.

    Each comes with the nodes that run the subgraphs in which it is, outermost first.
    """
    for node in graph.graph.nodes:
        if node.op != "call_function" or not isinstance(
            node.target, (OpOverload, HigherOrderOperator)
        ):
            continue
        body = node.args[0] if node.args else None
        if (
            isinstance(node.target, HigherOrderOperator)
            and node.target.name() in INLINED
            and isinstance(body, fx.Node)
            and body.op == "get_attr"
        ):
            yield from _operator_nodes(getattr(graph, str(body.target)), (*outer_nodes, node))
        else:
            yield node, outer_nodes
