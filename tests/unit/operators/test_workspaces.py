"""Registering what a kernel allocates for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dispatch_flops import FlopCounterMode, register_workspace
from dispatch_flops.errors import DuplicateFormulaError, UnknownOperatorError
from dispatch_flops.operators import workspaces

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def own_workspaces() -> Iterator[None]:
    before = dict(workspaces._WORKSPACES)
    yield
    workspaces._WORKSPACES.clear()
    workspaces._WORKSPACES.update(before)


def test_registered_workspace_raises_the_peak() -> None:
    @register_workspace(aten.exp)
    def exp(x: torch.Tensor, *, out: torch.Tensor, **_: Any) -> int:
        return 7 * x.numel() + out.element_size()

    x = torch.ones(3, 5)
    with FlopCounterMode(display=False, memory=True) as counter:
        x.exp()
    memory = counter.profile.check().memory
    assert memory is not None
    assert memory.by_role()["workspace"] == 7 * 3 * 5 + 4
    assert memory.peak_bytes == 2 * 3 * 5 * 4 + 7 * 3 * 5 + 4
    assert not memory.is_lower_bound


@torch.library.custom_op("workspace_tests::copy", mutates_args=())
def copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    "target", [copy, "workspace_tests::copy", [torch.ops.workspace_tests.copy]]
)
def test_workspace_of_a_custom_operator_is_registered_as_its_formula_is(target: Any) -> None:
    register_workspace(target)(lambda x, *, out: 7 * x.numel())
    x = torch.ones(3, 5)
    with FlopCounterMode(
        display=False, memory=True, custom_mapping={copy: lambda x, *, out: 0}
    ) as c:
        copy(x)
    assert c.profile.memory is not None
    assert c.profile.memory.by_role()["workspace"] == 7 * 3 * 5


def test_workspace_that_is_not_known_makes_the_peak_a_lower_bound() -> None:
    register_workspace([aten.exp.default])(lambda *_, out, **__: None)
    with FlopCounterMode(display=False, memory=True) as counter:
        torch.ones(3, device="meta").exp()
    memory = counter.profile.memory
    assert memory is not None and memory.is_lower_bound
    assert memory.unseen == ("aten.exp.default",)


def test_workspace_that_is_not_known_is_asked_of_the_allocator_on_the_cpu() -> None:
    register_workspace(aten.exp)(lambda *_, out, **__: None)
    with FlopCounterMode(display=False, memory=True) as counter:
        torch.ones(3).exp()
    memory = counter.profile.memory
    assert memory is not None and not memory.is_lower_bound
    assert memory.peak_bytes == 2 * 3 * 4


def test_workspace_that_raises_is_not_known() -> None:
    register_workspace(aten.exp)(lambda *_, out, **__: 1 // 0)
    with FlopCounterMode(display=False, memory=True) as counter:
        torch.ones(3, device="meta").exp()
    assert counter.profile.memory is not None
    assert counter.profile.memory.unseen == ("aten.exp.default",)


def test_second_workspace_of_an_operator_is_an_error() -> None:
    register_workspace(aten.exp)(lambda *_, out, **__: 1)
    with pytest.raises(DuplicateFormulaError, match="has a workspace already"):
        register_workspace(aten.exp)
    register_workspace(aten.exp, override=True)(lambda *_, out, **__: 2)


def test_workspace_that_ships_cannot_be_replaced_by_mistake() -> None:
    with pytest.raises(DuplicateFormulaError):
        register_workspace(aten._scaled_dot_product_flash_attention_for_cpu)


def test_target_that_is_not_an_operator_is_an_error() -> None:
    with pytest.raises(UnknownOperatorError, match="is not an operator"):
        register_workspace(torch.exp)
