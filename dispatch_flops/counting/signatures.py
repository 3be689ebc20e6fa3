"""Hashable signatures of operator calls: what a call's cost depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dispatch_flops.operators.numbers import BY_VALUE, NUMBERS, NumberKeys
from dispatch_flops.operators.tensors import tensors_in

TWICE = (0, 0)  # what a signature ends with if its only two tensors are the same one


def call_signature(args: Any, kwargs: Any, used_params: set[int], numbers: NumberKeys) -> Any:
    """Return a hashable key of what a call's cost depends on.

    numbers: which numbers count by their value, and which by their type.

    Adds the ids of parameters among the arguments to ``used_params``. Raises TypeError for an
    argument without a signature, and RuntimeError for a tensor without a shape.
    """
    key: list[Any] = []
    seen: list[int] = []
    by_value = numbers.by_value
    for a in args:
        cls = a.__class__
        if cls is Tensor or cls is Parameter:
            seen.append(id(a))
            if cls is Parameter:
                used_params.add(id(a))
            key += (a.shape, a.dtype)
            if not a.is_contiguous():
                key.append(_memory_of(a))
        elif cls in by_value:
            key += (cls, a)
        elif cls in NUMBERS:
            key += (cls, a if a in numbers.told_apart else None)
        elif cls is list and a and a[0].__class__ is int and not numbers.in_lists:
            key.append(tuple(a))  # all are ints, as the schema says
        else:
            key += (cls, signature_of(a, used_params, seen, numbers))
    if kwargs:
        key.append(signature_of(kwargs, used_params, seen, numbers))
    if len(seen) > 1 and len({*seen}) < len(seen):  # the memory of a repeated tensor counts once
        key.append(tuple([seen.index(identity) for identity in seen]))
    return tuple(key)


def signature_of(
    value: Any, used_params: set[int], seen: list[int], numbers: NumberKeys = BY_VALUE
) -> Any:
    """Return a hashable stand-in for an argument; raises TypeError if there is none.

    Appends the ids of the tensors in it to ``seen``.
    """
    if isinstance(value, Tensor):
        seen.append(id(value))
        if isinstance(value, Parameter):
            used_params.add(id(value))
        return (value.shape, value.dtype, _memory_of(value))
    if value.__class__ in NUMBERS and value.__class__ not in numbers.by_value:
        return value if value in numbers.told_apart else None
    if isinstance(value, (list, tuple)):
        if not numbers.in_lists:
            numbers = BY_VALUE
        return tuple([(v.__class__, signature_of(v, used_params, seen, numbers)) for v in value])
    if isinstance(value, dict):
        items = value.items()
        return tuple(
            [(k, v.__class__, signature_of(v, used_params, seen, numbers)) for k, v in items]
        )
    if isinstance(value, torch.ScriptObject):  # packed weights: a key would keep them alive
        raise TypeError
    return value


def _memory_of(tensor: Tensor) -> Any:
    """Return what a tensor's bytes depend on besides its shape: its strides if one of them is 0."""
    if tensor.layout is not torch.strided:
        return tensor.layout
    strides = tensor.stride()
    return strides if 0 in strides else None


def all_strided(args: Any, kwargs: Any) -> bool:
    """Return True if no tensor among the arguments is sparse or otherwise irregular."""
    return all(t.layout is torch.strided for t in tensors_in((args, kwargs)))
