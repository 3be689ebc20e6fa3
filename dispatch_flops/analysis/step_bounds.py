"""The least time of a step on a machine: a roofline per operator, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dispatch_flops.analysis.communication_times import busiest_link_s, communication_s
from dispatch_flops.analysis.efficiency import Bound, compute_s, moving_s, roofline
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cost import MODEL_PHASES
from dispatch_flops.units import ratio

StepBound = Literal["compute", "memory", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """Least seconds of a step, by what takes them; None where a rate of the machine is unknown.

    compute_s: of all FLOPs at the peaks. memory_s: of all bytes at the memory's bandwidth.
    kernels_s: each operator takes the longer of computing and moving its bytes.
    communication_s: each collective takes the link's latency and its bus bytes at the link's rate.
    busiest_link_s: of the communication over one kind of link in one direction, the longest; None
        where that is all communication.
    operators: calls that launch a kernel. host_s_per_operator: seconds that the host takes for one.
    model_compute_s: of forward and backward, the least seconds at the peaks.
    kernels_bound: what takes the larger part of kernels_s, as in ``Roofline.bound``.

    Example::

        bounds = step_bounds(profile, MACHINES["NVIDIA H200"])
        bounds.least_s, bounds.bound, bounds.mfu_ceiling
    """

    compute_s: float | None
    memory_s: float | None
    kernels_s: float | None
    communication_s: float | None
    operators: int
    host_s_per_operator: float | None = None
    model_compute_s: float | None = None
    busiest_link_s: float | None = None
    kernels_bound: Bound | None = None

    @property
    def hidden_communication_s(self) -> float | None:
        """Seconds of communication if different links, and computing, work at the same time."""
        return self.communication_s if self.busiest_link_s is None else self.busiest_link_s

    @property
    def fused_s(self) -> float | None:
        """Seconds if fusion and caches saved all traffic: computing, or communication if longer."""
        if self.compute_s is None or self.hidden_communication_s is None:
            return None
        return max(self.compute_s, self.hidden_communication_s)

    @property
    def least_s(self) -> float | None:
        """Seconds of unfused operators with communication hidden, and no time of the host."""
        if self.kernels_s is None or self.hidden_communication_s is None:
            return None
        return max(self.kernels_s, self.hidden_communication_s)

    @property
    def serial_s(self) -> float | None:
        """Seconds with nothing hidden: kernels, then communication, then the host's own time."""
        if self.kernels_s is None or self.communication_s is None:
            return None
        host = (self.host_s_per_operator or 0.0) * self.operators
        return self.kernels_s + self.communication_s + host

    @property
    def bound(self) -> StepBound | None:
        """What takes the least time: communication, else what bounds the kernels."""
        if self.least_s is None or self.kernels_s is None:
            return None
        return "communication" if self.least_s > self.kernels_s else self.kernels_bound

    @property
    def mfu_ceiling(self) -> tuple[float | None, float | None]:
        """The highest MFU of unfused operators, and with all traffic saved."""
        return (
            ratio(self.model_compute_s, self.least_s),
            ratio(self.model_compute_s, self.fused_s),
        )


def step_bounds(
    profile: Profile, machine: Machine, host_s_per_operator: float | None = None
) -> StepBounds:
    """Return the bounds of the step that a profile counted.

    host_s_per_operator: measured seconds of the host for one operator; None where unknown.
    """
    ops = list(profile.op_totals())
    total = profile.total()
    limit = roofline(ops, machine)
    return StepBounds(
        compute_s=compute_s(ops, machine),
        memory_s=moving_s(total, machine),
        kernels_s=limit.attainable_s,
        communication_s=communication_s(profile, machine),
        busiest_link_s=busiest_link_s(profile, machine),
        operators=sum(op.calls for op in ops if op.kind != "free"),
        host_s_per_operator=host_s_per_operator,
        model_compute_s=compute_s((op for op in ops if op.phase in MODEL_PHASES), machine),
        kernels_bound=limit.bound,
    )
