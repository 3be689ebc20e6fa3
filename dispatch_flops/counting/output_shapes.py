"""Shapes of the tensors that a module returned."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.operators.interrupts import is_of_signal_handler
from dispatch_flops.operators.tensors import tensors_in, untraced

Shapes = tuple[tuple[int, ...] | None, ...]

_MOST = 8  # tensors of one output
_Tensor = torch.Tensor
_ORDINARY = frozenset((_Tensor, type(None)))
_function_modes = _torch.function_modes
_tracing_state = _torch.tracing_state


def shapes_of(output: Any) -> Shapes:
    """Return the shapes of the first tensors in an output; None for a nested one.

    A size that is a symbol is -1. An output that cannot be read has no shapes.
    """
    if not _function_modes() and _tracing_state() is None:  # else reading a shape may do more
        if output.__class__ is _Tensor:
            return (_shape(output),)  # the common case of what follows, which takes twice as long
        values = output if output.__class__ is tuple else (output,)
        if _ORDINARY.issuperset(map(type, values)):
            tensors = [tensor for tensor in values if tensor is not None]
            return tuple(map(_shape, tensors[:_MOST]))
    try:
        with untraced(), _torch.modes_disabled(), _torch.torch_functions_disabled():
            return tuple(map(_shape, islice(tensors_in(output), _MOST)))
    except Exception as error:  # a container of the program's own may raise
        if is_of_signal_handler(error):
            raise
        return ()


def _shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    if tensor.is_nested:
        return None
    return tuple([size if type(size) is int else -1 for size in tensor.shape])
