"""What the cost of a root call and of an optimizer's step depends on, as hashable values."""

from __future__ import annotations

import enum
import functools
from collections.abc import Hashable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from dispatch_flops import _torch
from dispatch_flops.operators import registry
from dispatch_flops.profilers.model_state import ModelState

OPAQUE: Final = "opaque"  # stands for inputs whose size only their data tells

_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
_COST_NOTHING = frozenset(("params", "lr", "initial_lr"))  # of an optimizer's options
_DEEPEST = 12  # levels of nested inputs; a deeper one, or a cycle, is opaque


class _OpaqueInputError(Exception):
    """The cost of a call on this input cannot be told without its data."""


def call_signature(model: ModelState, args: Any, kwargs: Any) -> Hashable:
    """Return the signature of a root call that starts now; ``OPAQUE`` if it cannot have one.

    It holds the inputs (shapes, dtypes and plain values), the modes of autograd and autocast, the
    transforms of ``torch.func`` that the call runs in, the formulas of the user's that apply, and
    the state of the model.
    """
    try:
        inputs = (_describe(args, 0), _describe(kwargs, 0) if kwargs else None)
    except _OpaqueInputError:
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
    """Return the signature of a step of the optimizer that starts now.

    It holds which parameters have gradients, how many have a state, and which options are set.
    Values such as the learning rate do not change the cost; whether they are 0 does.
    """
    found: list[Hashable] = [len(getattr(optimizer, "state", ()))]
    for group in getattr(optimizer, "param_groups", ()):
        found.append(bytes([one.grad is not None for one in group["params"]]))
        found += [
            (name, bool(value) if isinstance(value, (int, float)) else value.__class__)
            for name, value in group.items()
            if name not in _COST_NOTHING
        ]
    return tuple(found)


def _autocast() -> Hashable:
    return tuple(
        [torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in _devices()]
    )


@functools.cache
def _devices() -> tuple[str, ...]:
    found = torch.accelerator.current_accelerator()
    return ("cpu",) if found is None else ("cpu", found.type)


def _describe(value: Any, depth: int) -> Hashable:
    kind = value.__class__
    if kind in _PLAIN:
        return (kind, value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise _OpaqueInputError
        return (kind, value.shape, value.dtype, value.device, value.requires_grad)
    if depth > _DEEPEST:
        raise _OpaqueInputError
    if isinstance(value, Mapping):
        return (
            kind,
            tuple((_describe(k, depth + 1), _describe(value[k], depth + 1)) for k in value),
        )
    if isinstance(value, (list, tuple)):
        return (kind, tuple([_describe(part, depth + 1) for part in value]))
    if isinstance(value, enum.Enum):
        return (kind, value.name)
    if isinstance(value, (nn.Module, type)):
        return (kind, id(value))
    if callable(value) and hasattr(value, "__qualname__"):
        return (kind, value.__module__, value.__qualname__)
    if not hasattr(value, "__dict__"):  # an array of another library, a generator, ...
        raise _OpaqueInputError
    return (kind, _describe(vars(value), depth + 1))
