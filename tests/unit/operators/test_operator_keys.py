"""Names and keys of operators, Triton kernels and module classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.operators.operator_keys import (
    candidate_keys,
    find_loaded,
    lacking,
    name_of,
    overloads_of,
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


def test_keys_of_operators_are_their_names_however_they_are_given() -> None:
    assert to_keys([aten.mm, "aten::mm"]) == ["aten::mm", "aten::mm"]
    assert to_keys([aten.mm.default, "aten::mm.default"]) == ["aten::mm.default"] * 2


def test_key_of_a_higher_order_operator_is_the_operator_however_it_is_given() -> None:
    cond = torch.ops.higher_order.cond
    assert to_keys([cond, "higher_order::cond"]) == [cond, cond]


def test_to_keys_of_nested_collections_is_flat() -> None:
    targets = [aten.mm, ("aten::add.Tensor", [nn.Linear]), "mylib::fused"]
    assert to_keys(targets) == ["aten::mm", "aten::add.Tensor", nn.Linear, "mylib::fused"]


def test_candidate_keys_of_an_in_place_overload_are_the_most_exact_first() -> None:
    assert candidate_keys(aten.add_.Tensor) == ["aten::add_.Tensor", "aten::add_", "aten::add"]
    assert candidate_keys(aten.add.Tensor) == ["aten::add.Tensor", "aten::add"]
    assert candidate_keys(aten.add_) == ["aten::add_", "aten::add"]


def test_operator_between_double_underscores_has_no_functional_form() -> None:
    assert candidate_keys(aten.__iand__.Tensor) == ["aten::__iand__.Tensor", "aten::__iand__"]


def test_overloads_of_a_name_are_those_that_are_loaded() -> None:
    assert aten.add.Tensor in overloads_of("aten::add")
    assert overloads_of("aten::add.Tensor") == [aten.add.Tensor]
    assert overloads_of("mylib::fused") == overloads_of(nn.Linear) == []


def test_only_a_name_that_a_loaded_library_does_not_have_is_lacking() -> None:
    keys = ("aten::mn", "aten::mm", "aten::mm.default", "not_loaded::op", nn.Linear)
    assert lacking(keys) == {"aten::mn"}


def test_find_loaded_of_a_name_without_an_operator_is_none() -> None:
    assert find_loaded("aten::mm") is aten.mm
    assert find_loaded("aten::mm.default") is aten.mm.default
    assert find_loaded("aten::mn") is None
