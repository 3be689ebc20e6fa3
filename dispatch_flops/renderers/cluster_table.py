"""Tables of a cluster, plain or Markdown: figures over ranks, ranks, mesh dimensions, modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dispatch_flops.analysis.cluster_communication import GroupTraffic, traffic_by_group
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.cost import in_order
from dispatch_flops.profile.mesh_positions import named_ranks, ranks_text
from dispatch_flops.profile.rank_figures import BY, By, Spread
from dispatch_flops.renderers.cluster_marks import LOWER_BOUND, Marks, modules_of_unknown_cost
from dispatch_flops.renderers.communication import group_text
from dispatch_flops.renderers.text import Style, alignment, code, one_line, table
from dispatch_flops.renderers.view import View
from dispatch_flops.units import (
    NOT_AVAILABLE,
    bytes_text,
    flops_text,
    macs_text,
    number_text,
    params_text,
    seconds_text,
)

__all__ = ["render"]

FIGURES: dict[By, tuple[str, Callable[[float | None], str]]] = {
    "macs": ("MACs", macs_text),
    "flops": ("FLOPs", flops_text),
    "bytes": ("Bytes", bytes_text),
    "communication": ("Communication", bytes_text),
    "memory": ("Peak memory", bytes_text),
    "time": ("Time", seconds_text),
    "params": ("Params", params_text),
}
_MOST_ROWS = 200  # of ranks or of modules; a saved cluster has all


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A table with its title. texts: number of columns on the left that hold text."""

    title: str
    header: tuple[str, ...]
    rows: list[list[str]]
    texts: int = 1
    names: int | None = None  # the column that holds names of the user's code


def render(cluster: ClusterProfile, view: View | None = None) -> str:
    """Return the figures of all ranks, of each group of equal ranks, and of each module.

    Ranks with equal figures share a row. Modules are keyed by pipeline stage and fqn.

    view: ``depth`` of modules, ``style`` and ``phase``.

        print(cluster_table.render(cluster, View(depth=1)))
    """
    view = view or View()
    parts = ["\n".join((*heading(cluster), *(f"- {text}" for text in memory_texts(cluster))))]
    parts += [section_text(section, view.style) for section in sections(cluster, view)]
    return "\n\n".join(parts)


def section_text(section: Section, style: Style) -> str:
    """Return the title and the table of a section."""
    rows = [
        [code(cell, style) if i == section.names else cell for i, cell in enumerate(row)]
        for row in section.rows
    ]
    align = alignment(len(section.header), left=section.texts)
    title = f"## {section.title}" if style == "markdown" else section.title
    return f"{title}\n\n{table(section.header, rows, align, style)}"


def heading(cluster: ClusterProfile) -> Iterator[str]:
    """Yield what the tables are of: number of ranks, mesh, missing ranks and notes."""
    yield ranks_line(cluster)
    for text in (missing_text(cluster), *notes_of(cluster), lower_bound_text(cluster)):
        if text:
            yield f"- {one_line(text)}"


def ranks_line(cluster: ClusterProfile) -> str:
    """Return how many ranks are known, how many were simulated, and the mesh."""
    mesh = " x ".join(f"{name} {size}" for name, size in (cluster.mesh or {}).items())
    return (
        f"{len(cluster.ranks)} of {cluster.world_size} ranks"
        f"{f', {len(cluster.profiles)} simulated' if cluster.represented else ''}"
        f"{f', mesh {one_line(mesh)}' if mesh else ''}"
    )


def missing_text(cluster: ClusterProfile) -> str:
    """Return which ranks are missing; "" for none."""
    if not cluster.missing:
        return ""
    return f"Missing: {named_ranks(cluster.missing)}; totals are of the other ranks"


def lower_bound_text(cluster: ClusterProfile) -> str:
    """Return on which ranks operators without a known cost ran; "" for none."""
    lower = [rank for rank, profile in cluster.ranks.items() if profile.is_lower_bound]
    if not lower:
        return ""
    return f"Lower bound: operators without a known cost ran on {named_ranks(lower)}"


