"""Operator calls that the nodes of a compiled graph make in each run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from dispatch_flops._torch import HigherOrderOperator, OpOverload
from dispatch_flops.compile import contractions
from dispatch_flops.compile.attribution import NodeAttribution, phase_of
from dispatch_flops.compile.templates import Templates, arguments_of, is_symbolic
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import Phase

_INLINED = ("invoke_subgraph", "strict_mode", "hints_wrapper", "local_map_hop", "foreach_map")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """Operator call of one node, with templates in place of tensors.

    rule: how the cost is found; None: as registered for ``op``.
    """

    fqn: str
    phase: Phase
    op: Any
    args: Any
    kwargs: Any
    out: Any
    has_symbols: bool
    rule: Rule | None = None


def calls_of(
    graph: fx.GraphModule, attribution: NodeAttribution, *, is_backward: bool
) -> Iterator[NodeCall]:
    """Yield the call that each node of a graph makes when the graph runs."""
    templates = Templates()
    for node in _operator_nodes(graph):
        if contractions.is_remainder(node):
            continue
        args, kwargs = arguments_of(node)
        op, rule, out = node.target, None, node.meta.get("val")
        if contractions.is_product(node):
            op, rule = contractions.operator_of(node), contractions.RULE
            out = contractions.result_of(node)
        made = templates.of((args, kwargs, out))
        yield NodeCall(
            fqn=attribution.fqn_of(node),
            phase=phase_of(node, is_backward=is_backward),
            op=op,
            args=made[0],
            kwargs=made[1],
            out=made[2],
            has_symbols=is_symbolic(made),
            rule=rule,
        )


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
