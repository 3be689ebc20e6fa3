"""A model's inputs, and calls of it with them."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.errors import TargetError
from dispatch_flops.operators.tensors import tensors_in

_CONTAINERS = (dict, OrderedDict, list, set)  # no subclasses: they may do more when written to


def is_compiled(model: nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        for module in model.modules()
    )


def caller(
    model: nn.Module, mode: str, inputs: Sequence[Any], named: Mapping[str, Any]
) -> Callable[[], Any]:
    """Calls the model, or a method of it, with these inputs."""
    method = model if mode == "forward" else getattr(model, str(mode), None)
    if not callable(method):
        raise TargetError(f"mode={mode!r}: {type(model).__name__} has no method of that name")

    def call() -> Any:
        try:
            return method(*inputs, **named)
        except TypeError as error:
            if not inputs and not named:
                error.add_note("It was given no input: pass input_shape, args or kwargs.")
            raise

    return call


def make_inputs(
    model: nn.Module, shape: Sequence[int] | None, args: Sequence[Any], device: str | None
) -> list[Any]:
    if isinstance(args, (torch.Tensor, str)) or not isinstance(args or (), Iterable):
        raise TargetError(
            f"args is a {type(args).__name__}; pass a list of the inputs, such as [x]"
        )
    if shape is None:
        return list(moved(list(args or ()), device))
    if args:
        raise TargetError("input_shape and args exclude each other: args are the inputs themselves")
    sizes = _sizes(shape)
    numeric = (p for p in model.parameters() if p.is_floating_point() or p.is_complex())
    first = next(numeric, None)
    where = device or (first.device if first is not None else None)
    dtype = first.dtype if first is not None else None
    return [torch.ones(sizes, dtype=dtype, device=where)]


def _sizes(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes) or any(isinstance(size, bool) for size in shape):
        raise TargetError(f"input_shape={shape!r}: pass a tuple of ints of at least 0")
    return sizes


def moved(value: Any, device: str | None) -> Any:
    """Nested inputs on ``device``; as they are for None."""
    if device is None:
        return value
    return _torch.tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


def with_backward(run: Callable[[], Any], leaves: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """Each run starts without gradients: otherwise a second one would accumulate."""

    def forward_and_backward() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs = [t for t in tensors_in(run()) if t.requires_grad]
        if not outputs:
            raise TargetError("backward: no output of the model requires a gradient")
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])

    return forward_and_backward


def submodule(model: nn.Module, fqn: str) -> nn.Module | None:
    """The module of that name, ``torch.compile``'s wrappers looked through; None if none is."""
    module = _unwrapped(model)
    for name in fqn.split(".") if fqn else ():
        below = _held_as(name, module)
        if below is None:
            return None
        module = _unwrapped(below)
    return module


def _unwrapped(module: nn.Module) -> nn.Module:
    while (inner := _held_as("_orig_mod", module)) is not None:
        module = inner
    return module


def _held_as(name: str, module: nn.Module) -> nn.Module | None:
    if name not in module._modules:  # TorchScript's has no get
        return None
    return module._modules[name]
