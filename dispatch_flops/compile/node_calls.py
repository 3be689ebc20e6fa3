"""Operator calls that the nodes of a compiled graph make in each run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from torch import fx

from dispatch_flops import _torch
from dispatch_flops.compile import contractions
from dispatch_flops.compile.attribution import NodeAttribution, phase_of
from dispatch_flops.compile.node_operators import (
    arithmetic_of,
    is_seeded_again,
    operator_nodes,
)
from dispatch_flops.compile.opaque_calls import OpaqueCall
from dispatch_flops.compile.templates import Templates, arguments_of, is_symbolic
from dispatch_flops.compile.traced_composites import CompositeCall
from dispatch_flops.operators.registry import Rule
from dispatch_flops.profile.cost import Phase

Opaque = OpaqueCall | CompositeCall
CallsAround = Callable[[Phase, fx.Node], tuple[Opaque, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCall:
    """Operator call of one node, with templates in place of tensors.

    rule: how the cost is found; None: as registered for ``op``.
    arithmetic: name of the operator if it does arithmetic, in a tuple; empty if not.
    is_checkpointed: torch.utils.checkpoint decides whether it is recomputed.
    around: opaque calls that it is a part of, outermost first, each with a key for each time that
        the graph runs the call.
    """

    fqn: str
    phase: Phase
    op: Any
    args: Any
    kwargs: Any
    out: Any
    has_symbols: bool
    arithmetic: tuple[str, ...]
    is_checkpointed: bool
    rule: Rule | None = None
    around: tuple[tuple[Opaque, Hashable], ...] = ()


def calls_of(
    graph: fx.GraphModule,
    attribution: NodeAttribution,
    calls_around: CallsAround,
    *,
    is_backward: bool,
) -> Iterator[NodeCall]:
    """Yield the call that each node of a graph makes when the graph runs."""
    templates = Templates()
    for node, outer_nodes in operator_nodes(graph):
        if contractions.is_remainder(node):
            continue
        args, kwargs = arguments_of(node)
        op, rule, out = node.target, None, node.meta.get("val")
        if contractions.is_product(node):
            op, rule = contractions.operator_of(node), contractions.RULE
            out = contractions.result_of(node)
        made = templates.of((args, kwargs, out))
        phase = phase_of(node, is_backward=is_backward)
        around = partial(calls_around, phase)
        yield NodeCall(
            fqn=attribution.fqn_of(node),
            phase=phase,
            op=op,
            args=made[0],
            kwargs=made[1],
            out=made[2],
            has_symbols=is_symbolic(made),
            rule=rule,
            arithmetic=arithmetic_of(node),
            is_checkpointed=_torch.is_checkpointed(node) or is_seeded_again(node),
            around=tuple((call, _run_of(call, outer_nodes, around)) for call in around(node)),
        )


def _run_of(
    call: Opaque, outer_nodes: Iterable[fx.Node], around: Callable[[fx.Node], tuple[Opaque, ...]]
) -> Any:
    """Return a key for the run of a call: which nodes run the subgraphs around it."""
    return tuple(
        node.name for node in takewhile(lambda node: call not in around(node), outer_nodes)
    )
