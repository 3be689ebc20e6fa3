"""The sample that runs by default reaches every case."""

from __future__ import annotations

import pytest

from tests.end_to_end.sweep.sampling import EIGHTH, MOST, one_in

CASES = [f"case {i}" for i in range(100)]


@pytest.mark.parametrize("every", [1, 3, EIGHTH])
def test_one_in_returns_its_share_of_every_case(every: int) -> None:
    chosen = [one_in(every, range(24), case=case) for case in CASES]
    assert {len(samples) for samples in chosen} == {24 // every}
    assert set().union(*chosen) == set(range(24))


@pytest.mark.parametrize("every", [1, 3, EIGHTH])
def test_one_in_returns_a_sample_of_small_cases(every: int) -> None:
    chosen = [one_in(every, range(2), case=case) for case in CASES]
    assert all(chosen)
    assert set().union(*chosen) == {0, 1}


def test_one_in_returns_no_more_than_most_of_a_large_case() -> None:
    chosen = [one_in(EIGHTH, range(1440), case=case) for case in CASES]
    assert {len(set(samples)) for samples in chosen} == {MOST}
    assert all(list(samples) == sorted(samples) for samples in chosen)
    assert len(one_in(1, range(1440), case="a")) == 1440


def test_one_in_meets_every_value_of_an_option_whose_period_divides_its_share() -> None:
    for case in CASES:
        assert {sample % 2 for sample in one_in(EIGHTH, range(1440), case=case)} == {0, 1}


def test_one_in_of_nothing_is_empty() -> None:
    assert not one_in(EIGHTH, [], case="a")


def test_one_in_draws_the_same_samples_on_every_machine() -> None:
    first = [one_in(EIGHTH, range(24), case=case)[0] for case in "abcd"]
    assert first == [3, 9, 11, 6]  # as on every other machine
