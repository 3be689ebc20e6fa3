"""Names of operators that do not exist, though their library is loaded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from dispatch_flops import (
    FlopCounterMode,
    _torch,
    counting_backend,
    overridden,
    register_flops,
    register_workspace,
)
from dispatch_flops.operators.registry import unregister_flops


def cost(*_: Any, **__: Any) -> int:
    return 0


@pytest.mark.parametrize(
    ("name", "meant"),
    [("aten::gellu", "aten::gelu"), ("aten::sum.dim_IntLst", "aten::sum.dim_IntList")],
)
def test_misspelt_operator_is_warned_of_with_the_nearest_name(name: str, meant: str) -> None:
    with pytest.warns(UserWarning, match=f"no operator is named '{name}'; did you mean '{meant}'"):
        register_flops(name)(cost)
    unregister_flops(name)


def test_misspelt_operator_of_one_counter_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="did you mean 'aten::gelu'"):
        FlopCounterMode(display=False, custom_mapping={"aten::gellu": cost})


def override(formulas: dict[str, Any]) -> None:
    with overridden(formulas):
        pass


@pytest.mark.parametrize(
    "use",
    [
        override,
        lambda formulas: FlopCounterMode(display=False, custom_mapping=formulas),
        lambda formulas: counting_backend("eager", custom_mapping=formulas),
        lambda formulas: register_workspace(*formulas, override=True)(cost),
    ],
)
def test_warning_of_a_misspelt_operator_names_the_line_of_the_program(use: Any) -> None:
    with pytest.warns(UserWarning, match="did you mean 'aten::gelu'") as found:
        use({"aten::gellu": cost})
    assert [warning.filename for warning in found] == [__file__]


def test_name_that_is_like_none_of_its_library_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="no operator is named 'aten::quite_another_operator' in"):
        FlopCounterMode(display=False, custom_mapping={"aten::quite_another_operator": cost})


def test_names_of_operators_are_listed_once_for_many_registrations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed: list[None] = []
    list_names = _torch.all_operator_names

    def counted() -> list[str]:
        listed.append(None)
        return list_names()

    monkeypatch.setattr(_torch, "all_operator_names", counted)
    names = [f"dispatch_flops_unloaded::operator{i}" for i in range(50)]
    for name in names:
        register_flops(name)(cost)
    unregister_flops(names)
    assert len(listed) <= 1


@pytest.mark.parametrize(
    "name", ["dispatch_flops_unloaded::gelu", "aten::gelu", "aten::fill_diagonal"]
)
def test_name_that_may_be_meant_is_accepted_silently(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FlopCounterMode(display=False, custom_mapping={name: cost})


def test_warning_points_at_the_registration() -> None:
    with pytest.warns(UserWarning) as caught:

        @register_flops("aten::gellu")
        def gellu(x: torch.Tensor, *, out: torch.Tensor) -> int:
            return 0

    unregister_flops("aten::gellu")
    assert caught[0].filename == __file__