def memory_texts(cluster: ClusterProfile) -> Iterator[str]:
    """Yield on which ranks the peak of memory is not exact."""
    followed = {rank: p.memory for rank, p in cluster.ranks.items() if p.memory is not None}
    for text, ranks in (
        ("a lower bound", [rank for rank, memory in followed.items() if memory.is_lower_bound]),
        ("approximate", [rank for rank, memory in followed.items() if memory.is_approximate]),
    ):
        if ranks:
            yield f"Peak memory is {text} on {named_ranks(ranks)}"


def notes_of(cluster: ClusterProfile) -> list[str]:
    """Return the notes of the cluster and of its ranks, each once."""
    return list(dict.fromkeys((*cluster.notes, *_notes_of_ranks(cluster))))


def sections(cluster: ClusterProfile, view: View) -> Iterator[Section]:
    """Yield the tables of a cluster."""
    phase = view.phase
    spreads = {by: spread for by in BY if (spread := cluster.spread(by, phase)) is not None}
    marks = Marks(cluster, phase)
    yield Section(
        title=f"Over ranks, {phase or 'all phases'}",
        header=("Figure", "Minimum", "Maximum", "Max / mean", "Straggler", "All ranks"),
        rows=[
            *(_spread_row(by, s, marks.of(cluster.ranks, by)) for by, s in spreads.items()),
            *(_phase_rows(cluster) if phase is None else ()),
        ],
    )
    shown = tuple(by for by, spread in spreads.items() if spread.maximum)
    yield _ranks(cluster, view, shown, marks)
    for dim, size in (cluster.mesh or {}).items():
        if size > 1:
            yield _along(cluster, view, dim, tuple(by for by in shown if by != "macs"), marks)
    if traffic := traffic_by_group(cluster, phase):
        yield groups_section(traffic)
    yield _modules(cluster, view)


def _phase_rows(cluster: ClusterProfile) -> Iterator[list[str]]:
    """Yield the FLOPs of each phase, where there are several."""
    known = in_order(phase for p in cluster.profiles.values() for phase in phases_of(p))
    for phase in known if len(known) > 1 else ():
        if (spread := cluster.spread("flops", phase)) is not None:
            mark = Marks(cluster, phase).of(cluster.ranks, "flops")
            yield _spread_row("flops", spread, mark, f"FLOPs, {one_line(phase)}")


def _text(by: By, value: float | None, mark: str) -> str:
    text = FIGURES[by][1](value)
    return text if value is None else f"{mark}{text}"


def _spread_row(by: By, spread: Spread, mark: str, label: str | None = None) -> list[str]:
    name = FIGURES[by][0]
    return [
        label or name,
        _text(by, spread.minimum, mark),
        _text(by, spread.maximum, mark),
        number_text(spread.imbalance),
        _straggler_text(spread),
        # Replicas hold the same parameters, and ranks run at once.
        "-" if by in ("params", "time") else _text(by, spread.total, mark),
    ]


def _ranks(cluster: ClusterProfile, view: View, shown: tuple[By, ...], marks: Marks) -> Section:
    """Return a row for each set of ranks of one stage with equal figures."""
    same: dict[tuple[int | None, tuple[tuple[float | None, str], ...]], list[int]] = {}
    for rank in cluster.ranks:
        values = tuple((cluster.value(rank, by, view.phase), marks.of([rank], by)) for by in shown)
        same.setdefault((cluster.stage(rank), values), []).append(rank)
    has_stages = any(stage is not None for stage, _ in same)
    rows = [
        [
            ranks_text(ranks),
            *([str(stage)] if has_stages else []),
            *(_text(by, *value) for by, value in zip(shown, values, strict=True)),
        ]
        for (stage, values), ranks in same.items()
    ]
    stages = ("Stage",) if has_stages else ()
    header = ("Rank", *stages, *(FIGURES[by][0] for by in shown))
    return Section(title="Ranks", header=header, rows=first_rows(rows))


