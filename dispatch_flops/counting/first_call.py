"""Facts of a model's call: its input tensors and the modes that torch is in."""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.operators.interrupts import is_of_signal_handler
from dispatch_flops.operators.tensors import is_strided_nested, name_of_dtype, untraced
from dispatch_flops.profile import TensorInput

Arguments = tuple[Sequence[Any], Mapping[str, Any]]  # positional and keyword arguments


def call_facts(
    model: nn.Module, method: Callable[..., Any], arguments: Arguments | None
) -> dict[str, Any]:
    """Return the fields of ``RunInfo`` that describe a call of the model that starts now.

    method: what is called, a method of the model. arguments: None where they are not known.
    """
    inputs = None if arguments is None else _tensor_inputs(method, *arguments)
    return {
        "inputs": inputs,
        "training": bool(getattr(model, "training", False)),  # a frozen TorchScript module has none
        "grad_mode": _grad_mode(),
        "autocast": autocast_of(model, inputs),
    }


def autocast_of(model: nn.Module, inputs: Iterable[TensorInput] | None) -> str | None:
    """Return the dtype of the autocast that is on for the model's devices; None where it is off."""
    devices = {torch.device(tensor.device).type for tensor in inputs or ()}
    for kind in sorted(devices | _device_types(model)):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            return name_of_dtype(torch.get_autocast_dtype(kind))
    return None


def _device_types(model: nn.Module) -> set[str]:
    """Return the device type of the model's first parameters; empty without parameters.

    ``model.parameters()`` recurses, and a model may be deeper than Python's stack.
    """
    stack: list[nn.Module | None] = [model]
    seen: set[int] = set()
    with _torch.modes_disabled():
        while stack:
            module = stack.pop()
            if module is None or id(module) in seen:
                continue
            found = {p.device.type for p in module._parameters.values() if p is not None}
            if found:
                return found
            seen.add(id(module))
            stack += reversed([*module._modules.values()])
    return set()


def _grad_mode() -> str:
    if torch.is_inference_mode_enabled():
        return "inference"
    return "grad" if torch.is_grad_enabled() else "no_grad"


def _tensor_inputs(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[TensorInput, ...] | None:
    """Return the tensors among the arguments; None if one cannot be read."""
    try:
        with untraced(), _torch.modes_disabled(), _torch.torch_functions_disabled():
            return tuple(
                _describe(name, tensor)
                for argument, value in _named_arguments(method, args, kwargs)
                for name, tensor in _named_tensors(argument, value, set())
            )
    except Exception as error:  # a container of the program's own may raise
        if is_of_signal_handler(error):
            raise
        return None


def _named_arguments(
    method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    positional = _positional_names(method)
    for position, value in enumerate(args):
        yield positional[position] if position < len(positional) else str(position), value
    yield from kwargs.items()


def _positional_names(method: Callable[..., Any]) -> Sequence[str]:
    """Return the names of the positional parameters, without that of the object itself."""
    function = inspect.unwrap(getattr(method, "__func__", method), stop=_states_signature)
    if isinstance(function, FunctionType) and not _states_signature(function):
        code = function.__code__  # inspect.signature takes 20 times as long
        return code.co_varnames[inspect.ismethod(method) : code.co_argcount]
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # a function without a signature
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def _states_signature(function: Any) -> bool:
    return hasattr(function, "__signature__")


def _named_tensors(
    path: str, value: Any, containers: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in nested containers with its path, as ``tensors_in`` finds them.

    containers: the ids of those that hold ``value``; one that holds itself is not followed.
    """
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if id(value) in containers:
        return
    items: Iterator[tuple[Any, Any]]
    if isinstance(value, (list, tuple, deque)):
        items = iter(enumerate(value))
    elif isinstance(value, Mapping):
        items = iter(value.items())
    elif dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        items = ((field.name, getattr(value, field.name, None)) for field in fields)
    else:
        return
    for name, item in items:
        yield from _named_tensors(f"{path}.{name}", item, containers | {id(value)})


def _describe(name: str, tensor: torch.Tensor) -> TensorInput:
    sizes = None if is_strided_nested(tensor) else tuple(tensor.shape)
    shape = None if sizes is None else tuple(n if type(n) is int else -1 for n in sizes)
    return TensorInput(
        name=name,
        shape=None if tensor.is_nested else shape,
        dtype=name_of_dtype(tensor.dtype),
        device=str(tensor.device),
    )
