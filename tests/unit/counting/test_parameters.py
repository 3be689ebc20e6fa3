"""What holders of parameters have in all, however they hold each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dispatch_flops.counting.parameters import ParameterCounts, ParameterFacts, count_held

HOLDERS, PARAMETERS = 7, 9
USED = {1, 2, 5, 8}


def facts(key: int) -> ParameterFacts:
    """Of distinct weights, so that no sum of some is a sum of others."""
    return ParameterFacts(key=key, elements=2**key, is_trainable=key % 3 == 0, is_hidden=False)


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
def test_each_parameter_counts_once_for_all_that_lead_to_it(
    below: list[set[int]], own: list[set[int]]
) -> None:
    """Trees, ties, circles: the definition is what can be reached."""
    held = dict(enumerate(below))
    found = count_held(held, {h: [facts(key) for key in own[h]] for h in held}, USED)
    for holder in held:
        keys = set().union(*(own[other] for other in reached(holder, held)))
        assert found[holder] == ParameterCounts(
            own=sum(2**key for key in own[holder]),
            total=sum(2**key for key in keys),
            active=sum(2**key for key in keys & USED),
            trainable=sum(2**key for key in keys if key % 3 == 0),
        )
