"""Folding: runs of identical numbered siblings as one node, ``(0-11): 12 x BertLayer(...)``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from dispatch_flops.profile import ModuleNode, sum_trees
from dispatch_flops.profile.tree import map_tree

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)", re.DOTALL)


def fold(root: ModuleNode) -> ModuleNode:
    """Return the tree with each run of siblings merged that differ only in number and latency.

    The parameters, operators, calls and latencies of a merged node are the sums over the run,
    and so are those of the nodes below it; their class names say how many: "12 x Linear".
    Parameters that the siblings share count once: the sum is at most the parent's.

    Example::

        deep = profile_model(nn.Sequential(*(nn.Linear(3, 3) for _ in range(12))), args=[x])
        for node in fold(deep.root).children:
            print(node.name, node.class_name, node.total_params)  # prints 0-11 12 x Linear 144
    """
    runs = runs_of_siblings(root)
    folded: dict[str, ModuleNode] = {}
    for node in reversed(list(root.walk())):
        children = tuple(
            _merged([folded[member.fqn] for member in run], node.total_params)
            for run in runs[node.fqn]
        )
        folded[node.fqn] = dataclasses.replace(node, children=children)
    return folded[root.fqn]


def runs_of_siblings(root: ModuleNode) -> dict[str, list[Sequence[ModuleNode]]]:
    """Return ``{fqn: its children, in runs of those that differ only in number and latency}``."""
    shapes: dict[object, int] = {}
    shape_of: dict[str, int] = {}
    runs: dict[str, list[Sequence[ModuleNode]]] = {}
    for node in reversed(list(root.walk())):
        shape = (_own_shape(node), tuple(shape_of[child.fqn] for child in node.children))
        shape_of[node.fqn] = shapes.setdefault(shape, len(shapes))
        runs[node.fqn] = list(_runs(node.children, shape_of))
    return runs


def _own_shape(node: ModuleNode) -> object:
    """Return what two modules must agree in to be merged, apart from their children."""
    return (
        node.class_name,
        node.extra_repr,
        node.calls,
        node.own_params,
        node.total_params,
        node.active_params,
        node.trainable_params,
        node.tokens,
        node.output_shapes,
        tuple(
            op if op.latency_s is None else dataclasses.replace(op, latency_s=None)
            for op in node.ops
        ),
    )


def _runs(
    siblings: Sequence[ModuleNode], shape_of: dict[str, int]
) -> Iterator[Sequence[ModuleNode]]:
    start = 0
    for end in range(1, len(siblings) + 1):
        if end == len(siblings) or not (
            shape_of[siblings[end].fqn] == shape_of[siblings[start].fqn]
            and _follows(siblings[end - 1].name, siblings[end].name)
        ):
            yield siblings[start:end]
            start = end


def _follows(name: str, next_name: str) -> bool:
    a, b = _NUMBERED.fullmatch(name), _NUMBERED.fullmatch(next_name)
    return bool(a and b and a["stem"] == b["stem"] and int(b["number"]) == int(a["number"]) + 1)


def _merged(run: Sequence[ModuleNode], most_params: int) -> ModuleNode:
    """Return one node for a run of siblings, which are trees of one shape."""
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    merged = map_tree(
        sum_trees(run, most_params=most_params),
        lambda node: dataclasses.replace(node, class_name=f"{len(run)} x {node.class_name}"),
    )
    return dataclasses.replace(merged, name=f"{first.name}-{last.name}")
