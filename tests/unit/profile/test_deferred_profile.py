"""A profile whose fields are built when they are read."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref

import pytest

from dispatch_flops import ModuleNode, OpCost, OpTotal, Profile
from dispatch_flops.profile import RunInfo
from dispatch_flops.profile.profile import deferred_profile

MACS = 2 * 3 * 5
COST = OpCost(macs=MACS, flops=2 * MACS)


def built() -> Profile:
    op = OpTotal(op="aten.mm.default", phase="forward", calls=1, cost=COST)
    root = ModuleNode(fqn="", class_name="Net", calls=1, ops=(op,))
    return Profile(root=root, run=RunInfo(step=7), notes=("a note",), ran_elsewhere=("a",))


class Builder:
    """Builds a profile and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> Profile:
        self.times += 1
        return built()


def test_deferred_profile_totals_build_nothing() -> None:
    build = Builder()
    profile = deferred_profile(build, {"forward": COST})
    assert profile.total() == profile.total("forward") == profile.model_total() == COST
    assert profile.total("backward") == OpCost()
    assert not hasattr(profile, "_repr_markdown_")
    assert build.times == 0


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Profile)])
def test_deferred_profile_is_built_once_by_reading_any_field(field: str) -> None:
    build = Builder()
    profile = deferred_profile(build, {"forward": COST})
    assert getattr(profile, field) == getattr(built(), field)
    assert profile.check() == built()
    assert build.times == 1


def test_deferred_profile_keeps_nothing_of_what_built_it() -> None:
    build = Builder()
    profile, building = deferred_profile(build, {"forward": COST}), weakref.ref(build)
    del build
    assert building() is not None
    assert profile.total_params == profile.root.total_params
    assert building() is None


def test_deferred_profile_equals_copies_and_pickles_as_the_built_one() -> None:
    def profile() -> Profile:
        return deferred_profile(built, {"forward": COST})

    assert profile() == built()
    assert built() == profile()
    assert hash(profile()) == hash(built())
    assert repr(profile()) == repr(built())
    assert copy.deepcopy(profile()) == built()
    assert pickle.loads(pickle.dumps(profile())) == built()
    assert profile().to_json() == built().to_json()
    assert dataclasses.replace(profile(), notes=()) == dataclasses.replace(built(), notes=())


def test_deferred_profile_tries_again_after_building_failed() -> None:
    answers = iter([RuntimeError("no memory"), built()])

    def build() -> Profile:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    profile = deferred_profile(build, {"forward": COST})
    with pytest.raises(RuntimeError, match="no memory"):
        _ = profile.root
    assert profile.root == built().root


def test_profile_without_such_an_attribute_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'tree'"):
        _ = built().tree  # type: ignore[attr-defined]
