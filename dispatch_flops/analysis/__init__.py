"""Pure functions of a ``Profile`` (and of a ``Machine``); standard library only."""

from dispatch_flops.analysis.diff import Change, Diff, diff
from dispatch_flops.analysis.efficiency import (
    Roofline,
    compute_s,
    hfu,
    machine_of,
    mfu,
    node_roofline,
    roofline,
    utilisation,
)
from dispatch_flops.analysis.figures import (
    Figures,
    Key,
    by_depth,
    by_type,
    exclusive,
    inclusive,
    sum_known,
    top,
    top_modules,
    walk_with_depth,
)
from dispatch_flops.analysis.latency import (
    inexact_latencies,
    latency_of,
    measured_seconds,
    phase_seconds,
)
from dispatch_flops.analysis.machines import MACHINES, Machine
from dispatch_flops.analysis.operators import OperatorRow, cost_by_dtype, operator_rows, phases_of

__all__ = [
    "MACHINES",
    "Change",
    "Diff",
    "Figures",
    "Key",
    "Machine",
    "OperatorRow",
    "Roofline",
    "by_depth",
    "by_type",
    "compute_s",
    "cost_by_dtype",
    "diff",
    "exclusive",
    "hfu",
    "inclusive",
    "inexact_latencies",
    "latency_of",
    "machine_of",
    "measured_seconds",
    "mfu",
    "node_roofline",
    "operator_rows",
    "phase_seconds",
    "phases_of",
    "roofline",
    "sum_known",
    "top",
    "top_modules",
    "utilisation",
    "walk_with_depth",
]
