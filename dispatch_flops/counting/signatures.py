"""Hashable signatures of operator calls: what a call's cost depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dispatch_flops.operators.tensors import tensors_in

_SCALARS = frozenset((int, bool, float, type(None)))


def call_signature(args: Any, kwargs: Any, used_params: set[int]) -> Any:
    """Return a hashable key of what a call's cost depends on.

    Adds the ids of parameters among the arguments to ``used_params``. Raises TypeError for an
    argument without a signature, and RuntimeError for a tensor without a shape.
    """
    key: list[Any] = []
    for a in args:
        cls = a.__class__
        if cls is Tensor:
            key += (a.shape, a.dtype, a.layout)
        elif cls is Parameter:
            used_params.add(id(a))
            key += (a.shape, a.dtype, a.layout)
        elif cls in _SCALARS:
            key += (cls, a)
        elif cls is list and a and a[0].__class__ is int:  # all are, as the schema says
            key.append(tuple(a))
        else:
            key += (cls, signature_of(a, used_params))
    if kwargs:
        key.append(signature_of(kwargs, used_params))
    return tuple(key)


def signature_of(value: Any, used_params: set[int]) -> Any:
    """Return a hashable stand-in for an argument; raises TypeError if there is none."""
    if isinstance(value, Tensor):
        if isinstance(value, Parameter):
            used_params.add(id(value))
        return (value.shape, value.dtype, value.layout)
    if isinstance(value, (list, tuple)):
        return tuple([(v.__class__, signature_of(v, used_params)) for v in value])
    if isinstance(value, dict):
        return tuple([(k, v.__class__, signature_of(v, used_params)) for k, v in value.items()])
    if isinstance(value, torch.ScriptObject):  # packed weights: a key would keep them alive
        raise TypeError
    return value


def all_strided(args: Any, kwargs: Any) -> bool:
    """Return True if no tensor among the arguments is sparse or otherwise irregular."""
    return all(t.layout is torch.strided for t in tensors_in((args, kwargs)))
