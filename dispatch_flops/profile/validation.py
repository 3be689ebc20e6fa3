"""What may be wrong with a profile that somebody built or saved."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dispatch_flops.profile.cost import PHASES, ZERO
from dispatch_flops.profile.tree import ModuleNode, add_costs, costs_by_phase


def params_beside(*roots: ModuleNode) -> dict[int, int]:
    """``{id of a node: own parameters of all nodes that are not at or below it}``."""
    within: dict[int, int] = {}
    for root in roots:
        for node in reversed(list(root.walk())):
            below = (within[id(child)] for child in node.children)
            within[id(node)] = sum(below, start=_count_or_0(node.own_params))
    everywhere = sum(within[id(root)] for root in roots)
    return {node: everywhere - params for node, params in within.items()}


def flaws(node: ModuleNode, beside: int) -> Iterator[str]:
    """What is wrong with the node by itself, against its children, and what lies beside it."""
    own = costs_by_phase(node.ops)
    for phase in PHASES:
        parts = [own[phase], *(child.total(phase) for child in node.children)]
        if node.total(phase) != (parts[0] if len(parts) == 1 else add_costs(parts)):
            yield f"{phase}: total {node.total(phase)} is not the sum of {parts}"
    for name in ("calls", "own_params", "total_params", "active_params", "trainable_params"):
        if not _is_count(getattr(node, name)):
            yield f"{name} = {getattr(node, name)!r} is no count"
    if node.tokens is not None and not _is_count(node.tokens):
        yield f"tokens = {node.tokens!r} is no count"
    below = [child.total_params for child in node.children]
    # What a node has beyond its own and its children's is a shared module's, whose line in the
    # tree is another parent's: then it lies beside this node.
    most = node.own_params + sum(below) + beside
    if not max(node.own_params, *below, 0) <= node.total_params <= most:
        yield f"total_params = {node.total_params} are not its own {node.own_params} and {below}"
    if max(node.active_params, node.trainable_params) > node.total_params:
        yield "more active or trainable parameters than parameters"
    for seconds in (node.latency_s, node.latency_spread_s, node.backward_latency_s):
        if seconds is not None and not 0 <= seconds < math.inf:
            yield f"a latency of {seconds} s"
    for op in node.ops:
        cost = op.cost or ZERO
        numbers = (
            op.calls, op.uncounted, cost.macs, cost.flops, cost.bytes_read, cost.bytes_written
        )  # fmt: skip
        if not all(map(_is_count, numbers)) or op.uncounted > op.calls:
            yield f"{op} has a count that is no count"
        if op.phase not in PHASES:
            yield f"{op} is of no phase"
        if (op.cost is None) != (op.uncounted == op.calls > 0):
            yield f"{op} has a cost but no counted call, or counted calls but no cost"


def _count_or_0(number: object) -> int:
    return number if isinstance(number, int) else 0


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0
