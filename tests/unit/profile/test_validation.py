"""Profiles that are inconsistent are refused, with the name of the module."""

from __future__ import annotations

import dataclasses

import pytest

from dispatch_flops.errors import InconsistentProfileError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile, StepTiming
from dispatch_flops.profile.cost import OpCost
from tests.helpers.trees import SMALL, linear, module, op, timed, training_step

LINEAR = linear("", 2, 3, batch=5)


def changed(node: ModuleNode, **changes: object) -> Profile:
    return Profile(root=dataclasses.replace(node, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SMALL)
def test_check_of_a_sound_profile_returns_it(name: str) -> None:
    profile = SMALL[name]()
    assert profile.check() is profile


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Profile(root=module("Net", LINEAR, name="")), "another module"),
        (changed(LINEAR, calls=-1), "calls = -1"),
        (changed(LINEAR, calls=True), "calls = True"),
        (changed(LINEAR, tokens=-1), "tokens = -1"),
        (changed(LINEAR, own_params=2.0), "own_params = 2.0"),
        (changed(LINEAR, total_params=8), "total_params = 8"),
        (changed(LINEAR, total_params=10), "total_params = 10"),
        (changed(LINEAR, active_params=10), "more active"),
        (changed(LINEAR, trainable_params=10), "more active"),
        (changed(LINEAR, seconds=timed(forward=-1.0)), "latency of -1.0 s"),
        (changed(LINEAR, seconds=timed(backward=float("nan"))), "latency of nan s"),
        (changed(LINEAR, latency_spread_s=float("inf")), "latency of inf s"),
        (changed(LINEAR, ops=(op("a", latency_s=-1.0),)), "latency of -1.0 s"),
        (Profile(root=LINEAR, timing=StepTiming(iteration_s=-1.0)), "latency of -1.0 s"),
        (Profile(root=LINEAR, timing=StepTiming(spread_s=-1.0)), "latency of -1.0 s"),
        (Profile(root=LINEAR, timing=StepTiming(seconds=timed(forward=-1.0))), "latency of -1.0 s"),
        (changed(LINEAR, ops=(op("a", calls=-1),)), "not a count"),
        (changed(LINEAR, ops=(op("a", extra_flops=-1),)), "not a count"),
        (changed(LINEAR, ops=(op("a", n_bytes=(0, -1)),)), "not a count"),
        (changed(LINEAR, ops=(op("a", uncounted=2),)), "not a count"),
        (changed(LINEAR, ops=(op("a", uncounted=1),)), "no counted call"),
        (changed(LINEAR, ops=(op("a", ""),)), "no phase"),  # type: ignore[arg-type]
        (changed(LINEAR, ops=(op("a", "all"),)), "all phases together"),  # type: ignore[arg-type]
        (
            changed(LINEAR, ops=(OpTotal(op="a", phase="forward", calls=1, cost=None),)),
            "counted calls but no cost",
        ),
        (
            changed(LINEAR, ops=(OpTotal(op="a", phase=None, calls=1, cost=OpCost()),)),
            "no phase",
        ),
    ],
)
def test_check_of_a_wrong_figure_raises(wrong: Profile, message: str) -> None:
    with pytest.raises(InconsistentProfileError, match=message):
        wrong.check()


@pytest.mark.parametrize("phase", ["forward", "setup"])
def test_check_of_a_total_that_is_not_the_sum_raises(phase: str) -> None:
    profile = training_step().check()
    assert profile.root.total()  # computes all totals
    totals = profile.root.__dict__["_totals"]
    totals[phase] = totals.get(phase, OpCost()) + OpCost(macs=1)
    with pytest.raises(InconsistentProfileError, match=f"'': {phase}: total"):
        profile.check()


def test_check_names_the_module_that_is_wrong() -> None:
    bad = linear("fc", 2, 3, calls=-3)
    with pytest.raises(InconsistentProfileError, match=r"'fc': calls = -3"):
        Profile(root=module("Net", bad)).check()
