"""Seconds of modules and phases, and which of them are exact."""

from __future__ import annotations

from dispatch_flops.analysis.figures import inclusive, sum_known
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import (
    ModuleNode,
    Profile,
    StepTiming,
)
from dispatch_flops.profile.cost import Phase

EXACT = 0.1  # a latency is called exact that is right to this share


def inexact_latencies(root: ModuleNode, timing: StepTiming) -> frozenset[str]:
    """The modules (fqn) whose latency is not exact to 10 %: calls in it are too short, or runs
    of it vary by more.

    The model's own is never too short where it was measured by itself.
    """
    least: dict[str, float] = {}
    inexact = set()
    for node in reversed([*root.walk()]):  # children first
        timed = (op for op in node.ops if op.phase == "forward" and op.latency_s is not None)
        operators = sum(op.calls for op in timed)
        least[node.fqn] = (
            node.calls * (timing.resolution_s or 0.0)
            + operators * (timing.operator_resolution_s or 0.0)
            + sum(least[child.fqn] for child in node.children)
        )
        if not node.latency_s:
            continue
        by_itself = node is root and timing.forward_s is not None
        too_short = node.latency_s < least[node.fqn] and not by_itself
        if too_short or (node.latency_spread_s or 0.0) > EXACT * node.latency_s:
            inexact.add(node.fqn)
    return frozenset(inexact)


def latency_of(node: ModuleNode, phase: Phase = "forward") -> float | None:
    """Seconds of the module, or of its children together where it was not measured itself."""
    return inclusive(node, phase)[node.fqn].latency_s


def measured_seconds(profile: Profile) -> tuple[float | None, str]:
    """Seconds of all phases that ran, and the words for them; None if a phase lacks its time."""
    timing = profile.timing
    if timing.iteration_s is not None:
        return timing.iteration_s, "whole iteration"
    parts = {
        "forward": _forward_s(profile),
        "backward": timing.backward_s,
        "optimizer": timing.step_s,
    }
    # Recomputation takes place within the backward pass.
    ran = ["backward" if phase == "recompute" else phase for phase in phases_of(profile)]
    if not ran and profile.root.calls:  # a model of which no operator ran
        ran = ["forward"]
    names = [name for name in parts if name in ran]
    if not names or any(parts[name] is None for name in names):
        return None, "not measured"
    return sum_known(parts[name] for name in names), " + ".join(names)


def phase_seconds(profile: Profile) -> dict[str, float | None]:
    """Seconds per phase where the profile has them."""
    timing = profile.timing
    return {
        "forward": _forward_s(profile),
        "backward": timing.backward_s,
        "recompute": None,
        "optimizer": timing.step_s,
    }


def _forward_s(profile: Profile) -> float | None:
    forward_s = profile.timing.forward_s
    return latency_of(profile.root) if forward_s is None else forward_s
