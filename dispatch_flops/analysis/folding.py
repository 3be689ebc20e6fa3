"""Runs of identical numbered siblings as one node, as ``(0-11): 12 x BertLayer(...)``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from dispatch_flops.analysis.figures import sum_known
from dispatch_flops.profile import ModuleNode, merge

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\d+)", re.DOTALL)


def fold(root: ModuleNode) -> ModuleNode:
    """The tree with each run of siblings that differ in nothing but number and latency merged.

    A merged node stands for all of the run: its params, operators, calls and latencies are
    their sums, and so are those of the nodes below it. Parameters that the siblings share
    count once: the sum is capped at the parent's.
    """
    shapes: dict[object, int] = {}
    shape_of: dict[str, int] = {}
    folded: dict[str, ModuleNode] = {}
    for node in reversed(list(root.walk())):
        shape = (_own_shape(node), tuple(shape_of[child.fqn] for child in node.children))
        shape_of[node.fqn] = shapes.setdefault(shape, len(shapes))
        children = tuple(
            _merged([folded[member.fqn] for member in run], node.total_params)
            for run in _runs(node.children, shape_of)
        )
        folded[node.fqn] = dataclasses.replace(node, children=children)
    return folded[root.fqn]


def _own_shape(node: ModuleNode) -> object:
    """What two modules must agree in to be folded, their children aside."""
    return (
        node.class_name,
        node.extra_repr,
        node.calls,
        node.own_params,
        node.total_params,
        node.active_params,
        node.trainable_params,
        node.tokens,
        tuple(dataclasses.replace(op, latency_s=None) for op in node.ops),
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
    """One node for a run; all its members are trees of the same shape."""
    first, last = run[0], run[-1]
    if len(run) == 1:
        return first
    sums: dict[str, ModuleNode] = {}
    for same in reversed(list(zip(*(member.walk() for member in run), strict=True))):
        children = tuple(sums[child.fqn] for child in same[0].children)
        sums[same[0].fqn] = _sum(same, children, most_params)
    return dataclasses.replace(
        sums[first.fqn],
        name=f"{first.name}-{last.name}",
        class_name=f"{len(run)} x {first.class_name}",
    )


def _sum(
    same: Sequence[ModuleNode], children: tuple[ModuleNode, ...], most_params: int
) -> ModuleNode:
    def capped(counts: Iterable[int]) -> int:
        return min(sum(counts), most_params)

    ops = list(same[0].ops)
    for node in same[1:]:
        ops = [merge(a, b) for a, b in zip(ops, node.ops, strict=True)]
    return dataclasses.replace(
        same[0],
        calls=sum(node.calls for node in same),
        own_params=capped(node.own_params for node in same),
        total_params=capped(node.total_params for node in same),
        active_params=capped(node.active_params for node in same),
        trainable_params=capped(node.trainable_params for node in same),
        ops=tuple(ops),
        children=children,
        latency_s=sum_known(node.latency_s for node in same),
        latency_spread_s=sum_known(node.latency_spread_s for node in same),
        backward_latency_s=sum_known(node.backward_latency_s for node in same),
        tokens=None if same[0].tokens is None else sum(node.tokens or 0 for node in same),
    )
