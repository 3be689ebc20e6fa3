"""Pure functions of a ``Profile`` (and of a ``Machine``); standard library only.

- Modules: ``inclusive``, ``exclusive``, ``by_depth``, ``by_type``, ``top_modules``, ``fold``.
- Operators: ``operator_rows``, ``cost_by_dtype``, ``phases_of``.
- Totals: ``headline``, ``total_figures``, and ``diff`` of two profiles.
- Latency: ``latency_of``, ``whole_latencies``, ``phase_seconds``, ``measured_seconds``,
  ``inexact_latencies``, ``inexact_phases``.
- Machines: ``MACHINES``, ``mfu``, ``hfu``, ``mfu_is_lower_bound``, ``hfu_is_lower_bound``,
  ``why_no_utilisation``, ``roofline``, ``node_roofline``, ``roofline_data``.
- Scaling over sizes: ``exponent`` of one curve, ``exponents`` of a grid of runs.

What these arguments are is the same in every function:

profile: a ``Profile``.
root: a ``ModuleNode`` that is taken with all modules below it, such as ``profile.root``.
node: a ``ModuleNode``, such as ``profile.node("encoder.layer.0")``.
ops: operators, such as ``profile.op_totals()``.
phase: "forward", "backward", "recompute", "optimizer" or "setup"; None for all together. The
    default is None, in ``latency_of`` and ``node_roofline`` "forward". Another name raises
    ConfigError.
machine: a ``Machine``, such as ``MACHINES["NVIDIA H200"]``; None where its peaks are not known.
    Anything else, such as a name, raises ConfigError.
"""

from dispatch_flops.analysis.diff import Change, Diff, diff
from dispatch_flops.analysis.efficiency import (
    Roofline,
    compute_s,
    hfu,
    hfu_is_lower_bound,
    machine_of,
    mfu,
    mfu_is_lower_bound,
    node_roofline,
    roofline,
    utilisation,
    why_no_utilisation,
)
from dispatch_flops.analysis.figures import (
    Figures,
    Key,
    by_depth,
    by_type,
    exclusive,
    inclusive,
    top,
    top_modules,
    total_figures,
    walk_with_depth,
)
from dispatch_flops.analysis.folding import fold
from dispatch_flops.analysis.headline import Headline, headline
from dispatch_flops.analysis.latency import (
    inexact_latencies,
    inexact_phases,
    latency_of,
    measured_seconds,
    phase_seconds,
    whole_latencies,
)
from dispatch_flops.analysis.machines import MACHINES, Machine
from dispatch_flops.analysis.operators import OperatorRow, cost_by_dtype, operator_rows, phases_of
from dispatch_flops.analysis.roofline_points import roofline_data
from dispatch_flops.analysis.scaling import Exponent, exponent, exponents
from dispatch_flops.profile import sum_known

__all__ = [
    "MACHINES",
    "Change",
    "Diff",
    "Exponent",
    "Figures",
    "Headline",
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
    "exponent",
    "exponents",
    "fold",
    "headline",
    "hfu",
    "hfu_is_lower_bound",
    "inclusive",
    "inexact_latencies",
    "inexact_phases",
    "latency_of",
    "machine_of",
    "measured_seconds",
    "mfu",
    "mfu_is_lower_bound",
    "node_roofline",
    "operator_rows",
    "phase_seconds",
    "phases_of",
    "roofline",
    "roofline_data",
    "sum_known",
    "top",
    "top_modules",
    "total_figures",
    "utilisation",
    "walk_with_depth",
    "whole_latencies",
    "why_no_utilisation",
]
