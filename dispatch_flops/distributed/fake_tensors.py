"""Fake tensor mode for a simulated rank: no memory, no peers, values that are read are 1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor, FakeTensorMode
from dispatch_flops.operators.tensors import tensors_in

_ITEM = torch.ops.aten._local_scalar_dense.default
_PIN = torch.ops.aten._pin_memory.default
_ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default)


class SimulatedTensorMode(FakeTensorMode):
    """FakeTensorMode in which communication is done at once and an unknown value reads as 1.

    A communication operator writes into tensors that the caller passed. Without values nothing
    changes in them, so no kernel runs.

    values_read: number of unknown values that were read.
    objects_gathered: number of calls that gathered Python objects.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.values_read = self.objects_gathered = 0
        self._works = _torch.CompletedWorks()
        self._keeps_integers = False

    def __deepcopy__(self, memo: object) -> SimulatedTensorMode:
        """Return itself: copies of fake tensors, which are copied with their mode, belong to it."""
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._works.hand_over()
        match getattr(func, "namespace", None):
            case "c10d":
                return _torch.completed_communication(func, args, self._works)
            case "_c10d_functional" if func.name() in _torch.RESULT_OPERATORS:
                return _torch.collective_result(func, args[0])
        if self._makes_integers(func, kwargs) or _are_integers_with_data(args):
            return func(*args, **(kwargs or {}))
        if func is _PIN:
            return args[0].clone()
        if func is _ITEM and (value := self._read(args[0])) is not None:
            return value
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _read(self, tensor: torch.Tensor) -> bool | float | None:
        """Return 1 for an unknown value; None for one that torch knows."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
            return None
        self.values_read += 1
        if tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _makes_integers(self, func: Any, kwargs: Any) -> bool:
        return (
            self._keeps_integers
            and func in _ALLOCATIONS
            and (kwargs or {}).get("dtype") is torch.int32
        )

    def end_step(self) -> None:
        """Leave the last handle to the program: no operator follows that would hand it over."""
        self._works.hand_over()

    @contextmanager
    def integers_kept(self) -> Iterator[None]:
        """Give data to 32-bit integers that a block makes; what is computed from them has data."""
        self._keeps_integers = True
        try:
            yield
        finally:
            self._keeps_integers = False

    @contextmanager
    def values_known(self) -> Iterator[None]:
        """Do not count the values that are read in a block, because no cost depends on them."""
        before = self.values_read
        yield
        self.values_read = before


def _are_integers_with_data(args: Any) -> bool:
    """Return True if the tensors among the arguments are 32-bit integers that have data."""
    if not args or args[0].__class__ is not torch.Tensor or args[0].dtype is not torch.int32:
        return False
    return all(
        tensor.__class__ is torch.Tensor and tensor.dtype is torch.int32
        for tensor in tensors_in(args)
    )
