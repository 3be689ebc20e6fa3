"""Registering what a kernel allocates for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dispatch_flops import FlopCounterMode, register_workspace
from dispatch_flops.errors import DuplicateFormulaError, FormulaError, UnknownOperatorError
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


def test_workspace_that_raises_is_not_known_and_a_note_says_why() -> None:
    register_workspace(aten.exp)(lambda *_, out, **__: 1 // 0)
    with FlopCounterMode(display=False, memory=True) as counter:
        torch.ones(3, device="meta").exp()
    assert counter.profile.memory is not None
    assert counter.profile.memory.unseen == ("aten.exp.default",)
    (note,) = counter.profile.notes
    assert "aten.exp.default" in note and "ZeroDivisionError" in note


@pytest.mark.parametrize("answer", [-1, 3.0, "3", True, float("nan"), torch.tensor(3)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_workspace_that_is_no_count_is_not_used_and_a_note_says_so(
    answer: Any, device: str
) -> None:
    register_workspace(aten.exp)(lambda *_, out, **__: answer)
    with FlopCounterMode(display=False, memory=True) as counter:
        torch.ones(3, device=device).exp()
    memory = counter.profile.check().memory
    assert memory is not None and memory.peak_bytes == 2 * 3 * 4
    assert memory.unseen == (() if device == "cpu" else ("aten.exp.default",))
    assert any("return an int of bytes" in note for note in counter.profile.notes)


def test_workspace_may_be_an_int_of_numpy() -> None:
    register_workspace(aten.exp)(lambda *_, out, **__: np.int64(7))
    with FlopCounterMode(display=False, memory=True) as counter:
        torch.ones(3).exp()
    memory = counter.profile.check().memory
    assert memory is not None and memory.by_role()["workspace"] == 7


def test_workspace_applies_to_a_call_that_is_given_its_result() -> None:
    register_workspace(aten.exp)(lambda x, *, out: 7 * out.numel())
    x, out = torch.ones(3, 5), torch.empty(3, 5)
    with FlopCounterMode(display=False, memory=True) as counter:
        torch.exp(x, out=out)
    assert counter.profile.memory is not None
    assert counter.profile.memory.by_role()["workspace"] == 7 * 3 * 5


def test_workspace_may_name_an_overload_of_a_library_that_is_loaded_later() -> None:
    register_workspace("workspace_tests_later::copy.default")(lambda x, *, out: 7)
    library = torch.library.Library("workspace_tests_later", "DEF")
    library.define("copy(Tensor x) -> Tensor")
    library.impl("copy", lambda x: x.clone(), "CPU")
    copy = torch.ops.workspace_tests_later.copy
    with FlopCounterMode(
        display=False, memory=True, custom_mapping={copy: lambda x, *, out: 0}
    ) as counter:
        copy(torch.ones(3))
    assert counter.profile.memory is not None
    assert counter.profile.memory.by_role()["workspace"] == 7


@pytest.mark.parametrize(
    ("workspace", "message"),
    [
        (5, "5 is not a function; pass the function itself"),
        (lambda x: 1, "does not accept the operator's result; add a parameter"),
        (lambda x, y, *, out: 1, "does not fit aten.exp"),
    ],
)
def test_workspace_that_no_call_fits_is_an_error(workspace: Any, message: str) -> None:
    with pytest.raises(FormulaError, match=message):
        register_workspace(aten.exp)(workspace)
    assert aten.exp not in workspaces._WORKSPACES


def test_workspace_of_a_misspelt_operator_warns() -> None:
    with pytest.warns(UserWarning, match=r"'aten::cosh'\? The workspace applies only") as found:
        register_workspace("aten::coshh")(lambda x, *, out: 1)
    assert found[0].filename == __file__


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
    with pytest.raises(UnknownOperatorError, match="the list of operators is empty"):
        register_workspace([])
