"""How far a run is from what its machine can do: rates, MFU, HFU and the roofline.

Pure functions of a ``Profile`` and a ``Machine``. Work in several dtypes is held against
several peaks: the least time that the peaks allow is the sum of ``flops / peak`` over dtypes,
and a utilisation is that time over the time taken. In one dtype this is the usual
``flops / (seconds * peak)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dispatch_flops.cost import MODEL_PHASES, PHASES, ZERO, OpCost, Phase
from dispatch_flops.hardware import Machine
from dispatch_flops.tree import ModuleNode, OpTotal, Profile

Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What the machine allows for some work; None where a peak or the bandwidth is not known.

    attainable_s: least seconds, operator by operator the longer of computing and moving bytes.
    attainable_flops_per_s: FLOPs over that. bound: what takes the larger part of it.
    exceeds_peak: the time that was measured is shorter than the peak allows, so a count, a time
        or the peak is wrong.
    """

    cost: OpCost
    arithmetic_intensity: float | None
    attainable_s: float | None
    attainable_flops_per_s: float | None
    bound: Bound | None
    exceeds_peak: bool = False


def mfu(profile: Profile, machine: Machine | None, seconds: float | None) -> float | None:
    """Model FLOPs utilisation: forward and backward of everything that ran, over ``seconds``."""
    return utilisation(profile.op_totals(), MODEL_PHASES, machine, seconds)


def hfu(profile: Profile, machine: Machine | None, seconds: float | None) -> float | None:
    """Hardware FLOPs utilisation: all phases, recomputation and optimizer included."""
    return utilisation(profile.op_totals(), PHASES, machine, seconds)


def utilisation(
    ops: Iterable[OpTotal],
    phases: Iterable[Phase],
    machine: Machine | None,
    seconds: float | None,
) -> float | None:
    """Least seconds at the dense peaks over seconds taken; None if a peak or the time is unknown.

    A value above 1 is returned as it is: it says that a count, the time or the peak is wrong.
    """
    wanted = frozenset(phases)
    least = compute_s((op for op in ops if op.phase in wanted), machine)
    if least is None or not seconds:
        return None
    return least / seconds


def compute_s(ops: Iterable[OpTotal], machine: Machine | None) -> float | None:
    """Seconds that the FLOPs of ``ops`` take at the dense peaks; None if one is not known."""
    total = 0.0
    for op in ops:
        if op.cost is None or not op.cost.flops:
            continue
        peak = machine.peak(op.dtype) if machine is not None else None
        if peak is None:
            return None
        total += op.cost.flops / peak
    return total


def roofline(
    ops: Iterable[OpTotal], machine: Machine | None, seconds: float | None = None
) -> Roofline:
    """The roofline of some operators' work, and whether ``seconds`` is less than it allows."""
    cost, computing, moving, attainable = ZERO, 0.0, 0.0, 0.0
    known = machine is not None and machine.bytes_per_s is not None
    for op in ops:
        if op.cost is None:
            continue
        cost = cost + op.cost
        if machine is None or machine.bytes_per_s is None:
            continue
        peak = machine.peak(op.dtype)
        if op.cost.flops and peak is None:
            known = False
            continue
        compute = op.cost.flops / peak if peak is not None else 0.0
        move = op.cost.bytes_total / machine.bytes_per_s
        computing += compute if compute >= move else 0.0
        moving += move if move > compute else 0.0
        attainable += max(compute, move)
    bound: Bound = "compute" if computing >= moving else "memory"
    worked = known and attainable > 0
    return Roofline(
        cost=cost,
        arithmetic_intensity=cost.arithmetic_intensity,
        attainable_s=attainable if known else None,
        attainable_flops_per_s=cost.flops / attainable if worked else None,
        bound=bound if worked else None,
        exceeds_peak=_exceeds(ops_s=computing, seconds=seconds) if known else False,
    )


def node_roofline(node: ModuleNode, machine: Machine | None, phase: Phase = "forward") -> Roofline:
    """The roofline of a module and all below it, in one phase."""
    ops = (op for below in node.walk() for op in below.ops if op.phase == phase)
    return roofline(ops, machine, node.latency_s if phase == "forward" else None)


def flops_per_s(cost: OpCost, seconds: float | None) -> float | None:
    """Achieved FLOP/s; None without a time."""
    return cost.flops / seconds if seconds else None


def _exceeds(*, ops_s: float, seconds: float | None) -> bool:
    return seconds is not None and seconds < ops_s
