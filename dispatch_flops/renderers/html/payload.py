"""The data that the page shows; every number comes from the analysis of the profile.

Modules are stored as columns, with one entry per module, parents first. Costs have a column for
each *view*: all phases together (``"all"``) and, if several ran, each phase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dispatch_flops.analysis.figures import (
    Figures,
    by_type,
    total_figures,
    tree_figures,
    walk_with_depth,
)
from dispatch_flops.analysis.folding import fold
from dispatch_flops.analysis.headline import headline
from dispatch_flops.analysis.latency import (
    inexact_latencies,
    inexact_phases,
    phase_seconds,
    whole_latencies,
)
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.operators import OperatorRow, operator_rows, phases_of
from dispatch_flops.analysis.roofline_points import roofline_data
from dispatch_flops.profile import CommTotal, ModuleNode, Profile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.seconds import timed_phase
from dispatch_flops.renderers.communication import group_text
from dispatch_flops.renderers.explanations import attention_counting
from dispatch_flops.renderers.run_facts import run_facts
from dispatch_flops.renderers.table import uncounted_rows

ALL = "all"
_MOST_COLOURS = 8
_PARTS_WORTH_A_COLOUR = 200  # one part in 200 of all FLOPs or all parameters

Data = dict[str, Any]


def payload(profile: Profile, machine: Machine | None, title: str) -> Data:
    """Return the page's data, as values that JSON represents exactly."""
    phases = phases_of(profile)
    roots = [profile.root, *([profile.outside] if _ran(profile.outside) else [])]
    folded = fold(profile.root)
    top = headline(profile, machine)
    return {
        "title": title,
        "headline": dataclasses.asdict(top) | {"warning": top.warning},
        "views": [ALL, *phases] if len(phases) > 1 else [ALL],
        "phases": list(phases),
        "split": [_phase(profile, phase) for phase in phases],
        "uncounted": [
            {"op": op, "calls": calls, "why": why} for op, calls, why in uncounted_rows(profile)
        ],
        "facts": [list(fact) for fact in _facts(profile, machine)],
        "notes": list(profile.notes),
        "classes": _classes(profile),
        "modules": _columns(profile, roots),
        "folded": _columns(profile, [folded, *roots[1:]]) if folded != profile.root else None,
        "communication": [_communication(profile, total) for total in profile.communication],
        "operators": [_operator(row) for row in operator_rows(profile)],
        "roofline": roofline_data(profile, machine),
    }


def _communication(profile: Profile, total: CommTotal) -> Data:
    return {
        "module": total.fqn or profile.root.class_name,
        "phase": total.phase,
        "kind": total.kind,
        "group": group_text(total.group),
        "dtype": total.dtype or "",
        "calls": total.calls,
        "payload": total.payload_bytes,
        "bus": total.bus_bytes,
    }


def _ran(node: ModuleNode) -> bool:
    return bool(node.ops or node.children)


def _classes(profile: Profile) -> list[str]:
    """Return the classes with a colour: those with exclusive costs, the most FLOPs first."""
    types = by_type(profile)
    flops = sum(figures.cost.flops for figures in types.values())
    params = sum(figures.params for figures in types.values())
    own = [
        name
        for name, figures in types.items()
        if _PARTS_WORTH_A_COLOUR * figures.cost.flops > flops
        or _PARTS_WORTH_A_COLOUR * figures.params > params
    ]
    return own[:_MOST_COLOURS]


# -- modules ------------------------------------------------------------------------------------


def _columns(profile: Profile, roots: Sequence[ModuleNode]) -> Data:
    """Return ``{name: column}``; "parent" is the index of the module's parent, -1 for a root."""
    nodes: list[ModuleNode] = []
    parents: list[int] = []
    above: list[int] = []
    for root in roots:
        for node, depth in walk_with_depth(root):
            del above[depth:]
            parents.append(above[-1] if above else -1)
            above.append(len(nodes))
            nodes.append(node)
    return {
        "fqn": [node.fqn for node in nodes],
        "name": [node.name for node in nodes],
        "class_name": [node.class_name for node in nodes],
        "extra_repr": [node.extra_repr for node in nodes],
        "parent": parents,
        "calls": [node.calls for node in nodes],
        "own_params": [node.own_params for node in nodes],
        "params": [node.total_params for node in nodes],
        **_costs(roots, phases_of(profile)),
        "inexact": _inexact(profile, roots),
    }


