"""Tables of what the ranks of a cluster send and receive, plain or Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from dispatch_flops.analysis.cluster_communication import traffic_by_group
from dispatch_flops.profile import CommCost
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.renderers.cluster_table import (
    Section,
    first_rows,
    groups_section,
    heading,
    section_text,
)
from dispatch_flops.renderers.communication import NOTHING, group_text
from dispatch_flops.renderers.view import View
from dispatch_flops.units import bytes_text

__all__ = ["render"]


class _Row(NamedTuple):
    """What a row is of; group: its mesh dimension or its name."""

    stage: int | None
    fqn: str
    phase: Phase
    kind: str
    group: str
    size: int
    dtype: str | None


def render(cluster: ClusterProfile, view: View | None = None) -> str:
    """Return a row for each module, phase, kind and group, then sums by group and kind.

    The modules of different pipeline stages have rows of their own. A row's numbers are of one
    rank, and a range where the ranks that take part differ.

    view: ``phase`` and ``style``.

        print(cluster_communication.render(cluster, View(phase="backward")))
    """
    view = view or View()
    traffic = traffic_by_group(cluster, view.phase)
    parts = ["\n".join(heading(cluster))]
    if traffic:
        sections = (_by_module(cluster, view.phase), groups_section(traffic))
        parts += [section_text(section, view.style) for section in sections]
    else:
        parts.append(NOTHING)
    return "\n\n".join(parts)


def _by_module(cluster: ClusterProfile, phase: Phase | None) -> Section:
    found = _costs(cluster, phase)
    same = cluster.same_ranks()
    has_stages = any(row.stage is not None for row in found)
    rows = [
        [
            *([str(row.stage)] if has_stages else []),
            row.fqn or "(model)",
            row.phase,
            row.kind,
            group_text(row.group, row.size),
            row.dtype or "",
            str(sum(len(same[rank]) for rank in costs)),
            *_numbers(costs),
        ]
        for row, costs in sorted(found.items(), key=lambda item: _order(item[0]))
    ]
    stages = ("Stage",) if has_stages else ()
    return Section(
        title="Communication by module, of one rank",
        header=(
            *stages, "Module", "Phase", "Kind", "Group", "Dtype", "Ranks",
            "Calls", "Payload", "On the bus",
        ),
        rows=first_rows(rows),
        texts=len(stages) + 5,
        names=len(stages),
    )  # fmt: skip


def _costs(cluster: ClusterProfile, phase: Phase | None) -> dict[_Row, dict[int, CommCost]]:
    """Return ``{row: {profiled rank: calls and bytes}}``."""
    found: dict[_Row, dict[int, CommCost]] = {}
    for rank, profile in cluster.profiles.items():
        stage = cluster.stage(rank)
        for total in profile.communication:
            if phase in (None, total.phase):
                group = total.group
                row = _Row(
                    stage, total.fqn, total.phase, total.kind, group.label, group.size, total.dtype
                )
                costs = found.setdefault(row, {})
                costs[rank] = costs.get(rank, CommCost()) + total.cost
    return found


def _numbers(costs: Mapping[int, CommCost]) -> Iterator[str]:
    """Yield calls, payload and bytes on the bus, each as a range where ranks differ."""
    figures: tuple[tuple[Callable[[CommCost], float], Callable[[float], str]], ...] = (
        (lambda cost: cost.calls, str),
        (lambda cost: cost.payload_bytes, bytes_text),
        (lambda cost: cost.bus_bytes, bytes_text),
    )
    for figure, text in figures:
        values = [figure(cost) for cost in costs.values()]
        least, most = text(min(values)), text(max(values))
        yield least if least == most else f"{least} to {most}"


def _order(row: _Row) -> tuple[int, str, str, str, str, str]:
    stage = -1 if row.stage is None else row.stage
    return (stage, row.fqn, row.phase, row.kind, row.group, row.dtype or "")
