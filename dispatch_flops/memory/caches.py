"""Caches of keys and values that a model is called with, by Hugging Face's name for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dispatch_flops.counting.python_frames import call_arguments

_NAME = "past_key_values"
# Of the parameter, by class. One that torch makes for a parametrized module holds that module.
_positions: WeakKeyDictionary[type, int | None] = WeakKeyDictionary()


def takes_cache(owner: object) -> bool:
    """Return True for a module whose forward has a parameter ``past_key_values``."""
    cls: Any = type(owner)
    return _position(cls) is not None


def _position(cls: Any) -> int | None:
    """Return the position of the parameter, without ``self``; None if there is none."""
    if cls not in _positions:
        _positions[cls] = _find_position(cls)
    return _positions[cls]


def _find_position(cls: Any) -> int | None:
    try:
        names = list(inspect.signature(cls.forward).parameters)
    except (AttributeError, TypeError, ValueError):
        return None
    return names.index(_NAME) - 1 if _NAME in names else None


def cached_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the keys and values of the cache that the innermost running call of a module was given.

    The cache is a nested container, or an object such as transformers' ``DynamicCache``, whose
    attributes hold tensors or further objects.
    """
    cls: Any = type(module)
    position, arguments = _position(cls), call_arguments(module)
    if position is not None and arguments is not None:
        args, kwargs = arguments
        given = args[position] if position < len(args) else kwargs.get(_NAME)
        yield from tensors_of_cache(given)


def tensors_of_cache(cache: Any) -> Iterator[torch.Tensor]:
    """Yield the keys and values of a cache, a nested container or an object that holds them.

    Tensors without a dimension of tokens and one of features are not yielded, such as the length
    that each layer of transformers' ``StaticCache`` holds.
    """
    yield from (tensor for tensor in _tensors_below(cache, set()) if tensor.dim() > 1)


def _tensors_below(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_below(item, seen)
    elif isinstance(value, dict):
        yield from _tensors_below(list(value.values()), seen)
    elif id(value) not in seen and _is_plain_object(value):
        seen.add(id(value))
        yield from _tensors_below(list(vars(value).values()), seen)


def _is_plain_object(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type))
