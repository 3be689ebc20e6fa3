"""Collapsed stacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given

from dispatch_flops.analysis.figures import Key
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import View, collapsed
from tests.helpers.trees import HOSTILE_NAMES, SMALL, deep, lenet5, profiles, training_step, wide

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("name", ["training_step", "hostile", "lower_bound"])
def test_stacks_of_small_profiles_match_golden_files(name: str, golden: Golden) -> None:
    golden(f"{name}_collapsed.txt", collapsed.render(SMALL[name]().check()))


def test_stacks_end_in_an_operator_or_a_module() -> None:
    lines = collapsed.render(lenet5(), View(by="macs")).splitlines()
    assert lines[0] == (
        "LeNet5;feature_extractor:Sequential;0:Conv2d;aten.convolution.default "
        f"{1024 * 6 * 25 * 28 * 28}"
    )
    assert len(lines) == 5
    params = collapsed.render(lenet5(), View(by="params")).splitlines()
    assert params[-1] == f"LeNet5;classifier:Sequential;2:Linear {84 * 10 + 10}"
    latency = collapsed.render(lenet5(), View(by="latency")).splitlines()
    assert "LeNet5;classifier:Sequential;2:Linear 62700" in latency


@pytest.mark.parametrize("by", ["macs", "flops", "bytes", "params"])
@given(profile=profiles)
def test_weights_of_any_profile_add_up_to_the_total(by: Key, profile: Profile) -> None:
    lines = collapsed.render(profile, View(by=by)).splitlines()
    expected = {
        "macs": profile.total().macs,
        "flops": profile.total().flops,
        "bytes": profile.total().bytes_total,
        "params": profile.total_params,
    }[by]
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == expected


def test_weights_of_a_phase_add_up_to_its_total() -> None:
    text = collapsed.render(training_step(), View(by="macs", phase="backward"))
    assert sum(int(line.rpartition(" ")[2]) for line in text.splitlines()) == 3 * 4 * 64 * 256


def test_frames_of_hostile_names_have_no_separators() -> None:
    lines = collapsed.render(SMALL["hostile"]()).splitlines()
    assert len(lines) == len(HOSTILE_NAMES)
    assert all(line.count(";") == 2 for line in lines)
    "\n".join(lines).encode()


@pytest.mark.slow
def test_stacks_of_deep_and_wide_trees_are_complete() -> None:
    assert len(collapsed.render(wide(10_000)).splitlines()) == 10_000
    assert len(collapsed.render(deep(1_500)).splitlines()) == 1_500
