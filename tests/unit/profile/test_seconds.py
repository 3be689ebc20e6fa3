"""Seconds per phase: unknown is absent, and never 0."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatch_flops.profile.cost import PHASES
from dispatch_flops.profile.seconds import PhaseSeconds, add_seconds, sum_known, timed_phase

parts = st.lists(
    st.dictionaries(st.sampled_from(PHASES), st.none() | st.integers(0, 9)).map(PhaseSeconds),
    max_size=4,
)


def test_sum_known_without_a_known_value_is_none() -> None:
    assert sum_known([]) is sum_known([None, None]) is None
    assert sum_known([None, 0.0]) == 0.0
    assert sum_known([1.0, None, 2.0]) == 3.0


def test_phase_seconds_drop_what_is_not_measured() -> None:
    seconds = PhaseSeconds({"forward": 0.0, "backward": None})
    assert dict(seconds) == {"forward": 0.0}
    assert len(seconds) == 1 and not PhaseSeconds({"backward": None})
    assert seconds.get("backward") is None
    with pytest.raises(KeyError):
        seconds["backward"]


def test_phase_seconds_are_a_hashable_value() -> None:
    a = PhaseSeconds({"forward": 1.0, "backward": 2.0})
    b = PhaseSeconds({"backward": 2.0, "forward": 1.0, "optimizer": None})
    assert a == b
    assert hash(a) == hash(b)
    assert a != PhaseSeconds({"forward": 1.0})
    assert pickle.loads(pickle.dumps(a)) == copy.deepcopy(a) == a
    assert repr(a) == "PhaseSeconds({'forward': 1.0, 'backward': 2.0})"
    with pytest.raises(TypeError):
        a["forward"] = 3.0  # type: ignore[index]


def test_phase_seconds_do_not_change_with_their_source() -> None:
    source = {"forward": 1.0}
    seconds = PhaseSeconds(source)  # type: ignore[arg-type]
    source["forward"] = 2.0
    assert seconds["forward"] == 1.0


@given(parts)
def test_add_seconds_sums_what_is_known_of_each_phase(seconds: list[PhaseSeconds]) -> None:
    total = add_seconds(iter(seconds))
    for phase in PHASES:
        assert total.get(phase) == sum_known(part.get(phase) for part in seconds)
    assert sum(seconds, start=PhaseSeconds()) == total


def test_timed_phase_of_recomputation_is_backward() -> None:
    assert [timed_phase(phase) for phase in PHASES] == [
        "forward",
        "backward",
        "backward",
        "optimizer",
        "setup",
    ]
