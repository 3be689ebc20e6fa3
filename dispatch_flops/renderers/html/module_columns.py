"""Modules as the page stores them: columns with one entry per row of the tree, parents first.

Costs have a column for each *view*: all phases together (``"all"``) and, if several ran, each
phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch_flops.analysis.communication import inclusive_communication
from dispatch_flops.analysis.figures import Figures, tree_figures, walk_with_depth
from dispatch_flops.analysis.latency import inexact_latencies, inexact_phases, whole_latencies
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import ModuleNode, Profile, sum_known
from dispatch_flops.profile.cost import ALL_PHASES, Phase
from dispatch_flops.profile.seconds import timed_phase
from dispatch_flops.renderers.memory_table import held_names
from dispatch_flops.renderers.overview.rows import Row, module_rows, output_text
from dispatch_flops.units import mean

Data = dict[str, Any]


def module_columns(profile: Profile, roots: Sequence[ModuleNode]) -> Data:
    """Return ``{name: column}`` with a row for every module below the roots.

    "parent" is the index of the row's parent, -1 for a root. "name" is the name below the parent,
    and "modules" the number of modules that the row stands for.
    """
    return _Columns(profile, roots).of([row for root in roots for row in _rows(root)])


def folded_columns(profile: Profile, roots: Sequence[ModuleNode]) -> Data | None:
    """Return the columns of the printout's rows; None where no siblings are identical.

    A run of identical siblings has a row with their sum, and below it a row "each", whose figures
    and those below are of one of them.
    """
    rows = [row for root in roots for row in module_rows(root)]
    if not any(row.is_run for row in rows):
        return None
    return _Columns(profile, roots).of(rows)


def _rows(root: ModuleNode) -> Iterator[Row]:
    figures = tree_figures(root, None)
    for node, level in walk_with_depth(root):
        yield Row(
            level=level,
            label=node.name,
            class_name=node.class_name,
            node=node,
            figures=figures[node.fqn],
            fqns=(node.fqn,),
        )


@dataclass(frozen=True, slots=True)
class _View:
    """Figures and latencies of every module in one phase or in all, by fqn."""

    figures: Mapping[str, Figures]
    seconds: Mapping[str, float | None]

    def latency_s(self, row: Row) -> float | None:
        seconds = sum_known(self.seconds[fqn] for fqn in row.fqns)
        return None if seconds is None else seconds / row.copies


class _Columns:
    def __init__(self, profile: Profile, roots: Sequence[ModuleNode]) -> None:
        self._profile = profile
        self._views = dict(_views(profile, roots))
        self._inexact = dict(_inexact(profile, roots))
        self._sent = inclusive_communication(profile)
        self._memory = {
            node.fqn: node.memory for node in profile.nodes() if node.memory is not None
        }
        self._held_names = held_names(profile)

    def of(self, rows: Sequence[Row]) -> Data:
        return {
            "fqn": [row.node.fqn for row in rows],
            "name": [row.label for row in rows],
            "class_name": [row.class_name for row in rows],
            "extra_repr": [row.node.extra_repr for row in rows],
            "output": [output_text(row) for row in rows],
            "parent": list(_parents(row.level for row in rows)),
            "modules": [row.figures.modules for row in rows],
            "calls": [row.calls for row in rows],
            "params": [row.figures.params for row in rows],
            "payload": [self._payload(row) for row in rows] if self._sent else None,
            "held": self._held(rows),
            "peak": [self._peak(row) for row in rows] if self._memory else None,
            "macs": self._costs(rows, "macs"),
            "flops": self._costs(rows, "flops"),
            "bytes": self._costs(rows, "bytes_total"),
            "latency": {
                name: [view.latency_s(row) for row in rows] for name, view in self._views.items()
            },
            "lower_bound": {
                name: [i for i, row in enumerate(rows) if view.figures[row.node.fqn].lower_bound]
                for name, view in self._views.items()
            },
            "inexact": {
                name: [i for i, row in enumerate(rows) if not fqns.isdisjoint(row.fqns)]
                for name, fqns in self._inexact.items()
            },
        }

    def _costs(self, rows: Sequence[Row], figure: str) -> dict[str, list[int]]:
        return {
            name: [
                getattr(view.figures[row.node.fqn].cost, figure) * row.figures.modules
                for row in rows
            ]
            for name, view in self._views.items()
        }

    def _payload(self, row: Row) -> float | None:
        known = [self._sent[fqn].payload_bytes for fqn in row.fqns if fqn in self._sent]
        return mean(sum(known), row.copies) if known else None

    def _held(self, rows: Sequence[Row]) -> dict[str, list[float]] | None:
        """Return bytes by what they are; those of a row are of all modules it stands for."""
        if not self._memory:
            return None
        found = [[self._memory[f].total for f in row.fqns if f in self._memory] for row in rows]
        return {
            name: [
                mean(sum(getattr(held, name) for held in parts), row.copies)
                for row, parts in zip(rows, found, strict=True)
            ]
            for name in self._held_names
        }

    def _peak(self, row: Row) -> int | None:
        known = [self._memory[fqn].peak_bytes for fqn in row.fqns if fqn in self._memory]
        return max((count for peaks in known for count in peaks.values()), default=None)


def _views(profile: Profile, roots: Sequence[ModuleNode]) -> Iterator[tuple[str, _View]]:
    """Yield each view; if only one phase ran, ``"all"`` is the only one."""
    whole = {fqn: s for root in roots for fqn, s in whole_latencies(root).items()}
    yield ALL_PHASES, _View(_figures(roots, None), whole)
    phases = phases_of(profile)
    for phase in phases if len(phases) > 1 else ():
        figures = _figures(roots, phase)
        yield phase, _View(figures, {fqn: each.latency_s for fqn, each in figures.items()})


def _figures(roots: Sequence[ModuleNode], phase: Phase | None) -> dict[str, Figures]:
    return {fqn: each for root in roots for fqn, each in tree_figures(root, phase).items()}


def _inexact(profile: Profile, roots: Sequence[ModuleNode]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield each view and the modules whose latency in it may be off by more than 10 %.

    Only the forward pass tells its modules apart; a module's latency in another phase is as
    inexact as the phase's.
    """
    phases, doubtful = phases_of(profile), inexact_phases(profile)
    every = frozenset(node.fqn for root in roots for node in root.walk())
    forward = frozenset().union(*(inexact_latencies(root, profile.timing) for root in roots))
    of = {
        phase: forward if phase == "forward" else every if timed_phase(phase) in doubtful else ()
        for phase in phases
    }
    yield ALL_PHASES, frozenset().union(*of.values())
    if len(phases) > 1:
        yield from ((phase, frozenset(fqns)) for phase, fqns in of.items())


def _parents(levels: Iterable[int]) -> Iterator[int]:
    above: list[int] = []
    for index, level in enumerate(levels):
        del above[level:]
        yield above[-1] if above else -1
        above.append(index)
