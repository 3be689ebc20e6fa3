"""Counts of parameters for holders that hold each other in any way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatch_flops.counting.parameters import ParameterCounts, ParameterFacts, count_held

HOLDERS, PARAMETERS = 7, 9
USED = {1, 2, 5, 8}


def facts(key: int) -> ParameterFacts:
    """Return facts whose numbers of elements are powers of two: every sum is unique."""
    return ParameterFacts(
        key=key,
        elements=2**key,
        is_trainable=key % 3 == 0,
        is_hidden=False,
        local_elements=2 ** (key + PARAMETERS),
    )


def reached(start: int, held: dict[int, set[int]]) -> set[int]:
    found, queue = {start}, [start]
    for holder in queue:
        queue += held[holder] - found
        found |= held[holder]
    return found


@given(
    st.lists(st.sets(st.integers(0, HOLDERS - 1), max_size=3), min_size=HOLDERS, max_size=HOLDERS),
    st.lists(
        st.sets(st.integers(0, PARAMETERS - 1), max_size=4), min_size=HOLDERS, max_size=HOLDERS
    ),
)
def test_count_held_counts_every_reachable_parameter_once(
    below: list[set[int]], own: list[set[int]]
) -> None:
    """For trees, ties and cycles, a holder has what can be reached from it."""
    held = dict(enumerate(below))
    found = count_held(held, {h: [facts(key) for key in own[h]] for h in held}, USED)
    for holder in held:
        keys = set().union(*(own[other] for other in reached(holder, held)))
        assert found[holder] == ParameterCounts(
            own=sum(2**key for key in own[holder]),
            total=sum(2**key for key in keys),
            active=sum(2**key for key in keys & USED),
            trainable=sum(2**key for key in keys if key % 3 == 0),
            local=sum(2 ** (key + PARAMETERS) for key in keys),
        )
