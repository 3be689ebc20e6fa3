"""Calls of modules and composite operators in which the nodes of compiled graphs were traced.

A node that a pass of the compiler makes, such as fused attention in place of two products, has no
such record, nor a position in the program. It belongs to the module of the nodes that use its
result: the last node of what replaces an operator takes over the record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx

_OF_THE_PROGRAM = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "seq_nr", "from_node")
RECORDS = (*_OF_THE_PROGRAM, "original_aten", "source_fn_stack")  # what meta tells of the program


def module_stack(node: fx.Node) -> Mapping[str, Any]:
    """Return ``{torch.compile's key: (name, class)}`` of a node's module calls, outermost first.

    A backward node has those of its forward node, and then its own.
    """
    return _stack(node, ("fwd_nn_module_stack", "nn_module_stack"))


def own_stack(node: fx.Node) -> Mapping[str, Any]:
    """Return those calls of ``module_stack`` that a backward node has not from its forward node."""
    return _stack(node, ("nn_module_stack",))


def _stack(node: fx.Node, names: Sequence[str]) -> Mapping[str, Any]:
    def noted(one: fx.Node) -> Mapping[str, Any]:
        return {key: call for name in names for key, call in (one.meta.get(name) or {}).items()}

    if not _is_made_by_a_pass(node):
        return noted(node)
    known = list(_nearest(node, lambda one: one.users)) or list(
        _nearest(node, lambda one: one.all_input_nodes)
    )
    return _common(list(map(noted, known)))


def _is_made_by_a_pass(node: fx.Node) -> bool:
    return node.op == "call_function" and not any(key in node.meta for key in _OF_THE_PROGRAM)


def _nearest(
    node: fx.Node, next_nodes: Callable[[fx.Node], Iterable[fx.Node]]
) -> Iterator[fx.Node]:
    """Yield the first nodes of the program that are reached by ``next_nodes``."""
    seen = {node}
    open_nodes = [node]
    while open_nodes:
        for following in next_nodes(open_nodes.pop()):
            if following in seen or following.op != "call_function":
                continue
            seen.add(following)
            if _is_made_by_a_pass(following):
                open_nodes.append(following)
            else:
                yield following


def _common(stacks: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the calls with which all of the stacks begin."""
    common: dict[str, Any] = {}
    for entries in zip(*(stack.items() for stack in stacks), strict=False):
        if any(entry != entries[0] for entry in entries):
            break
        key, value = entries[0]
        common[key] = value
    return common
