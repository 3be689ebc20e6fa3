"""What the cost of a call depends on in a value that is passed to it, as something hashable."""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Collection, Hashable
from typing import Any, Final
from weakref import ref

import torch
from torch import nn

_EXACT: Final = frozenset((bool, int, str, bytes, type(None), torch.dtype, torch.device))
# The plain value of an object of a derived class.
_PLAIN: Final = {int: int.__pos__, float: float.__pos__, complex: complex.__pos__, str: str.__str__}
_BY_IDENTITY: Final = (nn.Module, type, types.ModuleType, types.BuiltinFunctionType)
# What a tokenizer notes of a text, beside the tensors that a model is given.
_NOTES: Final = frozenset((("tokenizers", "Encoding"),))
_DEEPEST: Final = 12  # levels of nested values; a deeper one, or a cycle, is opaque
_MOST: Final = 10_000  # nested values; what holds more, such as a data set, is opaque
_HEAP_TYPE: Final = 1 << 9  # flag of the classes that a program made, and of some built-in ones


class OpaqueValueError(Exception):
    """The cost of a call on this value cannot be told without its data."""


def describe(value: Any) -> Hashable:
    """Return what two values have in common only if calls on them cost the same, data apart.

    A tensor is described by its shape, dtype and device and whether it requires a gradient, and a
    float by whether it is 0: the weight of a loss may change in every step, and rarely decides what
    runs. A module or class is described by its identity, a function by its code, defaults and
    enclosed values, and another object by its attributes.

    Raises OpaqueValueError for a value that has more to it.
    """
    return _describe(value, 0, [_MOST])


def _describe(value: Any, depth: int, room: list[int]) -> Hashable:
    kind = value.__class__
    if kind in _EXACT:
        return (kind, value)
    if kind is torch.Tensor or isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            raise OpaqueValueError
        return (kind, value.shape, value.dtype, value.device, value.requires_grad)
    if kind is float or kind is complex:
        return (kind, value != 0)
    if kind is tuple or kind is list:
        return (kind, _parts(value, depth, room))
    if kind is dict:
        return (kind, _parts(value, depth, room), _parts(value.values(), depth, room))
    if isinstance(value, _BY_IDENTITY):
        return (kind, ref(value))
    if isinstance(value, ref):  # as to a parent: it would lead back here
        return (kind, value().__class__)
    if isinstance(value, enum.Enum):
        return (kind, value.name, repr(value.value))
    if isinstance(value, types.FunctionType):
        return (kind, value.__code__, _parts(_held_by_function(value), depth, room))
    return (kind, _parts(_held_by_object(value, kind), depth, room))


def _parts(values: Collection[Any], depth: int, room: list[int]) -> tuple[Hashable, ...]:
    room[0] -= len(values)
    if depth > _DEEPEST or room[0] < 0:
        raise OpaqueValueError
    return tuple([_describe(value, depth + 1, room) for value in values])


def _held_by_function(function: types.FunctionType) -> list[Any]:
    try:
        enclosed = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a variable that has no value yet
        raise OpaqueValueError from None
    return [*enclosed, function.__defaults__, function.__kwdefaults__, vars(function)]


def _held_by_object(value: Any, kind: type) -> list[Any]:
    """Return all that an object holds: what a built-in class of it holds, and its attributes."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if (kind.__module__, kind.__name__) in _NOTES:
        return []
    plain = next((base for base in _PLAIN if isinstance(value, base)), None)
    held: list[Any] = []
    if isinstance(value, dict):  # another mapping's own iteration need not be over its keys
        held = [list(dict.keys(value)), list(dict.values(value))]
    elif isinstance(value, (list, tuple)):
        held = [list(value)]
    elif plain is not None:
        held = [_PLAIN[plain](value)]
    names = _slots(kind)
    attributes = {name: getattr(value, name) for name in names if hasattr(value, name)}
    if hasattr(value, "__dict__"):
        attributes |= vars(value)
    elif not held and not names:  # a generator, a sentinel, ...
        raise OpaqueValueError
    if not held and not _has_attributes_alone(kind):
        raise OpaqueValueError
    return [*held, attributes]


@functools.lru_cache(maxsize=256)
def _slots(kind: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    )


@functools.lru_cache(maxsize=256)
def _has_attributes_alone(kind: type) -> bool:
    """Return False if objects of this class may hold what only compiled code sees.

    As arrays of other libraries, sets and locks do.
    """
    return issubclass(kind, functools.partial) or all(
        base.__flags__ & _HEAP_TYPE
        and not isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
        for base in kind.__mro__[:-1]
    )
