"""The first of DeepSpeed's three parts: the totals of a step.

Labels, units and order are DeepSpeed's. Its training lines rate the backward pass as twice
the forward; beside each stands a line with what was counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis import Figures, inclusive
from dispatch_flops.cost import Phase
from dispatch_flops.renderers.text import at_least, heading
from dispatch_flops.tree import Profile, StepTiming
from dispatch_flops.units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
    ratio,
)

_NOTATIONS = """\
Notations:
data parallel size (dp_size), model parallel size(mp_size),
number of parameters (params), number of multiply-accumulate operations(MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)
"""

_BACKWARD_ESTIMATE = 2  # DeepSpeed's assumption: backward costs twice the forward

Line = tuple[str, object]


def render(profile: Profile, *, profile_step: int = 1) -> str:
    """The totals of this rank."""
    lines = [
        heading("DeepSpeed Flops Profiler", 26),
        f"Profile Summary at step {profile_step}:",
        _NOTATIONS,
    ]
    lines += [f"{label + ':':<69}   {value!s:<8}" for label, value in _lines(profile)]
    return "\n".join(lines) + "\n"


def _lines(profile: Profile) -> Iterator[Line]:
    forward = inclusive(profile.root, "forward")[profile.root.fqn]
    timing = profile.timing
    latency_s = forward.latency_s if timing.forward_s is None else timing.forward_s
    yield from _parallelism(profile)
    yield from _sizes(profile, forward)
    yield "fwd latency", duration_to_string(latency_s)
    yield (
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency",
        _rate(forward.cost.flops, latency_s, forward.lower_bound),
    )
    yield from _counted_phases(profile)
    if timing.backward_s is not None or timing.step_s is not None:
        yield from _training_rates(profile, forward, latency_s)


def _parallelism(profile: Profile) -> Iterator[Line]:
    scope = profile.scope
    if scope.world_size is None:
        return
    data_parallel = scope.data_parallel_size or scope.world_size // scope.model_parallel_size
    yield "world size", scope.world_size
    yield "data parallel size", data_parallel
    yield "model parallel size", scope.model_parallel_size
    yield "batch size per GPU", number_to_string(None) if scope.batch_size is None else (
        scope.batch_size
    )
    if scope.expert_parallel_size is not None:
        yield "expert parallel size", scope.expert_parallel_size


def _sizes(profile: Profile, forward: Figures) -> Iterator[Line]:
    shards = profile.scope.model_parallel_size
    bound = forward.lower_bound
    yield "params per GPU", params_to_string(forward.params)
    yield "params of model = params per GPU * mp_size", params_to_string(forward.params * shards)
    yield "fwd MACs per GPU", at_least(macs_to_string(forward.cost.macs), bound)
    yield "fwd flops per GPU", at_least(number_to_string(forward.cost.flops), bound)
    yield (
        "fwd flops of model = fwd flops per GPU * mp_size",
        at_least(number_to_string(forward.cost.flops * shards), bound),
    )


def _counted_phases(profile: Profile) -> Iterator[Line]:
    """Lines that DeepSpeed lacks: the other phases, model and outside, where they ran."""
    labels: tuple[tuple[Phase, str], ...] = (
        ("backward", "bwd"),
        ("recompute", "recompute"),
        ("optimizer", "optimizer"),
    )
    ran = {op.phase for op in profile.op_totals()}
    for phase, label in labels:
        if phase in ran:
            counted = _counted(profile, phase)
            if counted.cost.macs:
                macs = macs_to_string(counted.cost.macs)
                yield f"{label} MACs per GPU (counted)", at_least(macs, counted.lower_bound)
            flops = number_to_string(counted.cost.flops)
            yield f"{label} flops per GPU (counted)", at_least(flops, counted.lower_bound)


def _training_rates(
    profile: Profile, forward: Figures, forward_s: float | None
) -> Iterator[Line]:
    timing = profile.timing
    both_s = _sum_if_known(forward_s, timing.backward_s)
    iteration_s = timing.iteration_s
    if iteration_s is None:
        iteration_s = _sum_if_known(both_s, timing.step_s)
    bwd, all_flops = _BACKWARD_ESTIMATE * forward.cost.flops, (1 + _BACKWARD_ESTIMATE) * forward.cost.flops
    bound = forward.lower_bound
    bwd_factor, all_factor = _BACKWARD_ESTIMATE, _BACKWARD_ESTIMATE + 1

    yield "bwd latency", duration_to_string(timing.backward_s)
    yield (
        f"bwd FLOPS per GPU = {bwd_factor} * fwd flops per GPU / bwd latency",
        _rate(bwd, timing.backward_s, bound),
    )
