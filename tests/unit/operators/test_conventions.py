"""Conventions: defaults, and which ones a formula sees."""

from __future__ import annotations

import threading

import pytest
import torch

from dispatch_flops.operators.conventions import Conventions, conventions, using
from tests.helpers.profiling import profile_of


def test_conventions_outside_a_block_are_the_defaults() -> None:
    assert conventions() == Conventions(causal="full", subclass="executed", meta_value=None)


def test_using_nests_and_restores_on_exception() -> None:
    half, logical = Conventions(causal="half"), Conventions(subclass="logical")
    with using(half):
        with pytest.raises(ValueError, match="stop"), using(logical):
            assert conventions() is logical
            raise ValueError("stop")
        assert conventions() is half
    assert conventions() == Conventions()


def test_using_does_not_reach_other_threads() -> None:
    seen = []
    with using(Conventions(causal="half")):
        thread = threading.Thread(target=lambda: seen.append(conventions()))
        thread.start()
        thread.join()
    assert seen == [Conventions()]


@pytest.mark.parametrize("causal", ["full", "half"])
def test_formula_sees_the_conventions_of_its_counter(causal: str) -> None:
    seen = []

    def formula(*_: object, out: object, **__: object) -> int:
        seen.append(conventions().causal)
        return 0

    profile_of(torch.mm, torch.ones(2, 3), torch.ones(3, 5), causal=causal,
               custom_mapping={torch.ops.aten.mm: formula})  # fmt: skip
    assert seen == [causal]
