"""The data of a cluster's page: figures of ranks, mesh positions, groups and modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dispatch_flops.analysis.cluster_communication import traffic_by_group
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.cost import ALL_PHASES, Phase, in_order
from dispatch_flops.profile.mesh_positions import STAGE_DIMS, ranks_text
from dispatch_flops.profile.rank_figures import BY, By, Spread, spread_of
from dispatch_flops.renderers.cluster_marks import Marks
from dispatch_flops.renderers.cluster_table import (
    FIGURES,
    lower_bound_text,
    memory_texts,
    missing_text,
    notes_of,
    ranks_line,
)
from dispatch_flops.renderers.html.cluster_modules import module_rows
from dispatch_flops.renderers.text import one_line
from dispatch_flops.renderers.view import View

Data = dict[str, Any]
Views = Mapping[str, Phase | None]
Values = Mapping[int, Mapping[By, Mapping[str, float | None]]]


def cluster_data(cluster: ClusterProfile, view: View, title: str) -> Data:
    """Return the page's data, as values that JSON represents exactly."""
    views = _views(cluster, view.phase)
    values = _values(cluster, views)
    marks = {name: Marks(cluster, phase) for name, phase in views.items()}
    shown = [by for by in BY if any(v for of in values.values() for v in of[by].values())]
    warnings = (missing_text(cluster), lower_bound_text(cluster), *memory_texts(cluster))
    return {
        "title": title,
        "subtitle": ranks_line(cluster),
        "warnings": [text for text in warnings if text],
        "notes": [one_line(note) for note in notes_of(cluster)],
        "views": list(views),
        "figures": [[by, FIGURES[by][0]] for by in shown],
        "spreads": _spreads(values, cluster.same_ranks(), shown, marks),
        "ranks": list(_ranks(cluster, values, shown, marks)),
        "mesh": [
            {
                "dim": dim,
                "is_stage": dim in STAGE_DIMS,
                "rows": list(_positions(cluster, values, shown, marks, dim)),
            }
            for dim, size in (cluster.mesh or {}).items()
            if size > 1
        ],
        "groups": {name: list(_groups(cluster, phase)) for name, phase in views.items()},
        "modules": module_rows(cluster, views, view.depth),
    }


def _views(cluster: ClusterProfile, phase: Phase | None) -> dict[str, Phase | None]:
    """Return the phases that the reader can choose: the given one, or all and each."""
    if phase is not None:
        return {phase: phase}
    known = in_order(phase for p in cluster.profiles.values() for phase in phases_of(p))
    return {ALL_PHASES: None, **({phase: phase for phase in known} if len(known) > 1 else {})}


def _values(cluster: ClusterProfile, views: Views) -> Values:
    """Return ``{profiled rank: {figure: {view: value}}}``."""
    return {
        rank: {
            by: {name: cluster.value(rank, by, phase) for name, phase in views.items()} for by in BY
        }
        for rank in cluster.profiles
    }


def _spreads(
    values: Values, same: Mapping[int, list[int]], shown: Iterable[By], marks: Mapping[str, Marks]
) -> dict[str, dict[str, Data | None]]:
    """Return the spread of each figure in each view over some ranks.

    same: the ranks that each profiled rank stands for, of those that count.
    """
    return {
        by: {
            name: spread_data(
                spread_of(
                    {rank: value for rank in same if (value := values[rank][by][name]) is not None},
                    same,
                ),
                _page_mark(of, same, by),
            )
            for name, of in marks.items()
        }
        for by in shown
    }


def _page_mark(marks: Marks, ranks: Iterable[int], by: By) -> str:
    return marks.of(ranks, by).replace(">=", "≥")


def spread_data(spread: Spread | None, mark: str = "") -> Data | None:
    """Return a spread as plain data; a straggler is named where ranks differ."""
    if spread is None:
        return None
    is_even = spread.minimum == spread.maximum
    return {
        "minimum": spread.minimum,
        "maximum": spread.maximum,
        "total": spread.total,
        "imbalance": spread.imbalance,
        "straggler": None if is_even else spread.straggler,
        "mark": mark,
    }


def _ranks(
    cluster: ClusterProfile, values: Values, shown: Iterable[By], marks: Mapping[str, Marks]
) -> Iterator[Data]:
    """Yield a row for each set of ranks of one stage with equal figures."""
    same = cluster.same_ranks()
    marked = {
        rank: {by: {name: _page_mark(of, [rank], by) for name, of in marks.items()} for by in BY}
        for rank in values
    }
    sets: dict[str, list[int]] = {}
    for rank, of in values.items():
        sets.setdefault(repr((cluster.stage(rank), of, marked[rank])), []).append(rank)
    for sources in sets.values():
        first = sources[0]
        ranks = sorted(rank for source in sources for rank in same[source])
        yield {
            "ranks": ranks,
            "text": ranks_text(ranks),
            "stage": cluster.stage(first),
            "at": _coordinates(cluster, ranks),
            "values": {by: values[first][by] for by in shown},
            "marks": {by: marked[first][by] for by in shown},
        }


def _coordinates(cluster: ClusterProfile, ranks: Iterable[int]) -> dict[str, str]:
    """Return the positions of some ranks in each mesh dimension."""
    found: dict[str, set[int]] = {}
    for rank in ranks:
        for dim, position in cluster.coordinates(rank).items():
            found.setdefault(dim, set()).add(position)
    return {dim: ranks_text(positions) for dim, positions in found.items()}


def _positions(
    cluster: ClusterProfile,
    values: Values,
    shown: list[By],
    marks: Mapping[str, Marks],
    dim: str,
) -> Iterator[Data]:
    """Yield a row for each set of positions of a mesh dimension with equal extremes."""
    at: dict[int, dict[int, list[int]]] = {}
    for source, ranks in cluster.same_ranks().items():
        for rank in ranks:
            position = cluster.coordinates(rank).get(dim)
            if position is not None:
                at.setdefault(position, {}).setdefault(source, []).append(rank)
    rows: dict[str, tuple[list[int], Data]] = {}
    for position, same in sorted(at.items()):
        spreads = _spreads(values, same, shown, marks)
        extremes = repr([[_extremes(s) for s in of.values()] for of in spreads.values()])
        rows.setdefault(extremes, ([], spreads))[0].append(position)
    for positions, spreads in rows.values():
        yield {"first": positions[0], "text": ranks_text(positions), "spreads": spreads}


def _extremes(spread: Data | None) -> object:
    return None if spread is None else (spread["minimum"], spread["maximum"], spread["mark"])


def _groups(cluster: ClusterProfile, phase: Phase | None) -> Iterator[Data]:
    for part in traffic_by_group(cluster, phase):
        yield {
            "group": part.label,
            "size": part.size,
            "kind": part.kind,
            "payload": spread_data(part.payload),
            "calls": part.total.calls,
            "bus": part.total.bus_bytes,
        }
