"""The frozen profile: totals, checks, saving."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest
from hypothesis import given

from dispatch_flops.errors import InconsistentProfileError, ProfileFormatError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile, merge
from dispatch_flops.profile.cost import OpCost
from tests.helpers.trees import (
    SMALL,
    deep,
    lenet5,
    linear,
    module,
    op,
    profiles,
    training_step,
    unknown,
    wide,
)

DEEP = 5_000


def test_totals_are_sums_over_phases_and_children() -> None:
    profile = training_step()
    macs = 4 * 64 * 256
    assert profile.root.total("forward").macs == 2 * macs
    assert profile.root.total("backward").macs == 3 * macs
    assert profile.root.total().macs == 5 * macs
    assert profile.root.model_total().flops == 2 * 5 * macs + 2 * 4 * 256 + 3 * (256 + 64)
    assert profile.root.own() == OpCost()
    assert profile.total("optimizer").flops == 2 * profile.total_params
    assert profile.total_params == 2 * 64 * 256 + 64 + 256
    assert profile.by_module("backward")["2"].macs == 2 * macs
    assert list(profile.by_module()) == ["", "0", "1", "2"]


def test_operators_merge_over_modules_and_phases() -> None:
    operators = training_step().by_operator()
    assert operators["aten.mm.default"].calls == 1 + 2
    assert operators["aten.mm.default"].cost == OpCost(
        macs=3 * 4 * 64 * 256, flops=2 * 3 * 4 * 64 * 256
    )
    assert operators["aten.relu.default"].calls == 2
    assert next(iter(operators)) == "aten.mm.default"
    assert "aten.mm.default" not in training_step().by_operator("forward")


def test_unknown_operators_mark_everything_above() -> None:
    profile = SMALL["lower_bound"]()
    assert profile.uncounted_ops() == {"lib.mystery.default": 4, "lib.scan.default": 2}
    assert list(profile.formula_errors()) == ["lib.scan.default"]
    marks = {node.fqn: node.is_lower_bound for node in profile.root.walk()}
    assert marks == {"": True, "known": False, "partly": True}
    assert profile.is_lower_bound
    assert not lenet5().is_lower_bound


def test_uncalled_modules() -> None:
    assert SMALL["unmeasured"]().uncalled_modules() == ["layers.1.fc"]


@pytest.mark.parametrize("name", SMALL)
def test_from_json_of_version_1_reads_the_same_profile(name: str) -> None:
    profile = SMALL[name]().check()
    data = profile.to_dict() | {"version": 1}
    data["scope"] = data.pop("run")
    assert Profile.from_json(json.dumps(data)) == profile


@pytest.mark.parametrize("name", SMALL)
def test_round_trip(name: str) -> None:
    profile = SMALL[name]().check()
    text = profile.to_json()
    again = Profile.from_json(text)
    assert again == profile
    assert hash(again) == hash(profile)
    assert again.to_json() == text
    assert json.loads(text.encode().decode("ascii"))["version"] == 2
    assert pickle.loads(pickle.dumps(profile)) == copy.deepcopy(profile) == profile


@given(profiles)
def test_round_trip_of_any_profile(profile: Profile) -> None:
    assert Profile.from_json(profile.check().to_json(indent=1)) == profile


def test_a_difference_anywhere_is_a_difference() -> None:
    profile = training_step()
    leaf = dataclasses.replace(profile.root.children[1], extra_repr="other")
    children = (profile.root.children[0], leaf, profile.root.children[2])
    assert profile != dataclasses.replace(
        profile, root=dataclasses.replace(profile.root, children=children)
    )
    assert profile.root != dataclasses.replace(profile.root, children=children[:2])
    assert profile.root != "Sequential"
    # the same nodes in the same order, but nested otherwise
    chain = module("A", module("B", module("C", name="c"), name="b"))
    flat = module("A", module("B", name="b"), module("C", name="c"))
    assert chain != flat


def _with(node: ModuleNode, **changes: object) -> Profile:
    return Profile(root=dataclasses.replace(node, **changes))  # type: ignore[arg-type]


_LINEAR = linear("", 2, 3, batch=5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (Profile(root=module("Net", _LINEAR, name="")), "another module"),
        (_with(_LINEAR, calls=-1), "calls = -1"),
        (_with(_LINEAR, calls=True), "calls = True"),
        (_with(_LINEAR, own_params=2.0), "own_params = 2.0"),
        (_with(_LINEAR, total_params=8), "total_params = 8"),
        (_with(_LINEAR, total_params=10), "total_params = 10"),
        (_with(_LINEAR, active_params=10), "more active"),
        (_with(_LINEAR, trainable_params=10), "more active"),
        (_with(_LINEAR, latency_s=-1.0), "latency of -1.0 s"),
        (_with(_LINEAR, backward_latency_s=float("nan")), "latency of nan s"),
        (_with(_LINEAR, ops=(op("a", calls=-1),)), "no count"),
        (_with(_LINEAR, ops=(op("a", extra_flops=-1),)), "no count"),
        (_with(_LINEAR, ops=(op("a", uncounted=2),)), "no count"),
        (_with(_LINEAR, ops=(op("a", uncounted=1),)), "no counted call"),
        (
            _with(_LINEAR, ops=(OpTotal(op="a", phase="forward", calls=1, cost=None),)),
            "counted calls but no cost",
        ),
    ],
)
def test_check_refuses(wrong: Profile, message: str) -> None:
    with pytest.raises(InconsistentProfileError, match=message):
        wrong.check()


def test_check_refuses_a_total_that_is_not_the_sum() -> None:
    profile = training_step().check()
    profile.root.__dict__["_totals"]["forward"] += OpCost(macs=1)
    with pytest.raises(InconsistentProfileError, match="'': forward: total"):
        profile.check()


def test_check_names_the_module() -> None:
    bad = linear("fc", 2, 3, calls=-3)
    with pytest.raises(InconsistentProfileError, match=r"'fc': calls = -3"):
        Profile(root=module("Net", bad)).check()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "no JSON"),
        ("[]", "no saved profile"),
        ('{"schema": "other"}', "no saved profile"),
        ('{"schema": "dispatch_flops.profile", "version": 99}', "version 99"),
        ('{"schema": "dispatch_flops.profile", "version": 2}', "damaged"),
    ],
)
def test_loading_refuses(text: str, message: str) -> None:
    with pytest.raises(ProfileFormatError, match=message):
        Profile.from_json(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("root",), []),
        (("root",), "abc"),
        (("root", 0, "children"), [0]),
        (("root", 0, "children"), [99]),
        (("root", 0, "children"), [1, 1]),
        (("root", 0, "children"), []),
        (("root", 0, "surprise"), 1),
        (("root", 0, "calls"), "three"),
        (("root", 0, "calls"), True),
        (("root", 0, "total_params"), None),
        (("root", 0, "latency_s"), "fast"),
        (("root", 0, "latency_s"), float("nan")),
        (("root", 2, "ops", 0, "cost"), 5),
        (("root", 2, "ops", 0, "cost", "flops"), "12"),
        (("root", 2, "ops", 0, "cost", "flops"), -12),
        (("root", 2, "ops", 0, "cost", "macs"), 1.5),
        (("root", 2, "ops", 0, "phase"), "sideways"),
        (("root", 2, "ops", 0, "phase"), None),
        (("timing", "forward_s"), "fast"),
        (("run", "device"), 5),
        (("timing", "surprise"), 1),
        (("notes",), None),
        (("run",), None),
    ],
)
def test_loading_refuses_damage(path: tuple[str | int, ...], value: object) -> None:
    data = lenet5().to_dict()
    place = json.loads(json.dumps(data))
    target = place
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises(ProfileFormatError, match="damaged"):
        Profile.from_dict(place)


def test_node_by_name() -> None:
    assert lenet5().node("classifier.0").class_name == "Linear"
    with pytest.raises(KeyError, match="no module 'nope'"):
        lenet5().node("nope")


def test_deeper_than_the_stack() -> None:
    profile = deep(DEEP).check()
    assert profile.root.total().flops == DEEP
    assert not profile.root.is_lower_bound
    again = Profile.from_json(profile.to_json())
    assert again == profile
    assert pickle.loads(pickle.dumps(profile)) == profile
    assert hash(again) == hash(profile)
    assert len(repr(profile)) < 2_000


def test_ten_thousand_modules() -> None:
    profile = wide(10_000).check()
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.root.total().macs == 10_000 * 10_001 // 2


def test_unknown_cost_is_not_zero() -> None:
    node = module("Net", ops=(unknown("lib.a", calls=2),))
    assert node.own() == OpCost()
    assert node.is_lower_bound


def test_operators_of_several_phases_are_of_none() -> None:
    ops = [
        OpTotal(op="aten.mm.default", phase=phase, calls=1, cost=OpCost(flops=1))
        for phase in ("forward", "backward")
    ]
    profile = Profile(root=ModuleNode(fqn="", class_name="Net", ops=tuple(ops)))
    assert profile.by_operator()["aten.mm.default"].phase is None
    assert profile.by_operator("backward")["aten.mm.default"].phase == "backward"


def test_a_share_that_was_never_called_takes_no_time() -> None:
    kernel = OpTotal(op="lib.a", phase="backward", calls=2, cost=OpCost(flops=3), latency_s=5.0)
    share = OpTotal(op="lib.a", phase="recompute", calls=0, cost=OpCost(flops=7))
    untimed = OpTotal(op="lib.a", phase="forward", calls=1, cost=OpCost(flops=1))
    assert merge(kernel, share).latency_s == merge(share, kernel).latency_s == 5.0
    assert merge(kernel, untimed).latency_s is merge(share, share).latency_s is None
