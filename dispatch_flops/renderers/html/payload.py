"""The data that the page shows; every number comes from the analysis of the profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from dispatch_flops.analysis.figures import by_type, total_figures
from dispatch_flops.analysis.headline import headline
from dispatch_flops.analysis.latency import inexact_phases, phase_seconds
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.operators import OperatorRow, operator_rows, phases_of
from dispatch_flops.analysis.roofline_points import roofline_data
from dispatch_flops.profile import CommTotal, ModuleNode, Profile
from dispatch_flops.profile.cost import ALL_PHASES, Phase
from dispatch_flops.renderers.communication import group_text
from dispatch_flops.renderers.explanations import attention_counting
from dispatch_flops.renderers.html.memory_data import memory_data
from dispatch_flops.renderers.html.module_columns import folded_columns, module_columns
from dispatch_flops.renderers.overview.headline_lines import run_lines, step_text
from dispatch_flops.renderers.run_facts import run_facts
from dispatch_flops.renderers.table import uncounted_rows
from dispatch_flops.units import bytes_text, flops_per_s_text

_MOST_COLOURS = 8
_PARTS_WORTH_A_COLOUR = 200  # one part in 200 of all FLOPs or all parameters

Data = dict[str, Any]


def payload(profile: Profile, machine: Machine | None, title: str) -> Data:
    """Return the page's data, as values that JSON represents exactly."""
    phases = phases_of(profile)
    roots = [profile.root, *([profile.outside] if _ran(profile.outside) else [])]
    top = headline(profile, machine)
    return {
        "title": title,
        "headline": dataclasses.asdict(top) | {"warning": top.warning},
        "views": [ALL_PHASES, *phases] if len(phases) > 1 else [ALL_PHASES],
        "phases": list(phases),
        "split": [_phase(profile, phase) for phase in phases],
        "uncounted": [
            {"op": op, "calls": calls, "why": why} for op, calls, why in uncounted_rows(profile)
        ],
        "run": [list(line) for line in _run(profile, machine)],
        "facts": [list(fact) for fact in _facts(profile, machine)],
        "notes": list(profile.notes),
        "classes": _classes(profile),
        "modules": module_columns(profile, roots),
        "folded": folded_columns(profile, roots),
        "memory": memory_data(profile, machine),
        "communication": [_communication(profile, total) for total in profile.communication],
        "operators": [_operator(row) for row in operator_rows(profile)],
        "roofline": roofline_data(profile, machine),
    }


def _communication(profile: Profile, total: CommTotal) -> Data:
    return {
        "module": total.fqn or profile.root.class_name,
        "phase": total.phase,
        "kind": total.kind,
        "group": group_text(total.group.label, total.group.size),
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


def _run(profile: Profile, machine: Machine | None) -> Iterator[tuple[str, str]]:
    """Yield what stands at the top of the page: the printout's lines, and the machine's peaks."""
    if step := step_text(profile):
        yield "Step", step
    yield from run_lines(profile)
    if machine is not None:
        dtypes = dict.fromkeys(op.dtype for op in profile.op_totals())
        peaks = {dtype: machine.peak(dtype) for dtype in dtypes}
        limits = [f"{flops_per_s_text(peak)} {dtype}" for dtype, peak in peaks.items() if peak]
        if machine.bytes_per_s is not None:
            limits.append(f"{bytes_text(machine.bytes_per_s)}/s")
        yield "Machine", ", ".join([machine.name, *limits])


def _facts(profile: Profile, machine: Machine | None) -> Iterator[tuple[str, str]]:
    """Yield labels and values of where and how the run took place."""
    run, timing = profile.run, profile.timing
    yield "Device", f"{run.device_name} ({run.device})" if run.device_name else run.device
    if run.torch_version and not run.python_version:  # else it is among the versions
        yield "torch", run.torch_version
    if run.world_size:
        yield "Rank", f"{run.rank} of {run.world_size}: all numbers are of this rank"
    yield from run_facts(run)
    yield "Attention", attention_counting(run)
    if timing.method:
        yield "Latency", timing.method
    if timing.repeats > 1:
        yield "Runs", str(timing.repeats)
    if machine is not None:
        yield "Peaks from", f"{machine.name}: {machine.source}" if machine.source else machine.name
