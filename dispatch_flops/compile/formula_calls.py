"""Opaque calls that the graphs of one compiled function count: of modules and of operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dispatch_flops.compile.node_calls import NodeCall, Opaque
from dispatch_flops.profile.cost import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaCall:
    """Opaque call that a graph counts.

    times: in one run. around: opaque calls that enclose it.
    """

    call: Opaque
    fqn: str
    phase: Phase
    times: int
    around: tuple[Opaque, ...]


@dataclass(slots=True)
class Region:
    """Operator calls of a graph that are parts of one opaque call.

    first: the first of them. runs: a key for each time that the graph runs the opaque call.
    operators: calls of operators that do arithmetic, by name.
    """

    first: NodeCall
    runs: set[Any] = field(default_factory=set)
    operators: Counter[str] = field(default_factory=Counter)


def regions_of(node_calls: Iterable[NodeCall]) -> Mapping[Opaque, Region]:
    """Return the regions of a graph that makes these operator calls."""
    regions: dict[Opaque, Region] = {}
    for node_call in node_calls:
        for call, run in node_call.around:
            region = regions.setdefault(call, Region(node_call))
            region.runs.add(run)
            region.operators.update(node_call.arithmetic)
    return regions
