"""Points of a roofline plot: modules and operators against the limits of a machine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from dispatch_flops.analysis.efficiency import roofline
from dispatch_flops.analysis.figures import exclusive
from dispatch_flops.analysis.machines import Machine, check_machine
from dispatch_flops.profile import ModuleNode, OpTotal, Profile, merge_ops
from dispatch_flops.units import ratio

MOST_POINTS = 300  # of each kind: as many as a plot shows clearly and a browser draws at once

Data = dict[str, Any]


def roofline_data(profile: Profile, machine: Machine | None) -> Data | None:
    """Return roofs and points as plain data; None where the machine's bandwidth is not known.

    A point of a module is of its own operators in forward, without its children's, so that no
    work is shown twice. A point of an operator is of all its calls with one dtype. "lower_bound"
    is true of a point where some of its calls have no known cost.

    Example::

        data = roofline_data(profile, MACHINES["NVIDIA H200"])
        for point in data["modules"]:  # for a plot of your own
            print(point["name"], point["intensity"], point["attainable"])
    """
    check_machine(machine)
    if machine is None or machine.bytes_per_s is None:
        return None
    ops = list(profile.op_totals())
    dtypes = dict.fromkeys(op.dtype for op in ops if op.cost is not None and op.cost.flops)
    peaks = {dtype: machine.peak(dtype) for dtype in dtypes if dtype is not None}
    modules, operators = _modules(profile.root, machine), _operators(ops, machine)
    return {
        "machine": machine.name,
        "bytes_per_s": machine.bytes_per_s,
        "peaks": {dtype: peak for dtype, peak in peaks.items() if peak is not None},
        "no_peak": [dtype for dtype, peak in peaks.items() if peak is None],
        "modules": _heaviest(modules),
        "modules_left_out": max(0, len(modules) - MOST_POINTS),
        "operators": _heaviest(operators),
    }


def _modules(root: ModuleNode, machine: Machine) -> list[Data]:
    figures = exclusive(root, "forward")
    points = []
    for node in root.walk():
        own = [op for op in node.ops if op.phase == "forward"]
        name = node.fqn or node.class_name
        points += _point(name, node.class_name, own, machine, figures[node.fqn].latency_s)
    return points


def _operators(ops: Iterable[OpTotal], machine: Machine) -> list[Data]:
    groups: dict[tuple[str, str | None], list[OpTotal]] = {}
    for op in ops:
        groups.setdefault((op.op, op.dtype), []).append(op)
    points = []
    for (name, dtype), group in groups.items():
        seconds = reduce(merge_ops, group).latency_s
        points += _point(name, dtype or "", group, machine, seconds)
    return points


def _point(
    name: str, about: str, ops: list[OpTotal], machine: Machine, seconds: float | None
) -> list[Data]:
    """Return one point in a list, which is empty where nothing is known to place it by."""
    limit = roofline(ops, machine, seconds)
    if not limit.cost.flops or limit.arithmetic_intensity is None:
        return []
    return [
        {
            "name": name,
            "about": about,
            "flops": limit.cost.flops,
            "bytes": limit.cost.bytes_total,
            "intensity": limit.arithmetic_intensity,
            "attainable": limit.attainable_flops_per_s,
            "achieved": ratio(limit.cost.flops, seconds),
            "bound": limit.bound,
            "lower_bound": any(op.uncounted for op in ops),
        }
    ]


def _heaviest(points: list[Data]) -> list[Data]:
    return sorted(points, key=lambda point: -point["flops"])[:MOST_POINTS]
