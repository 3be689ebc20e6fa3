"""Sums of operator totals, modules and whole trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from dispatch_flops.profile.cost import add_costs
from dispatch_flops.profile.memory import sum_memory
from dispatch_flops.profile.seconds import add_seconds, sum_known
from dispatch_flops.profile.tree import ModuleNode, OpTotal, local_params_of


def merge_ops(a: OpTotal, b: OpTotal) -> OpTotal:
    """Return two totals of the same operator as one.

    Its latency is known where all calls were timed. A total without calls, as a share of a call
    that is recorded elsewhere, took no time.
    """
    timed = all(op.latency_s is not None for op in (a, b) if op.calls) and a.calls + b.calls > 0
    return OpTotal(
        op=a.op,
        phase=a.phase if a.phase == b.phase else None,
        dtype=a.dtype if a.dtype == b.dtype else None,
        kind=b.kind if a.cost is None else a.kind,
        calls=a.calls + b.calls,
        cost=None if a.cost is None and b.cost is None else add_costs((a.cost, b.cost)),
        uncounted=a.uncounted + b.uncounted,
        error=a.error or b.error,
        latency_s=(a.latency_s or 0.0) + (b.latency_s or 0.0) if timed else None,
    )


def sum_nodes(
    nodes: Sequence[ModuleNode],
    children: tuple[ModuleNode, ...] = (),
    *,
    most_params: int | None = None,
) -> ModuleNode:
    """Return one node with the sums of ``nodes``, named as the first of them.

    Calls, parameters, operators, latencies, tokens and bytes held are summed; operators as
    by ``sum_ops``. Of the peaks of memory, the highest counts.

    children: of the sum; those of ``nodes`` are not looked at.
    most_params: upper limit of each count of parameters, for nodes that share parameters.
    """

    def params(counts: Iterable[int]) -> int:
        total = sum(counts)
        return total if most_params is None else min(total, most_params)

    any_sharded = any(node.local_params is not None for node in nodes)
    tokens = [node.tokens for node in nodes if node.tokens is not None]
    return dataclasses.replace(
        nodes[0],
        calls=sum(node.calls for node in nodes),
        own_params=params(node.own_params for node in nodes),
        total_params=params(node.total_params for node in nodes),
        active_params=params(node.active_params for node in nodes),
        trainable_params=params(node.trainable_params for node in nodes),
        local_params=params(map(local_params_of, nodes)) if any_sharded else None,
        ops=sum_ops(op for node in nodes for op in node.ops),
        children=children,
        seconds=add_seconds(node.seconds for node in nodes),
        latency_spread_s=sum_known(node.latency_spread_s for node in nodes),
        tokens=sum(tokens) if tokens else None,
        memory=sum_memory(node.memory for node in nodes),
    )


def sum_trees(roots: Sequence[ModuleNode], *, most_params: int | None = None) -> ModuleNode:
    """Return the sum of trees of one shape, node by node as ``sum_nodes`` does.

    Raises ValueError where the trees have different numbers of nodes.
    """
    sums: dict[int, ModuleNode] = {}
    for same in reversed(list(zip(*(root.walk() for root in roots), strict=True))):
        children = tuple(sums[id(child)] for child in same[0].children)
        sums[id(same[0])] = sum_nodes(same, children, most_params=most_params)
    return sums[id(roots[0])]


def sum_ops(ops: Iterable[OpTotal]) -> tuple[OpTotal, ...]:
    """Return the totals with those of one overload, phase, dtype, kind and error as one."""
    merged: dict[Any, OpTotal] = {}
    for op in ops:
        key = (op.op, op.phase, op.dtype, op.kind, op.error)
        merged[key] = merge_ops(merged[key], op) if key in merged else op
    return tuple(merged.values())
