"""Headline of hand-built profiles."""

from __future__ import annotations

import pytest

from dispatch_flops.analysis import Machine, headline
from dispatch_flops.profile import Profile, StepTiming
from tests.helpers.trees import lenet5, lower_bound, module, op, training_step

MACHINE = Machine(name="test", flops_per_s={"float32": 1e12, "bfloat16": 2e12}, bytes_per_s=1e9)


def test_headline_has_the_totals_of_all_phases() -> None:
    profile = training_step()
    top = headline(profile)
    assert (top.params, top.trainable_params, top.active_params) == (33_088, 33_088, 33_088)
    assert (top.macs, top.hardware_flops) == (profile.total().macs, profile.total().flops)
    assert top.model_flops == profile.model_total().flops < top.hardware_flops
    assert top.seconds == pytest.approx((97.51 + 240.09 + 314.47) * 1e-6)
    assert (top.mfu, top.hfu, top.lower_bound) == (None, None, False)
    assert headline(lower_bound()).lower_bound


def test_headline_with_a_machine_has_utilisations() -> None:
    top = headline(lenet5(), MACHINE)
    assert top.mfu == top.hfu == pytest.approx(lenet5().total().flops / (216.68e-3 * 1e12))
    assert not top.exceeds_peak
    assert (top.warning, top.mfu_is_lower_bound, top.hfu_is_lower_bound) == ("", False, False)
    bounds = headline(lower_bound(), MACHINE)
    assert bounds.mfu_is_lower_bound and bounds.hfu_is_lower_bound
    narrow = Machine(name="narrow", flops_per_s={"float32": 1e15}, bytes_per_s=1.0)
    assert headline(lower_bound(), narrow).exceeds_peak
    assert "bandwidth" in headline(lower_bound(), narrow).warning
    slow = Machine(name="slow", flops_per_s={"float32": 1.0}, bytes_per_s=1.0)
    assert headline(lenet5(), slow).exceeds_peak


def test_headline_of_recomputation_above_the_peak_warns() -> None:
    ops = (
        op("aten.relu.default", extra_flops=3),
        op("aten.relu.default", "recompute", extra_flops=4),
    )
    profile = Profile(root=module("Net", ops=ops), timing=StepTiming(iteration_s=1.0))
    top = headline(profile, Machine(name="test", flops_per_s={"float32": 5.0}))
    assert (top.mfu, top.hfu) == (3 / 5, (3 + 4) / 5)
    assert "peak" in top.warning
