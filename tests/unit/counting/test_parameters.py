"""Facts of the parameters of modules, and counts for holders that hold each other in any way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dispatch_flops.counting.held_tensors import HeldTensors
from dispatch_flops.counting.parameters import (
    ParameterCounts,
    ParameterFacts,
    ParameterTable,
    count_held,
)

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


def test_table_has_the_facts_of_each_modules_own_parameters_as_they_were() -> None:
    first, none, second = nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7, bias=False)
    second.weight.requires_grad_(False)
    table = ParameterTable(HeldTensors([first, none, second]))
    first.requires_grad_(False)
    assert table.of(0) == (
        ParameterFacts(id(first.weight), 3 * 5, True, False, 3 * 5),
        ParameterFacts(id(first.bias), 5, True, False, 5),
    )
    assert table.of(1) == ()
    assert table.of(2) == (ParameterFacts(id(second.weight), 5 * 7, False, False, 5 * 7),)
    assert table.keys == [id(first.weight), id(first.bias), id(second.weight)]


class _Subclass(torch.Tensor):
    pass


def _partitioned() -> nn.Module:
    """Return what ZeRO-3 leaves of a layer: an empty parameter that knows its size."""
    module = nn.Linear(2, 11, bias=False)
    module.weight.data = torch.empty(0)
    module.weight.ds_numel = 2 * 11  # type: ignore[assignment]
    module.weight.ds_tensor = torch.empty(11)  # type: ignore[assignment]
    return module


def _offloaded() -> nn.Module:
    module = nn.Linear(2, 11, bias=False, device="meta")
    module._hf_hook = object()  # type: ignore[assignment]
    return module


def _subclass() -> nn.Module:
    module = nn.Linear(2, 11, bias=False)
    module.weight = nn.Parameter(torch.ones(11, 2).as_subclass(_Subclass))
    return module


SPECIAL: dict[str, tuple[Callable[[], nn.Module], tuple[int, bool, bool, int]]] = {
    "partitioned": (_partitioned, (2 * 11, True, False, 11)),
    "offloaded": (_offloaded, (2 * 11, True, True, 2 * 11)),
    "subclass": (_subclass, (2 * 11, True, True, 2 * 11)),
    "lazy": (lambda: nn.LazyLinear(11, bias=False), (0, True, True, 0)),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_special_parameter_is_read_for_what_it_stands_for(kind: str) -> None:
    make, expected = SPECIAL[kind]
    ordinary, special = nn.Linear(3, 5, bias=False), make()
    table = ParameterTable(HeldTensors([ordinary, special]))
    assert table.keys is None
    assert table.of(0) == (ParameterFacts(id(ordinary.weight), 3 * 5, True, False, 3 * 5),)
    assert table.of(1) == (ParameterFacts(id(special.weight), *expected),)