def _inexact(profile: Profile, roots: Sequence[ModuleNode]) -> dict[str, list[int]]:
    """Return ``{view: indices of modules whose latency may be off by more than 10 %}``.

    Only the forward pass tells its modules apart; a module's latency in another phase is as
    inexact as the phase's.
    """
    phases, doubtful = phases_of(profile), inexact_phases(profile)
    modules = {fqn for root in roots for fqn in inexact_latencies(root, profile.timing)}
    fqns = [node.fqn for root in roots for node in root.walk()]
    views: dict[str, list[int]] = {
        phase: [
            index
            for index, fqn in enumerate(fqns)
            if (fqn in modules if phase == "forward" else timed_phase(phase) in doubtful)
        ]
        for phase in phases
    }
    either = sorted({index for indices in views.values() for index in indices})
    return {ALL: either, **(views if len(phases) > 1 else {})}


def _costs(roots: Sequence[ModuleNode], phases: Sequence[Phase]) -> Data:
    """Return ``{figure: {view: column}}``; if only one phase ran, ``"all"`` is the only view."""
    figures: dict[str, list[Figures]] = {ALL: _figures(roots, None)}
    timed: dict[str, list[float | None]] = {
        phase: _latencies(_figures(roots, phase)) for phase in phases
    }
    latency = {ALL: [seconds for root in roots for seconds in whole_latencies(root).values()]}
    if len(phases) > 1:
        figures |= {phase: _figures(roots, phase) for phase in phases}
        latency |= {phase: timed[phase] for phase in phases}
    return {
        "macs": {view: [f.cost.macs for f in column] for view, column in figures.items()},
        "flops": {view: [f.cost.flops for f in column] for view, column in figures.items()},
        "bytes": {view: [f.cost.bytes_total for f in column] for view, column in figures.items()},
        "latency": latency,
        "lower_bound": {
            view: [index for index, f in enumerate(column) if f.lower_bound]
            for view, column in figures.items()
        },
    }


def _figures(roots: Iterable[ModuleNode], phase: Phase | None) -> list[Figures]:
    return [figures for root in roots for figures in tree_figures(root, phase).values()]


def _latencies(column: Iterable[Figures]) -> list[float | None]:
    return [figures.latency_s for figures in column]


# -- the rest -----------------------------------------------------------------------------------


def _phase(profile: Profile, phase: Phase) -> Data:
    figures = total_figures(profile, phase)
    cost = figures.cost
    return {
        "phase": phase,
        "macs": cost.macs,
        "flops": cost.flops,
        "bytes": cost.bytes_total,
        "seconds": phase_seconds(profile)[phase],
        "inexact": phase in inexact_phases(profile),
        "lower_bound": figures.lower_bound,
    }


def _operator(row: OperatorRow) -> Data:
    cost = row.cost
    return {
        "op": row.op,
        "kind": row.kind,
        "phases": " + ".join(row.phases),
        "dtype": row.dtype,
        "calls": row.calls,
        "uncounted": row.uncounted,
        "macs": cost.macs if cost else None,
        "flops": cost.flops if cost else None,
        "share": row.share,
        "bytes": cost.bytes_total if cost else None,
        "intensity": row.arithmetic_intensity,
        "latency": row.latency_s,
    }


def _facts(profile: Profile, machine: Machine | None) -> Iterator[tuple[str, str]]:
    """Yield labels and values of where and how the run took place."""
    run, timing = profile.run, profile.timing
    yield "Device", f"{run.device_name} ({run.device})" if run.device_name else run.device
    if run.torch_version and not run.python_version:  # else it is among the versions
        yield "torch", run.torch_version
    if run.world_size:
        yield "Rank", f"{run.rank} of {run.world_size}: all numbers are of this rank"
    if run.batch_size is not None:
        yield "Batch size", str(run.batch_size)
    yield from run_facts(run)
    yield "Attention", attention_counting(run)
    if timing.method:
        yield "Latency", timing.method
    if timing.repeats > 1:
        yield "Runs", str(timing.repeats)
    if machine is not None:
        yield "Peaks from", f"{machine.name}: {machine.source}" if machine.source else machine.name
