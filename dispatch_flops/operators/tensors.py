"""Properties of tensors and numbers that formulas and the counter need: sizes, layouts, kinds."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor
from dispatch_flops.errors import FormulaError

_SPARSE_LAYOUTS = frozenset(
    (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
)


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Suspend ``torch.jit.trace``, so that reading a tensor's shape adds nothing to the graph."""
    state = _torch.tracing_state()
    if state is None:
        yield
        return
    with _torch.tracer_not_excluded():
        _torch.set_tracing_state(None)
        try:
            yield
        finally:
            _torch.set_tracing_state(state)


def storages_of(value: Any) -> frozenset[int]:
    """Return an id for the memory of each tensor in nested containers.

    Views share it. Tensor subclasses other than fake tensors, and tensors without memory of their
    own, have none.
    """
    return frozenset(
        _torch.storage_address(tensor)
        for tensor in tensors_in(value)
        if type(tensor) in _WITH_STORAGE and _torch.has_storage(tensor)
    )


_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter, _torch.FakeTensor)


def tensors_in(value: Any, _within: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested lists, tuples, deques, mappings and dataclasses.

    A container may hold itself.
    """
    if value.__class__ is dict:  # the state of a parameter, say: what follows takes longer
        parts: Iterable[Any] = value.values()
    elif isinstance(value, torch.Tensor):
        yield value
        return
    else:
        parts = _parts_of(value)
    for part in parts:
        if isinstance(part, torch.Tensor):  # most parts: a generator for each takes longer
            yield part
        elif part is not value and id(part) not in _within:
            yield from tensors_in(part, (*_within, id(value)))


def _parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, deque)):
        return value
    if isinstance(value, (dict, Mapping)):  # to ask the abstract class takes ten times as long
        return value.values()
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


def is_int(value: Any) -> bool:
    """Return True for an int of Python or of NumPy, False for a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_inexact(*values: torch.Tensor | complex | None) -> bool:
    """Return True if one is a floating-point or complex number, or a tensor of such numbers."""
    return any(
        is_inexact_dtype(value.dtype)
        if isinstance(value, torch.Tensor)
        else isinstance(value, (float, complex))
        for value in values
    )


def is_inexact_dtype(dtype: torch.dtype) -> bool:
    """Return True for a floating-point or complex dtype: arithmetic in it counts as FLOPs."""
    return dtype.is_floating_point or dtype.is_complex


def promoted_dtype(operands: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype that torch promotes the operands to.

    A tensor without dimensions changes only the kind of number (integer, real, complex), as a
    Python scalar does. Source: result_type, aten/src/ATen/native/TypeProperties.cpp.
    """
    sized = [t.dtype for t in operands if t.is_nested or t.dim()]
    sizeless = [t.dtype for t in operands if not t.is_nested and not t.dim()]
    if not sized or not sizeless:
        return functools.reduce(torch.promote_types, sized or sizeless)
    large, small = (functools.reduce(torch.promote_types, dtypes) for dtypes in (sized, sizeless))
    if large.is_complex or (large.is_floating_point and not small.is_complex):
        return large
    if large.is_floating_point:
        return large.to_complex()
    return torch.promote_types(large, small)


def name_of_dtype(dtype: Any) -> str:
    """Return the name of a dtype that is given as such or by its name, such as ``"int8"``.

    Raises FormulaError for anything else.
    """
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise FormulaError(
            f'computes_in is {dtype!r:.60}, not a dtype; pass one, such as "int8", or a function '
            "of the arguments by name that returns one"
        )
    return str(found).removeprefix("torch.")


def is_given(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Return False for None and for the undefined tensor that autograd passes in its place."""
    return tensor is not None and tensor.numel() > 0


def nested_sizes(tensor: torch.Tensor) -> list[list[int]]:
    """Return the sizes of each item of a strided nested tensor, which torch keeps on the CPU."""
    sizes: list[list[int]] = tensor._nested_tensor_size().tolist()
    return sizes


def is_strided_nested(tensor: torch.Tensor) -> bool:
    """Return True for a ``torch.nested`` tensor of strided layout, whose ``shape`` raises."""
    return tensor.is_nested and tensor.layout == torch.strided


def stored_elements(tensor: torch.Tensor) -> int:
    """Return how many elements a tensor stores: all, or if sparse ``nnz`` × the size of a block.

    Dense dimensions are a block. A block counts whole, with the zeros in it.
    """
    if not is_sparse(tensor):
        return tensor.numel()
    if tensor.layout == torch.sparse_coo:
        return tensor._values().numel()
    return tensor.values().numel()


def is_sparse(tensor: torch.Tensor) -> bool:
    """Return True for COO, CSR, CSC, BSR and BSC; nested and oneDNN tensors are dense."""
    return tensor.layout in _SPARSE_LAYOUTS


def has_no_data(value: Any) -> bool:
    """Return True for a tensor without data: fake, or on the meta device."""
    return isinstance(value, torch.Tensor) and (value.is_meta or isinstance(value, FakeTensor))
