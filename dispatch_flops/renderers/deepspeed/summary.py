"""The first of DeepSpeed's three parts: the totals of a step.

Labels, units and order are DeepSpeed's. DeepSpeed estimates the backward pass as twice the forward
pass, plus ``recompute_fwd_factor`` forward passes. Where a backward pass ran, a line with the
counted number follows each estimate.
"""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis.figures import Figures, inclusive, total_figures
from dispatch_flops.analysis.latency import inexact_phases, measured_seconds_are_inexact
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import Profile, RunInfo
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.mesh_positions import STAGE_DIMS, data_parallel_size_of, fills
from dispatch_flops.renderers.deepspeed.units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from dispatch_flops.renderers.text import about, at_least, heading
from dispatch_flops.renderers.view import View
from dispatch_flops.units import NOT_AVAILABLE, ratio

_NOTATIONS = """\
Notations:
data parallel size (dp_size), model parallel size(mp_size),
number of parameters (params), number of multiply-accumulate operations(MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)
"""

_SHORT_PHASE: dict[Phase, str] = {"backward": "bwd"}

Line = tuple[str, object]


def render(profile: Profile, view: View | None = None) -> str:
    """Return the totals of this rank.

    Forward numbers are those of the model; the other phases include what ran outside it, such as
    the loss function.

    view: ``step`` and ``recompute_fwd_factor``.
    """
    view = view or View()
    step = view.step
    lines = [
        heading("DeepSpeed Flops Profiler", 26),
        f"Profile Summary at step {profile.run.step if step is None else step}:",
        _NOTATIONS,
    ]
    if not phases_of(profile) and not profile.root.calls:
        lines.append("Nothing has run under the profiler yet: there is nothing to count.\n")
    lines += [f"{label + ': ':<70}  {value!s:<8}" for label, value in _lines(profile, view)]
    return "\n".join(lines)


def _lines(profile: Profile, view: View) -> Iterator[Line]:
    forward = inclusive(profile.root, "forward")[profile.root.fqn]
    timing = profile.timing
    forward_s = timing.latency("forward")
    if forward_s is None:
        forward_s = forward.latency_s
    yield from _parallelism(profile.run)
    yield from _sizes(forward, profile)
    profiled = _profiled_step(profile)
    yield f"fwd latency{profiled}", _duration(profile, forward_s, "forward")
    yield (
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency",
        _rate(forward.cost.flops, forward_s, forward.lower_bound),
    )
    yield from _counted_phases(profile)
    if {"backward", "optimizer"} & timing.seconds.keys():
        yield from _training(profile, forward, forward_s, 2 + view.recompute_fwd_factor)


def _parallelism(run: RunInfo) -> Iterator[Line]:
    if run.world_size is None:
        return
    yield "world size", run.world_size
    data, model = _parallel_sizes(run)
    yield "data parallel size", NOT_AVAILABLE if data is None else data
    yield "model parallel size", NOT_AVAILABLE if model is None else model
    yield "batch size per GPU", NOT_AVAILABLE if run.batch_size is None else run.batch_size
    if run.expert_tensor_parallel is not None:
        yield "expert tensor parallelism enabled", run.expert_tensor_parallel


def _sizes(forward: Figures, profile: Profile) -> Iterator[Line]:
    params, macs, flops = forward.params, forward.cost.macs, forward.cost.flops
    run, bound = profile.run, forward.lower_bound
    _, model_size = _parallel_sizes(run)
    is_sharded = profile.local_params != params
    yield "params per GPU", params_to_string(params)
    if is_sharded:
        yield "   of these held by this rank", params_to_string(profile.local_params)
    if run.model_expert_params:
        shared = (params - (run.expert_params or 0)) * run.model_parallel_size
        yield "params of model", params_to_string(shared + run.model_expert_params)
        yield "   non-expert params of model", params_to_string(shared)
        yield "   expert params of model", params_to_string(run.model_expert_params)
    elif is_sharded:  # ``params`` are those of the whole model, or of its stage
        is_stage = any(dim.name in STAGE_DIMS and dim.size > 1 for dim in run.mesh or ())
        whole = None if is_stage else params * run.model_parallel_size
        yield "params of model", params_to_string(whole)
    else:
        label = "params of model = params per GPU * mp_size"
        yield label, params_to_string(_times(params, model_size))
    yield "fwd MACs per GPU", at_least(macs_to_string(macs), bound)
    yield "fwd flops per GPU", at_least(number_to_string(flops), bound)
    yield (
        "fwd flops of model = fwd flops per GPU * mp_size",
        at_least(number_to_string(_times(flops, model_size)), bound),
    )


