"""Latency of modules and of phases, and which latencies are exact."""

from __future__ import annotations

import math

from dispatch_flops.analysis.figures import inclusive
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import ModuleNode, Profile, StepTiming, sum_known
from dispatch_flops.profile.cost import STEP_PHASES, Phase, in_order
from dispatch_flops.profile.rank_figures import timed_phases
from dispatch_flops.profile.seconds import timed_phase
from dispatch_flops.units import exceeds_float

EXACT = 0.1  # the largest relative error of a latency that is called exact


def inexact_latencies(root: ModuleNode, timing: StepTiming) -> frozenset[str]:
    """Return the fqns of the modules whose forward latency may be off by more than 10 %.

    A latency is inexact if it is below the resolution of its calls, or if runs vary by more than
    10 %. Where the whole model was timed by itself, its latency is never too short. The latency of
    a container that is never called is the sum of its children's.

    Example::

        inexact = inexact_latencies(profile.root, profile.timing)
        for node in profile.root.walk():
            print(node.fqn, "~" if node.fqn in inexact else "", node.latency_s)
    """
    latencies = inclusive(root)
    if latencies[root.fqn].latency_s is None:  # neither the root nor anything below was timed
        return frozenset()
    least: dict[str, float] = {}
    spread: dict[str, float] = {}
    inexact = set()
    for node in reversed(list(root.walk())):
        timed = (op for op in node.ops if op.phase == "forward" and op.latency_s is not None)
        operators = sum(op.calls for op in timed)
        least[node.fqn] = (
            _least_s(node.calls, timing.resolution_s)
            + _least_s(operators, timing.operator_resolution_s)
            + sum(least[child.fqn] for child in node.children)
        )
        is_sum = node.latency_s is None
        spreads = [spread[child.fqn] for child in node.children if is_sum]
        spread[node.fqn] = sum(spreads, start=node.latency_spread_s or 0.0)
        latency_s = latencies[node.fqn].latency_s
        if not latency_s:
            continue
        timed_by_itself = node is root and timing.latency("forward") is not None
        too_short = latency_s < least[node.fqn] and not timed_by_itself
        if too_short or spread[node.fqn] > EXACT * latency_s:
            inexact.add(node.fqn)
    return frozenset(inexact)


def inexact_phases(profile: Profile) -> frozenset[Phase]:
    """Return the phases whose seconds may be off by more than 10 %.

    Counting and timing shared their pass, and the seconds are below the resolution of what ran;
    or repeated runs vary by more than 10 %.

    Example::

        inexact = inexact_phases(profile)
        print({phase: s for phase, s in phase_seconds(profile).items() if phase not in inexact})
    """
    timing, seconds = profile.timing, phase_seconds(profile)
    calls: dict[Phase, int] = {}
    for op in profile.op_totals():
        if op.phase is not None:
            phase = timed_phase(op.phase)
            calls[phase] = calls.get(phase, 0) + op.calls
    least = {phase: _least_s(n, timing.operator_resolution_s) for phase, n in calls.items()}
    inexact = {
        phase
        for phase, s in seconds.items()
        if s and (s < least.get(phase, 0.0) or (timing.spread_s or 0.0) > EXACT * s)
    } - {"forward"}
    if profile.root.fqn in inexact_latencies(profile.root, timing):
        inexact.add("forward")
    return frozenset(inexact)


def _least_s(calls: int, resolution_s: float | None) -> float:
    if not resolution_s:
        return 0.0
    return math.inf if exceeds_float(calls) else calls * resolution_s


def latency_of(node: ModuleNode, phase: Phase | None = "forward") -> float | None:
    """Return the seconds of a module; where not measured, those of its children together.

    ``whole_latencies`` has those of all phases; None is "forward" here, as in ``Figures``.

    Example::

        slowest = max(profile.root.children, key=lambda node: latency_of(node) or 0.0)
        print(slowest.fqn, slowest.class_name)
    """
    return inclusive(node, phase)[node.fqn].latency_s


def whole_latencies(root: ModuleNode) -> dict[str, float | None]:
    """Return ``{fqn: seconds in all phases}``, parents first.

    The seconds are None where a phase in which an operator of the module ran was not measured.

    Example::

        for fqn, seconds in whole_latencies(profile.root).items():
            print(fqn or "model", "not measured" if seconds is None else f"{seconds * 1e3:.3f} ms")
    """
    ran = timed_phases(root)
    phases = in_order(("forward", *ran[root.fqn]))
    seconds = {phase: inclusive(root, phase) for phase in phases}
    return {
        node.fqn: None
        if any(seconds[phase][node.fqn].latency_s is None for phase in ran[node.fqn])
        else sum_known(seconds[phase][node.fqn].latency_s for phase in phases)
        for node in root.walk()
    }


def measured_seconds(profile: Profile) -> tuple[float | None, str]:
    """Return the seconds of everything that ran, and what they are of, in words.

    The seconds are None if a phase that ran was not measured.

    Example::

        seconds, what = measured_seconds(profile)
        if seconds:
            print(f"{profile.total().flops / seconds:.3g} FLOP/s over {what}")
    """
    if profile.timing.iteration_s is not None:
        step = profile.timing.iteration_step
        of_step = "" if step is None else f" of step {step}, without the profiler"
        return profile.timing.iteration_s, f"whole iteration{of_step}"
    seconds = phase_seconds(profile)
    phases = list(dict.fromkeys(map(timed_phase, phases_of(profile))))
    if not phases and profile.root.calls:  # a model in which no operator ran
        phases = ["forward"]
    if not phases or any(seconds[phase] is None for phase in phases):
        return None, "not measured"
    return sum_known(seconds[phase] for phase in phases), " + ".join(phases)


def measured_seconds_are_inexact(profile: Profile) -> bool:
    """Return True if ``measured_seconds`` may be off by more than 10 %.

    They are as inexact as the phases that they consist of, unless they are those of a whole
    iteration that ran without the profiler.
    """
    return profile.timing.iteration_step is None and bool(inexact_phases(profile))


def phase_seconds(profile: Profile) -> dict[Phase, float | None]:
    """Return the seconds of each phase; None where not measured.

    Recomputation has none of its own: its time is part of the backward pass's.

    Example::

        seconds = phase_seconds(profile)
        if seconds["backward"] is not None:
            print("backward / forward:", seconds["backward"] / seconds["forward"])
    """
    timing = profile.timing
    phases = in_order((*STEP_PHASES, *phases_of(profile), *timing.seconds))
    seconds = {phase: timing.seconds.get(phase) for phase in phases}
    if seconds["forward"] is None:
        seconds["forward"] = latency_of(profile.root)
    return seconds
