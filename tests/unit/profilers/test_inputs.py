"""The inputs that a model is called with."""

from __future__ import annotations

from collections import UserDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from dispatch_flops import get_model_profile, profile_model
from dispatch_flops.errors import (
    TargetError,
)
from dispatch_flops.profilers.inputs import make_inputs
from tests.helpers.small_net import FLOPS, MACS, PARAMS, B, Net


class NoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self) -> torch.Tensor:
        return self.w @ self.w


def test_inputs_as_args_or_kwargs_give_equal_counts() -> None:
    x = torch.ones(B, 5)
    for given in ({"args": [x]}, {"kwargs": {"x": x}}, {"args": (x,), "kwargs": {"scale": 2.0}}):
        assert get_model_profile(Net(), print_profile=False, as_string=False, **given) == (
            FLOPS,
            MACS,
            PARAMS,
        )


def test_model_without_inputs_is_profiled() -> None:
    _, macs, params = get_model_profile(NoInput(), print_profile=False, as_string=False)
    assert (macs, params) == (3 * 3 * 3, 3 * 3)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"input_shape": (2, -1)}, "input_shape"),
        ({"input_shape": "2,5"}, "input_shape"),
        ({"input_shape": [(2, 5), (2, 5)]}, "or the inputs themselves as args"),
        ({"input_shape": (torch.ones(1, dtype=torch.long),)}, r"holds a Tensor.*args=\[x\]"),
        ({"input_shape": (2, 5), "args": [1]}, "input_shape and args"),
        ({"input_shape": (2, 5), "mode": "nothing"}, "mode='nothing'"),
        ({"input_shape": (2, 5), "device": "cuda"}, "device='cuda'"),
    ],
)
def test_inputs_that_cannot_be_used_raise_target_error(given: dict, named: str) -> None:
    with pytest.raises(TargetError, match=named):
        get_model_profile(Net(), print_profile=False, **given)


def test_model_that_is_not_a_module_raises_target_error() -> None:
    with pytest.raises(TargetError, match="nn.Module"):
        get_model_profile(lambda x: x, (2, 5))  # type: ignore[arg-type]


def test_model_class_is_told_from_an_instance() -> None:
    with pytest.raises(TargetError, match="model is the class Net; pass an instance of it"):
        profile_model(Net, (2, 5))  # type: ignore[arg-type]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Sum(nn.Module):
    def forward(self, pair: Pair) -> torch.Tensor:
        return pair.x + pair.y


@pytest.mark.parametrize("device", [None, "meta"])
def test_inputs_in_a_named_tuple_keep_their_class(device: str | None) -> None:
    pair = Pair(torch.ones(5), torch.ones(5))
    assert profile_model(Sum(), args=[pair], device=device).total().flops == 5


@pytest.mark.parametrize(
    "args", [torch.ones(2, 5), np.ones((2, 5)), b"x", "x", 3, DataLoader([torch.ones(5)])]
)
def test_args_that_are_not_a_list_raise_target_error(args: Any) -> None:
    with pytest.raises(TargetError, match="args is of type .*list"):
        profile_model(Net(), args=args)


@pytest.mark.parametrize("kwargs", [torch.ones(2, 5), np.ones((2, 5)), [], 0])
def test_kwargs_that_are_not_a_dict_raise_target_error(kwargs: Any) -> None:
    with pytest.raises(TargetError, match="kwargs is of type .*dict"):
        profile_model(NoInput(), kwargs=kwargs)


class Columns(UserDict[str, torch.Tensor]):
    """Has no truth value, as a TensorDict has none."""

    def __bool__(self) -> bool:
        raise RuntimeError


@pytest.mark.parametrize("cls", [dict, Columns])
def test_args_by_name_are_told_to_be_kwargs(cls: Any) -> None:
    with pytest.raises(TargetError, match=f"args is of type {cls.__name__}; pass it as kwargs"):
        profile_model(Net(), args=cls(x=torch.ones(2, 5)))


def test_exported_program_is_told_how_to_become_a_module() -> None:
    program = torch.export.export(nn.Linear(3, 5), (torch.ones(2, 3),))
    with pytest.raises(TargetError, match=r"pass torch\.export\.unflatten\(model\)"):
        profile_model(program, (2, 3))  # type: ignore[arg-type]


class Wrapped(nn.Linear):
    """Returns its output in an object of which torch knows nothing."""

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(output=super().forward(x))


@pytest.mark.parametrize(
    ("model", "gradients", "why"),
    [
        (nn.Linear(3, 5).requires_grad_(False), True, "requires a gradient; profile it without"),
        (nn.Linear(3, 5), False, "because gradients are off; leave torch.no_grad"),
        (Wrapped(3, 5), True, "of type SimpleNamespace, in which no tensor is found; return"),
    ],
)
def test_backward_that_cannot_run_says_why(model: nn.Module, gradients: bool, why: str) -> None:
    with torch.set_grad_enabled(gradients), pytest.raises(TargetError, match=why):
        profile_model(model, (2, 3), backward=True)


def test_device_object_and_numpy_shape_are_accepted() -> None:
    assert profile_model(Net(), (B, 5), device=torch.device("meta")).total().macs == MACS
    assert profile_model(Net(), np.array([B, 5])).total().macs == MACS


def test_complex_model_gets_a_complex_input() -> None:
    model = nn.Linear(5, 7, dtype=torch.complex64)
    assert profile_model(model, (B, 5)).total().macs == 4 * B * 5 * 7


def test_missing_input_adds_a_note_to_the_type_error() -> None:
    with pytest.raises(TypeError) as raised:
        profile_model(nn.Linear(2, 3))
    assert raised.value.__notes__ == ["It was given no input: pass input_shape, args or kwargs."]
    with pytest.raises(TypeError) as raised:
        profile_model(nn.Linear(2, 3), args=[torch.ones(2)], kwargs={"nope": 1})
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("device", [None, "meta"])
def test_backward_ends_at_the_inputs(device: str | None) -> None:
    given = torch.ones(B, 5, requires_grad=True)
    computed = given * 3
    profile = profile_model(Net(), args=[computed], backward=True, device=device)
    assert profile.total("backward").macs == 2 * B * 5 * 7 + 2 * B * 7 * 3
    assert not [op for op in profile.outside.ops if op.phase == "backward"]
    assert given.grad is None
    computed.sum().backward()  # its graph is still there
    assert given.grad is not None


def test_backward_to_a_leaf_that_is_moved_to_meta() -> None:
    given = torch.ones(B, 5, requires_grad=True)
    profile = profile_model(Net(), args=[given], backward=True, device="meta")
    assert profile.total("backward").macs == 2 * B * 5 * 7 + 2 * B * 7 * 3
    assert given.grad is None


class Addition(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_tensor_that_is_given_twice_stays_one() -> None:
    x = torch.ones(B, 5)
    for device in (None, "meta"):
        profile = profile_model(Addition(), args=[x], kwargs={"y": x}, device=device)
        assert profile.total().bytes_total == 2 * (B * 5) * 4  # read once, written once


def test_args_without_an_entry_are_none() -> None:
    assert make_inputs(Net(), None, {}, None) == make_inputs(Net(), None, (), None) == []  # type: ignore[arg-type]
