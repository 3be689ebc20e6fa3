"""Bytes that a run must read of tensors that were there before it, each once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dispatch_flops._torch import OpOverload, TorchDispatchMode, storage_address
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import cost_of_call
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.registry import lookup
from dispatch_flops.operators.tensors import tensors_in

_CONVENTIONS = Conventions()


class StorageReads(TorchDispatchMode):
    """Dispatch mode that records which parts of given tensors the operators read.

    An operator that reads only rows of such a tensor, as an embedding does, does not count.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._size = {storage_address(t): t.untyped_storage().nbytes() for t in tensors}
        self._parts: dict[int, dict[tuple[Any, ...], int]] = {}

    @property
    def bytes(self) -> int:
        """Bytes that were read, each once; those of overlapping views at most the storage's."""
        return sum(
            min(self._size[address], sum(parts.values())) for address, parts in self._parts.items()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if isinstance(func, OpOverload) and not func.is_view:
            held = [t for t in tensors_in([args, kwargs]) if storage_address(t) in self._size]
            if held and nbytes(held) <= _bytes_read(func, args, kwargs, out):
                self._record(held)
        return out

    def _record(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            part = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            self._parts.setdefault(storage_address(tensor), {})[part] = nbytes(tensor)


def _bytes_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that a call reads; 0 where they are unknown or depend on data."""
    rule = lookup(func)
    if rule is None or rule.states_bytes:
        return 0
    cost = cost_of_call("", func, rule, args, kwargs, out, _CONVENTIONS).cost
    return 0 if cost is None else cost.bytes_read
