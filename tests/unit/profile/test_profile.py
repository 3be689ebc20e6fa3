"""The profile as a whole: totals, operators, look-up and copies."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile, StepTiming
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.profile.tree import NO_MODEL
from tests.helpers.trees import SMALL, deep, lenet5, module, timed, training_step


def test_total_is_of_model_and_outside() -> None:
    profile = training_step()
    assert profile.total_params == 2 * 64 * 256 + 64 + 256
    assert profile.total("optimizer").flops == 2 * profile.total_params
    assert profile.total("forward") == (
        profile.root.total("forward") + profile.outside.total("forward")
    )
    assert profile.model_total() == profile.total("forward") + profile.total("backward")


def test_by_module_lists_inclusive_costs_parents_first() -> None:
    profile = training_step()
    assert list(profile.by_module()) == ["", "0", "1", "2"]
    assert profile.by_module("backward")["2"].macs == 2 * 4 * 64 * 256


def test_by_operator_merges_modules_and_phases() -> None:
    operators = training_step().by_operator()
    assert operators["aten.mm.default"].calls == 1 + 2
    assert operators["aten.mm.default"].cost == OpCost(
        macs=3 * 4 * 64 * 256, flops=2 * 3 * 4 * 64 * 256
    )
    assert operators["aten.relu.default"].calls == 2
    assert next(iter(operators)) == "aten.mm.default"
    assert "aten.mm.default" not in training_step().by_operator("forward")


def test_by_operator_over_several_phases_has_no_phase() -> None:
    ops = [
        OpTotal(op="aten.mm.default", phase=phase, calls=1, cost=OpCost(flops=1))
        for phase in ("forward", "backward")
    ]
    profile = Profile(root=ModuleNode(fqn="", class_name="Net", ops=tuple(ops)))
    assert profile.by_operator()["aten.mm.default"].phase is None
    assert profile.by_operator("backward")["aten.mm.default"].phase == "backward"


def test_uncounted_ops_are_listed_with_their_calls() -> None:
    profile = SMALL["lower_bound"]()
    assert profile.uncounted_ops() == {"lib.mystery.default": 4, "lib.scan.default": 2}
    assert list(profile.formula_errors()) == ["lib.scan.default"]
    assert profile.is_lower_bound
    assert not lenet5().is_lower_bound


def test_uncalled_modules_are_those_that_took_no_part() -> None:
    def active(count: int) -> Profile:
        return SMALL["unmeasured"]().map_nodes(
            lambda node: dataclasses.replace(node, active_params=0 if node.calls else count)
        )

    assert active(1).uncalled_modules() == []  # another module uses its parameter
    profile = active(0)
    assert profile.uncalled_modules() == ["layers.1.fc"]
    elsewhere = dataclasses.replace(profile, ran_elsewhere=("layers.1.fc",))
    assert elsewhere.uncalled_modules() == []


def test_root_that_stands_for_no_model_is_not_uncalled() -> None:
    assert Profile(root=ModuleNode(fqn="", class_name=NO_MODEL)).uncalled_modules() == []


def test_uncalled_modules_without_parameters_are_those_without_children() -> None:
    def uncalled(name: str, *children: ModuleNode, **fields: int) -> ModuleNode:
        return module("Part", *children, name=name, calls=0, **fields)  # type: ignore[arg-type]

    def inactive(node: ModuleNode) -> ModuleNode:
        return dataclasses.replace(node, active_params=0)

    held = uncalled("held", uncalled("a", own_params=3), own_params=2)
    profile = Profile(root=module("Net", held, uncalled("list", uncalled("dropout"))))
    assert profile.map_nodes(inactive).uncalled_modules() == ["held", "a", "dropout"]


def test_node_of_an_unknown_name_raises_key_error() -> None:
    assert lenet5().node("classifier.0").class_name == "Linear"
    with pytest.raises(KeyError, match="no module 'nope' in this profile.$"):
        lenet5().node("nope")
    with pytest.raises(KeyError, match=r"did you mean classifier\.\d or classifier\.\d"):
        lenet5().node("classifer.0")
    with pytest.raises(KeyError, match="no module 0 in"):
        lenet5().node(0)  # type: ignore[arg-type]


def test_map_nodes_changes_model_and_outside() -> None:
    profile = training_step().map_nodes(lambda node: dataclasses.replace(node, ops=()))
    assert profile.total() == OpCost()
    assert [node.fqn for node in profile.nodes()] == ["", "0", "1", "2", "<outside>"]


def test_step_timing_latency_is_none_where_not_measured() -> None:
    timing = StepTiming(seconds=timed(forward=1.0, optimizer=None))
    assert timing.latency("forward") == 1.0
    assert timing.latency("optimizer") is timing.latency("backward") is None
    assert hash(timing) == hash(StepTiming(seconds=timed(forward=1.0)))


@pytest.mark.parametrize("profile", [*(build() for build in SMALL.values()), deep(1_500)])
def test_profile_is_pickled_copied_and_hashed_as_a_value(profile: Profile) -> None:
    again = pickle.loads(pickle.dumps(profile))
    assert again == copy.deepcopy(profile) == profile
    assert hash(again) == hash(profile)


@pytest.mark.parametrize(
    "read",
    [
        Profile.total,
        Profile.by_module,
        Profile.by_operator,
        lambda profile, phase: profile.root.own(phase),
        lambda profile, phase: profile.root.total(phase),
        lambda profile, phase: profile.root.latency(phase),
        lambda profile, phase: profile.timing.latency(phase),
    ],
)
def test_misspelt_phase_raises_an_error_that_names_the_phases(read: Callable[..., Any]) -> None:
    message = "'forwrd' is not a phase; choose one of forward, backward, recompute, optimizer"
    with pytest.raises(ConfigError, match=message):
        read(training_step(), "forwrd")


def test_standard_phase_that_did_not_occur_costs_nothing() -> None:
    assert lenet5().total("optimizer") == OpCost()
