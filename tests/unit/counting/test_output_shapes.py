"""Shapes of what modules return."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.counting.output_shapes import shapes_of


def profile_of(model: nn.Module, *args: Any) -> Profile:
    with FlopCounterMode(model, display=False) as counter:
        model(*args)
    return counter.profile


def test_every_called_module_has_the_shape_of_its_output() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Unflatten(1, (5, 1)))
    profile = profile_of(model, torch.ones(7, 3))
    shapes = {node.fqn: node.output_shapes for node in profile.root.walk()}
    assert shapes == {"": ((7, 5, 1),), "0": ((7, 5),), "1": ((7, 5, 1),)}


def test_first_call_decides() -> None:
    model = nn.Linear(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        model(torch.ones(7, 3))
        model(torch.ones(11, 3))
    assert counter.profile.root.output_shapes == ((7, 5),)


def test_module_that_was_not_called_has_none() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 5), "unused": nn.Linear(3, 5)})
    with FlopCounterMode(model, display=False) as counter:
        model["used"](torch.ones(7, 3))
    assert counter.profile.node("unused").output_shapes is None
    assert counter.profile.root.output_shapes is None


def test_call_that_raises_is_not_the_first_output() -> None:
    model = nn.Linear(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        with pytest.raises(RuntimeError):
            model(torch.ones(7, 4))
        model(torch.ones(2, 3))
    assert counter.profile.root.output_shapes == ((2, 5),)


def test_nested_outputs_are_read_in_order() -> None:
    output, (hidden, cell) = nn.LSTM(3, 5)(torch.ones(7, 2, 3))
    assert shapes_of((output, {"h": hidden, "c": [cell]})) == ((7, 2, 5), (1, 2, 5), (1, 2, 5))


def test_first_eight_tensors_of_an_output_are_read() -> None:
    tensors = [torch.ones(size) for size in range(1, 11)]
    expected = tuple((size,) for size in range(1, 9))
    with_nones = (None, *tensors[:3], None, *tensors[3:])
    for output in (with_nones, tensors, dict(enumerate(tensors))):
        assert shapes_of(output) == expected


def test_output_without_tensors_has_no_shapes() -> None:
    assert shapes_of((None, None)) == ()
    assert shapes_of("text") == ()
    assert shapes_of(None) == ()


def test_nested_tensor_has_no_sizes() -> None:
    parts = [torch.ones(2, 3), torch.ones(5, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert shapes_of((nested, torch.ones(7))) == (None, (7,))


def test_container_that_cannot_be_read_has_no_shapes() -> None:
    class Locked(dict[str, Any]):
        def values(self) -> Any:
            raise PermissionError

    assert shapes_of(Locked(x=torch.ones(3))) == ()


def test_reading_shapes_is_invisible_to_a_function_mode() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    plain = torch.ones(3, 5)
    with Watch():
        assert shapes_of(plain) == ((3, 5),)
        assert seen == []
        shapes_of([nn.Parameter(torch.Tensor.__new__(torch.Tensor, 7))])
    assert [func for func in seen if "__get__" in repr(func)] == []


def test_shapes_survive_saving() -> None:
    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    assert Profile.from_json(profile.to_json()).root.output_shapes == ((7, 5),)