def _counted_phases(profile: Profile) -> Iterator[Line]:
    for phase in phases_of(profile):
        if phase == "forward":
            continue
        counted = total_figures(profile, phase)
        cost, bound = counted.cost, counted.lower_bound
        if cost.macs:
            macs_label = f"{_SHORT_PHASE.get(phase, phase)} MACs per GPU (counted)"
            yield macs_label, at_least(macs_to_string(cost.macs), bound)
        flops_label = f"{_SHORT_PHASE.get(phase, phase)} flops per GPU (counted)"
        yield flops_label, at_least(number_to_string(cost.flops), bound)


def _training(
    profile: Profile, forward: Figures, forward_s: float | None, factor: float
) -> Iterator[Line]:
    """Yield rates with backward; ``factor`` is DeepSpeed's estimate of it in forward passes."""
    timing, fwd_flops, fwd_bound = profile.timing, forward.cost.flops, forward.lower_bound
    backward_s, step_s = timing.latency("backward"), timing.latency("optimizer")
    both_s = _sum(forward_s, backward_s)
    iteration_s = timing.iteration_s
    if iteration_s is None:
        iteration_s = _sum(both_s, step_s)
    elif both_s is not None and timing.iteration_step is None:
        # A backward pass inside a forward pass is in both times.
        both_s = min(both_s, iteration_s)
    backward_ran = "backward" in phases_of(profile)
    backward = total_figures(profile, "backward")
    bwd_flops, bwd_bound = backward.cost.flops, backward.lower_bound

    profiled = _profiled_step(profile)
    yield f"bwd latency{profiled}", _duration(profile, backward_s, "backward")
    yield (
        f"bwd FLOPS per GPU = {factor:g} * fwd flops per GPU / bwd latency",
        _rate(fwd_flops, backward_s, fwd_bound, factor),
    )
    if backward_ran:
        yield (
            "bwd FLOPS per GPU = counted bwd flops per GPU / bwd latency",
            _rate(bwd_flops, backward_s, bwd_bound),
        )
    yield (
        f"fwd+bwd FLOPS per GPU = {factor + 1:g} * fwd flops per GPU / (fwd+bwd latency)",
        _rate(fwd_flops, both_s, fwd_bound, factor + 1),
    )
    if backward_ran:
        yield (
            "fwd+bwd FLOPS per GPU = counted flops per GPU / (fwd+bwd latency)",
            _rate(fwd_flops + bwd_flops, both_s, fwd_bound or bwd_bound),
        )
    yield f"step latency{profiled}", _duration(profile, step_s, "optimizer")
    other = "" if timing.iteration_step is None else f" of step {timing.iteration_step}, unprofiled"
    iteration = duration_to_string(iteration_s)
    yield f"iter latency{other}", about(iteration, measured_seconds_are_inexact(profile))
    yield (
        f"FLOPS per GPU = {factor + 1:g} * fwd flops per GPU / iter latency",
        _rate(fwd_flops, iteration_s, fwd_bound, factor + 1),
    )
    if backward_ran:
        yield (
            "FLOPS per GPU = counted flops of all phases per GPU / iter latency",
            _rate(profile.total().flops, iteration_s, profile.is_lower_bound),
        )
    yield from _throughput(profile.run, iteration_s)


def _duration(profile: Profile, seconds: float | None, phase: Phase) -> str:
    """Return the seconds, marked with ``~`` if they may be off by more than 10 %."""
    return about(duration_to_string(seconds), phase in inexact_phases(profile))


def _profiled_step(profile: Profile) -> str:
    """Return which step a phase's latency is of, if the iteration's is of another step."""
    return "" if profile.timing.iteration_step is None else f" of step {profile.run.step}, profiled"


def _throughput(run: RunInfo, iteration_s: float | None) -> Iterator[Line]:
    if run.batch_size is not None:
        data, _ = _parallel_sizes(run)
        per_s = ratio(_times(run.batch_size, data), iteration_s)
        yield "samples/second", NOT_AVAILABLE if per_s is None else round(per_s, 2)


def _parallel_sizes(run: RunInfo) -> tuple[int | None, int | None]:
    """Return the numbers of ranks with samples of their own, and of those that share samples.

    An engine states both. Otherwise the mesh tells them by the names of its dimensions.
    """
    world_size, model = run.world_size or 1, run.model_parallel_size
    if run.data_parallel_size is not None:
        return run.data_parallel_size, model
    if not run.mesh:
        return max(world_size // model, 1), model
    mesh = {dim.name: dim.size for dim in run.mesh}
    data = data_parallel_size_of(mesh) if fills(mesh, world_size) else None
    return data, None if data is None else world_size // data


def _times(count: int, size: int | None) -> int | None:
    return None if size is None else count * size


def _rate(flops: int, seconds: float | None, bound: bool, times: float = 1) -> str:
    per_s = ratio(flops, seconds)
    return at_least(flops_to_string(None if per_s is None else times * per_s), bound)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
