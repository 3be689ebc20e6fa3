"""Names and keys of operators, Triton kernels and module classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.operators.operator_keys import (
    candidate_keys,
    find_loaded,
    functional_form,
    name_of,
    to_keys,
)

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (aten.mm, "aten.mm"),
        (aten.mm.default, "aten.mm.default"),
        (torch.ops.higher_order.cond, "higher_order.cond"),
        (nn.Linear, "module.Linear"),
        ("mylib::fused", "mylib.fused"),
    ],
)
def test_name_of_key_is_the_profiles_name(key: Any, name: str) -> None:
    assert name_of(key) == name


def test_to_keys_of_nested_collections_is_flat() -> None:
    targets = [aten.mm, ("aten::add.Tensor", [nn.Linear]), "mylib::fused"]
    assert to_keys(targets) == [aten.mm, aten.add.Tensor, nn.Linear, "mylib::fused"]


def test_candidate_keys_of_an_in_place_overload_are_the_most_exact_first() -> None:
    assert candidate_keys(aten.add_.Tensor) == [
        aten.add_.Tensor, aten.add_, aten.add, "aten::add_.Tensor", "aten::add_", "aten::add"
    ]  # fmt: skip


def test_functional_form_of_an_in_place_operator_is_without_underscore() -> None:
    assert functional_form(aten.add_) is aten.add
    assert functional_form(aten.add) is None
    assert functional_form(aten.__iand__) is None


def test_find_loaded_of_a_name_without_an_operator_is_none() -> None:
    assert find_loaded("aten::mm") is aten.mm
    assert find_loaded("aten::mm.default") is aten.mm.default
    assert find_loaded("aten::mn") is None
