"""Weights of quantised modules, which kernels hold in packed form and not as parameters."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

_OF_EACH_MODULE = len(vars(nn.Module()))  # attributes, which hold no packed weights
_Found = dict[tuple[int, tuple[int, ...]], torch.Tensor]  # tensors by address and shape


def packed_values(module: nn.Module) -> tuple[int, ...]:
    """Return the number of values of each packed weight and bias that the module itself holds.

    Packed weights are script objects of torch. Their saved state, the tensors that ``state_dict``
    holds, is read; what has no such state is skipped.
    """
    if module._parameters:
        return ()  # quantised modules have none: the search takes time in large models
    own = vars(module)
    if len(own) == _OF_EACH_MODULE:
        return ()
    values = [*own.values()]
    if torch.ScriptObject not in map(type, values):
        return ()
    found: _Found = {}  # keeps what is unpacked alive, so that addresses are not used twice
    for value in values:
        if isinstance(value, torch.ScriptObject):
            _add_tensors(value, found)
    return tuple(tensor.numel() for tensor in found.values())


def note_on_packed(packed: Iterable[int]) -> tuple[str, ...]:
    """Return a note on packed weights of so many values each; nothing if there are none."""
    sizes = list(packed)
    if not sizes:
        return ()
    return (
        f"{len(sizes)} packed weights and biases with {sum(sizes):,} values are not nn.Parameters: "
        "the numbers of parameters do not include them",
    )


def _add_tensors(value: Any, found: _Found) -> None:
    """Add the tensors of a script object's saved state, each once."""
    if isinstance(value, torch.Tensor):
        found[value.data_ptr(), tuple(value.shape)] = value
    elif isinstance(value, torch.ScriptObject):
        # It raises for a class that cannot be saved.
        # Source: torch/csrc/jit/python/script_init.cpp, "__getstate__".
        with suppress(RuntimeError, AttributeError):
            _add_tensors(value.__getstate__(), found)
    elif isinstance(value, (tuple, list)):
        for part in value:
            _add_tensors(part, found)
