"""Bytes that a run must read of tensors that were there before it, each once."""

from __future__ import annotations

import weakref
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

    Of a tensor that an operator reads in part, such as the table of an embedding, as much counts
    as the operator reads.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        storages = {storage_address(tensor): tensor.untyped_storage() for tensor in tensors}
        # A cache lets go of storages, whose addresses others then have.
        self._alive = {address: weakref.ref(storage) for address, storage in storages.items()}
        self._size = {address: storage.nbytes() for address, storage in storages.items()}
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
        given = list(tensors_in([args, kwargs]))
        held = [tensor for tensor in given if self._is_held(tensor)]
        out = func(*args, **kwargs)
        if held and isinstance(func, OpOverload) and not func.is_view:
            others = nbytes([tensor for tensor in given if not self._is_held(tensor)])
            self._record(held, _bytes_read(func, args, kwargs, out) - others)
        return out

    def _is_held(self, tensor: torch.Tensor) -> bool:
        storage = self._alive.get(storage_address(tensor))
        return storage is not None and storage() is not None

    def _record(self, tensors: Iterable[torch.Tensor], read: int) -> None:
        """Record that so many bytes of the tensors were read, of the smallest ones first."""
        for tensor in sorted(tensors, key=nbytes):
            part = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
            share = min(nbytes(tensor), max(read, 0))
            read -= share
            parts = self._parts.setdefault(storage_address(tensor), {})
            parts[part] = max(parts.get(part, 0), share)


def _bytes_read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that a call reads; 0 where they are unknown."""
    rule = lookup(func)
    if rule is None:
        return 0
    cost = cost_of_call("", func, rule, args, kwargs, out, _CONVENTIONS).cost
    return 0 if cost is None else cost.bytes_read
