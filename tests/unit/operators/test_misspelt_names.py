"""Names of operators that do not exist, though their library is loaded."""

from __future__ import annotations

import warnings

import pytest
import torch

from dispatch_flops import FlopCounterMode, register_flops
from dispatch_flops.operators.registry import unregister_flops


@pytest.mark.parametrize(
    ("name", "meant"),
    [("aten::gellu", "aten::gelu"), ("aten::sum.dim_IntLst", "aten::sum.dim_IntList")],
)
def test_misspelt_operator_is_warned_of_with_the_nearest_name(name: str, meant: str) -> None:
    with pytest.warns(UserWarning, match=f"no operator is named '{name}'; did you mean '{meant}'"):
        register_flops(name)(lambda *_, **__: 0)
    unregister_flops(name)


def test_misspelt_operator_of_one_counter_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="did you mean 'aten::gelu'"):
        FlopCounterMode(display=False, custom_mapping={"aten::gellu": lambda *_, **__: 0})


@pytest.mark.parametrize(
    "name", ["dispatch_flops_unloaded::gelu", "aten::quite_another_operator", "aten::gelu"]
)
def test_name_that_may_be_meant_is_accepted_silently(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FlopCounterMode(display=False, custom_mapping={name: lambda *_, **__: 0})


def test_warning_points_at_the_registration() -> None:
    with pytest.warns(UserWarning) as caught:

        @register_flops("aten::gellu")
        def gellu(x: torch.Tensor, *, out: torch.Tensor) -> int:
            return 0

    unregister_flops("aten::gellu")
    assert caught[0].filename == __file__