def _along(
    cluster: ClusterProfile, view: View, dim: str, shown: tuple[By, ...], marks: Marks
) -> Section:
    """Return a row for each set of positions of a mesh dimension with equal extremes."""
    same: dict[tuple[str, ...], list[int]] = {}
    for position, part in cluster.along(dim).items():
        cells = tuple(
            _range_text(by, part.spread(by, view.phase), marks.of(part.ranks, by)) for by in shown
        )
        same.setdefault(cells, []).append(position)
    return Section(
        title=f"Along {one_line(dim)}, of one rank",
        header=(one_line(dim), *(FIGURES[by][0] for by in shown)),
        rows=first_rows([[ranks_text(positions), *cells] for cells, positions in same.items()]),
    )


def groups_section(traffic: list[GroupTraffic]) -> Section:
    """Return a row for each kind of communication in the groups of each mesh dimension."""
    rows = [
        [
            group_text(part.label, part.size),
            part.kind,
            _range_text("communication", part.payload),
            number_text(part.payload.imbalance),
            _straggler_text(part.payload),
            bytes_text(part.total.payload_bytes),
            bytes_text(part.total.bus_bytes),
        ]
        for part in traffic
    ]
    header = ("Group", "Kind", "Of one rank", "Max / mean", "Straggler", "All ranks", "On the bus")
    return Section(title="Communication by group", header=header, rows=first_rows(rows), texts=2)


def _straggler_text(spread: Spread) -> str:
    return "-" if spread.minimum == spread.maximum else f"rank {spread.straggler}"


def _range_text(by: By, spread: Spread | None, mark: str = "") -> str:
    if spread is None:
        return NOT_AVAILABLE
    least, most = _text(by, spread.minimum, mark), _text(by, spread.maximum, mark)
    return least if least == most else f"{least} to {most}"


def _modules(cluster: ClusterProfile, view: View) -> Section:
    spreads = cluster.by_module("flops", view.phase)
    sent = cluster.by_module("communication", view.phase)
    bounds = modules_of_unknown_cost(cluster, view.phase)
    has_stages = any(stage is not None for stage, _ in spreads)
    rows = [
        [
            *([str(stage)] if has_stages else []),
            fqn or "(model)",
            ranks_text([spread.straggler]) if spread.minimum != spread.maximum else "-",
            _range_text("flops", spread, LOWER_BOUND if (stage, fqn) in bounds else ""),
            _range_text("communication", sent.get((stage, fqn))),
        ]
        for (stage, fqn), spread in sorted(spreads.items(), key=lambda item: item[0][0] or 0)
        if view.depth is None or level_of(fqn) <= view.depth
    ]
    stages = ("Stage",) if has_stages else ()
    return Section(
        title="Modules, of one rank",
        header=(*stages, "Module", "Straggler", "FLOPs", "Own communication"),
        rows=first_rows(rows),
        texts=len(stages) + 2,
        names=len(stages),
    )


def level_of(fqn: str) -> int:
    """Return the level of a module in the tree; the model is level 0."""
    return fqn.count(".") + 1 if fqn else 0


def first_rows(rows: list[list[str]]) -> list[list[str]]:
    """Return the rows that are shown, and one that says how many more there are."""
    if len(rows) <= _MOST_ROWS:
        return rows
    more = [f"and {len(rows) - _MOST_ROWS} more", *[""] * (len(rows[0]) - 1)]
    return [*rows[:_MOST_ROWS], more]


def _notes_of_ranks(cluster: ClusterProfile) -> Iterator[str]:
    for rank, profile in cluster.profiles.items():
        for note in profile.notes:
            same = all(note in other.notes for other in cluster.profiles.values())
            yield note if same else f"rank {rank}: {note}"
