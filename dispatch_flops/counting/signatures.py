"""Hashable signatures of operator calls: what a call's cost depends on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from dispatch_flops import _torch
from dispatch_flops.operators.memory import has_overlap
from dispatch_flops.operators.numbers import BY_VALUE, NUMBERS, NumberKeys

_storage = _torch.storage_address


def call_signature(args: Any, kwargs: Any, used_params: set[int], numbers: NumberKeys) -> Any:
    """Return a hashable key of what a call's cost depends on.

    numbers: which numbers count by their value, and which by their type.

    Adds the ids of parameters among the arguments to ``used_params``. Raises TypeError for an
    argument without a signature, and RuntimeError for a tensor without a shape or a storage, as
    nested and sparse ones are.
    """
    key: list[Any] = []
    tensors: list[Tensor] = []
    by_value = numbers.by_value
    for a in args:
        cls = a.__class__
        if cls is Tensor or cls is Parameter:
            tensors.append(a)
            if cls is Parameter:
                used_params.add(id(a))
            key += (a.shape, a.dtype)
            if not a.is_contiguous():  # whether elements share memory takes longer to find out
                key.append(a.stride())
        elif cls in by_value:
            key += (cls, a)
        elif cls in NUMBERS:
            key += (cls, a if a in numbers.told_apart else None)
        elif cls is list and a and a[0].__class__ is int and not numbers.in_lists:
            key.append(tuple(a))  # all are ints, as the schema says
        else:
            key += (cls, signature_of(a, used_params, tensors, numbers))
    if kwargs:
        key.append(signature_of(kwargs, used_params, tensors, numbers))
    if tensors:  # kernels of devices differ in what they keep, such as statistics in float32
        key.append(tensors[0].device)
    if len(tensors) == 1:
        if tensors[0].is_sparse:  # the shape does not tell how much is stored
            raise TypeError
    elif len({*map(_storage, tensors)}) < len(tensors):
        key.append(_views(tensors))
    return tuple(key)


def signature_of(
    value: Any, used_params: set[int], tensors: list[Tensor], numbers: NumberKeys = BY_VALUE
) -> Any:
    """Return a hashable stand-in for an argument; raises TypeError if there is none.

    Appends the tensors in it to ``tensors``.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise TypeError
        tensors.append(value)
        if isinstance(value, Parameter):
            used_params.add(id(value))
        shape, strides = value.shape, value.stride()
        return (shape, value.dtype, strides if has_overlap(shape, strides) else None)
    if value.__class__ in NUMBERS and value.__class__ not in numbers.by_value:
        return value if value in numbers.told_apart else None
    if isinstance(value, (list, tuple)):
        if not numbers.in_lists:
            numbers = BY_VALUE
        return tuple([(v.__class__, signature_of(v, used_params, tensors, numbers)) for v in value])
    if isinstance(value, dict):
        items = value.items()
        return tuple(
            [(k, v.__class__, signature_of(v, used_params, tensors, numbers)) for k, v in items]
        )
    if isinstance(value, torch.ScriptObject):  # packed weights: a key would keep them alive
        raise TypeError
    return value


def _views(tensors: list[Tensor]) -> Any:
    """Return what each tensor that shares a storage with others shows of it.

    That is a number for the storage, the offset in bytes from the first of its tensors, and the
    strides unless the tensor is contiguous.
    """
    storages = [*map(_storage, tensors)]
    shared = [storage for storage, count in Counter(storages).items() if count > 1]
    numbers = {storage: number for number, storage in enumerate(shared)}
    starts: dict[int, Any] = {}
    views = []
    for tensor, storage in zip(tensors, storages, strict=True):
        if storage in numbers:
            start = tensor.storage_offset() * tensor.element_size()
            offset = start - starts.setdefault(storage, start)
            strides = None if tensor.is_contiguous() else tensor.stride()
            views.append((numbers[storage], offset, strides))
    return tuple(views)
