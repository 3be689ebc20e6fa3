"""Small questions about tensors that every formula asks, and those who price them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor

_SPARSE_LAYOUTS = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """What is asked of tensors inside leaves no trace where ``torch.jit.trace`` is at work."""
    state = _torch.tracing_state()
    _torch.set_tracing_state(None)
    try:
        yield
    finally:
        _torch.set_tracing_state(state)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))


def nbytes(*values: Any) -> int:
    """Bytes of the tensors in ``values``, nested as they may be."""
    return sum(_bytes_of(tensor) for tensor in tensors_in(values))


def is_inexact(*tensors: torch.Tensor | None) -> bool:
    """True if one of the tensors holds floating-point or complex numbers."""
    return any(t is not None and (t.is_floating_point() or t.is_complex()) for t in tensors)


def nested_sizes(tensor: torch.Tensor) -> list[list[int]]:
    """The sizes of each item of a strided nested tensor, which are kept on the CPU."""
    sizes: list[list[int]] = tensor._nested_tensor_size().tolist()
    return sizes


def is_strided_nested(tensor: torch.Tensor) -> bool:
    """True for ``torch.nested`` tensors of strided layout, whose ``shape`` raises."""
    return tensor.is_nested and tensor.layout == torch.strided


def stored_elements(sparse: torch.Tensor) -> int:
    """Elements that a sparse tensor stores: ``nnz``, times the size of its dense part or blocks.

    A blocked layout stores whole blocks, explicit zeros inside included.
    """
    if sparse.layout == torch.sparse_coo:
        return sparse._values().numel()
    return sparse.values().numel()


def is_sparse(tensor: torch.Tensor) -> bool:
    """True for COO, CSR, CSC, BSR and BSC; nested and oneDNN tensors are dense."""
    return tensor.layout in _SPARSE_LAYOUTS


def _bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's logical elements; of a sparse tensor's indices and values."""
    layout = tensor.layout
    if layout is torch.strided or layout is torch.jagged:
        return int(tensor.numel()) * tensor.element_size()
    if layout is torch.sparse_coo:
        return sum(
            part.numel() * part.element_size() for part in (tensor._indices(), tensor._values())
        )
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values())
        return sum(part.numel() * part.element_size() for part in parts)
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
        return sum(part.numel() * part.element_size() for part in parts)
    return int(tensor.numel()) * tensor.element_size()


def has_no_data(value: Any) -> bool:
    """Return True for a tensor that has a shape and nothing else, on the meta device or fake."""
    return isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, FakeTensor))
