"""Operators that the nodes of compiled graphs run."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from dispatch_flops._torch import HigherOrderOperator, OpOverload
from dispatch_flops.compile import contractions
from dispatch_flops.operators import registry
from dispatch_flops.operators.operator_keys import name_of

# By which a backward graph runs a seeded operator of the forward pass again, such as attention.
_SEEDED_AGAIN = ("run_with_rng_state", "graphsafe_run_with_rng_state")
INLINED = ("invoke_subgraph", "strict_mode", "hints_wrapper", "local_map_hop", "foreach_map")


def operator_nodes(
    graph: fx.GraphModule, outer_nodes: tuple[fx.Node, ...] = ()
) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """Yield the nodes that run operators, including those of subgraphs that run exactly once.

    Each comes with the nodes that run the subgraphs in which it is, outermost first.
    """
    for node in graph.graph.nodes:
        if not _runs_operator(node):
            continue
        if name_of_higher_order(node) in INLINED and functions_of(node):
            yield from operator_nodes(functions_of(node)[0], (*outer_nodes, node))
        else:
            yield node, outer_nodes


def name_of_higher_order(node: fx.Node) -> str | None:
    """Return the name of a node's higher-order operator; None for another node."""
    return node.target.name() if isinstance(node.target, HigherOrderOperator) else None


def is_seeded_again(node: fx.Node) -> bool:
    """Return True for a node of a backward graph that repeats a seeded operator of a checkpoint.

    The partitioner puts it there, without what was noted of the operator. It recomputes a seeded
    operator only where a checkpoint asks for it.
    """
    return name_of_higher_order(node) in _SEEDED_AGAIN


def functions_of(node: fx.Node) -> list[fx.GraphModule]:
    """Return the functions that the node of a higher-order operator is given."""
    owner = node.graph.owning_module
    given = [
        getattr(owner, str(argument.target), None)
        for argument in node.all_input_nodes
        if argument.op == "get_attr"
    ]
    return [function for function in given if isinstance(function, fx.GraphModule)]


def arithmetic_of(node: fx.Node) -> tuple[str, ...]:
    """Return the name of the operator if the node does arithmetic, in a tuple; empty if not."""
    if not _runs_operator(node) or contractions.is_remainder(node):
        return ()
    op = contractions.operator_of(node) if contractions.is_product(node) else node.target
    inner = next((part for part in node.args if isinstance(part, OpOverload)), op)
    rule = registry.lookup(inner)
    return () if rule is not None and rule.kind == "free" else (name_of(inner),)


def _runs_operator(node: fx.Node) -> bool:
    is_operator = isinstance(node.target, (OpOverload, HigherOrderOperator))
    return node.op == "call_function" and is_operator
