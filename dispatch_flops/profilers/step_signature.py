"""What the cost of a root call and of an optimizer's step depends on, as hashable values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Final
from weakref import ref

import torch
from torch.optim import Optimizer

from dispatch_flops import _torch
from dispatch_flops.operators import registry
from dispatch_flops.profilers.model_state import ModelState
from dispatch_flops.profilers.value_description import OpaqueValueError, describe

OPAQUE: Final = "opaque"  # stands for inputs, or options of an optimizer, of unknown cost

_NO_OPTIONS: Final = frozenset(("params", "param_names"))
_COST_NOTHING: Final = frozenset(("lr", "initial_lr"))  # whatever their value
_NUMBERED: Final = 100  # a greater whole number counts steps


def call_signature(model: ModelState, args: Any, kwargs: Any) -> Hashable:
    """Return the signature of a root call that starts now; ``OPAQUE`` if it cannot have one.

    It holds the inputs as ``describe`` describes them, the modes of autograd and autocast, the
    transforms of ``torch.func`` that the call runs in, the formulas of the user's that apply, and
    the state of the model.
    """
    try:
        inputs = (describe(args), describe(kwargs) if kwargs else None)
    except OpaqueValueError:
        return OPAQUE
    return (
        inputs,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        _autocast(),
        _torch.function_transforms(),
        registry.formulas_in_force(),
        *model.signature(),
    )


def optimizer_signature(optimizer: Optimizer) -> Hashable:
    """Return the signature of a step that starts now; ``OPAQUE`` if it cannot have one.

    It holds the class, which parameters have gradients, how many have a state, and the options. Of
    a float it holds whether it is 0, and of a whole number no more than 100: many optimizers count
    their steps in an option.
    """
    found: list[Any] = [optimizer.__class__, len(getattr(optimizer, "state", ()))]
    try:
        for group in getattr(optimizer, "param_groups", ()):
            found.append(bytes([one.grad is not None for one in group["params"]]))
            for name, value in group.items():
                if value is None or value is True or value is False:  # most
                    found.append((name, value))
                elif name not in _NO_OPTIONS:
                    found.append((name, _option(name, value)))
    except OpaqueValueError:
        return OPAQUE
    return tuple(found)


class OptimizerNumbers:
    """Numbers that tell optimizers apart.

    An address would not do: the next optimizer may get it, over parameters of other shapes. The
    number of an optimizer that is gone goes to one over the same parameters, for a program may make
    an optimizer for each step; or, once these are gone, too, over others of the same shapes.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[ref[Optimizer], int]] = {}
        self._alike: dict[Hashable, dict[int, tuple[ref[Any], ref[Any]]]] = {}  # by shapes, number
        self._next = 0
        self._latest: tuple[Callable[[], Any], int] = (lambda: None), 0

    def of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer."""
        latest, number = self._latest  # most programs have one
        if latest() is optimizer:
            return number
        found = self._by_address.get(id(optimizer))
        if found is not None and found[0]() is optimizer:
            self._latest = found
            return found[1]
        groups = getattr(optimizer, "param_groups", ())
        first = next((one for group in groups for one in group["params"]), optimizer)
        alike = self._alike.setdefault(_shapes(optimizer), {})
        free = (
            number
            for number, (held, its_first) in alike.items()
            if held() is None and (its_first() is None or its_first() is first)
        )
        number = next(free, self._next)
        self._next = max(self._next, number + 1)
        alike[number] = ref(optimizer), ref(first)
        self._by_address[id(optimizer)] = alike[number][0], number
        return number


def _shapes(optimizer: Optimizer) -> Hashable:
    return tuple(
        tuple([(_shape(one), one.dtype) for one in group["params"]])
        for group in getattr(optimizer, "param_groups", ())
    )


def _shape(parameter: Any) -> Hashable:
    """Return the shape of a parameter; None for a lazy or a nested one, which has none."""
    return None if _torch.is_lazy(parameter) or parameter.is_nested else parameter.shape


def _option(name: str, value: Any) -> Hashable:
    kind: type = value.__class__
    if name in _COST_NOTHING:
        return kind
    if kind is float:
        return bool(value)
    if kind is int:
        return (min(value, _NUMBERED),)
    return describe(value)


def _autocast() -> Hashable:
    return tuple(
        [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _devices()]
    )


@functools.cache
def _devices() -> tuple[str, ...]:
    found = torch.accelerator.current_accelerator()
    return ("cpu",) if found is None else ("cpu", found.type)
