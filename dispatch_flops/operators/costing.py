"""The price of one operator call: its formula's cost, the bytes that it moves, its dtype.

Pure functions of a rule and a call, without any state.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.errors import FormulaError
from dispatch_flops.operators.conventions import Conventions, using
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import nbytes, tensors_in
from dispatch_flops.profile.cost import OpCost, Phase, Share, Split, counts_of


@dataclass(slots=True, eq=False)
class CallCost:
    """One overload at one signature: what a call of it costs (None: unknown, see ``error``)."""

    op: str
    kind: str
    dtype: str | None = None
    cost: OpCost | None = None
    shares: tuple[Share, ...] = ()
    error: str | None = None

    def parts(self, phase: Phase) -> Iterator[tuple[str, Phase, OpCost]]:
        """Whose its cost is in a call of that phase: ``(child, phase, cost)`` of the module itself
        (child ``""``), of submodules and other phases. Nothing where the cost is unknown.
        """
        if self.cost is not None:
            yield "", phase, self.cost
            for share in self.shares:
                yield share.child, share.phase or phase, share.cost


# Questions to a tensor's description: no work, and not listed.
METADATA = frozenset(
    f"aten.{name}"
    for name in (
        "size.default size.int sym_size.default sym_size.int stride.default stride.int "
        "sym_stride.default sym_stride.int storage_offset.default sym_storage_offset.default "
        "numel.default sym_numel.default dim.default is_contiguous.default "
        "is_contiguous.memory_format sym_is_contiguous.default is_strides_like_format.default "
        "is_non_overlapping_and_dense.default _nested_tensor_size.default "
        "_nested_tensor_strides.default _nested_tensor_storage_offsets.default"
    ).split()
) | {"prim.layout.default", "prim.device.default"}


def price(
    name: str,
    func: Any,
    rule: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    conventions: Conventions,
    *,
    read: Any = None,
) -> CallCost:
    """The entry of a call that has just returned ``out``.

    read: what the call reads, by default its arguments. An exception in the formula is kept in the
    entry's ``error``, and its cost is None; the user's run never sees it.
    """
    kwargs = _without_outs(func, kwargs)
    dtype = compute_dtype(args, kwargs, out, promoting=rule.kind == "pointwise")
    try:
        with using(conventions):
            answer = rule.answer(func, args, kwargs, out)
        own, shares = _as_cost(answer)
        if rule.moves and not (own.bytes_read or own.bytes_written):
            inputs = (args, kwargs) if read is None else read
            ins, outs = (0, 0) if _is_view(func) else (nbytes(inputs), nbytes(out))
            own = dataclasses.replace(own, bytes_read=ins, bytes_written=outs)
    except Exception as error:
        return CallCost(name, "unknown", dtype, error=f"{type(error).__name__}: {error}")
    return CallCost(name, rule.kind, dtype, own, shares)


def _as_cost(answer: Any) -> tuple[OpCost, tuple[Any, ...]]:
    """What a formula gave, checked: exact, non-negative ints."""
    shares: tuple[Any, ...] = ()
    if isinstance(answer, Split):
        answer, shares = answer.own, answer.shares
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = OpCost(flops=answer)
    if not isinstance(answer, OpCost):
        raise FormulaError(
            f"the formula returned {answer!r}; return an OpCost, a Split, or an int of FLOPs"
        )
    for cost in (answer, *(share.cost for share in shares)):
        for number in counts_of(cost):
            if type(number) is not int or number < 0:
                raise FormulaError(f"the formula returned {cost}; counts are ints of at least 0")
    return answer, shares


def _without_outs(func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The inputs among keyword arguments: the tensors of an ``out=`` variant are its result."""
    if not kwargs or not isinstance(func, OpOverload):
        return kwargs
    outs = {argument.name for argument in _torch.schema_of(func).arguments if argument.is_out}
    return {name: value for name, value in kwargs.items() if name not in outs} if outs else kwargs


def _is_view(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.is_view


def compute_dtype(
    args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, promoting: bool = False
) -> str | None:
    """What the kernel computes in: its first floating-point operand's dtype, else its first's.

    promoting: operands of several dtypes meet in the one that torch promotes them to.
    """
    operands = list(tensors_in((args, kwargs)))
    if promoting and len(operands) > 1:
        promoted = _promoted(operands)
        if _is_inexact(promoted):
            return _dtype_name(promoted)
    dtypes = [tensor.dtype for tensor in (*operands, *tensors_in(out))]
    found = next(filter(_is_inexact, dtypes), dtypes[0] if dtypes else None)
    return _dtype_name(found) if found is not None else None


def _promoted(operands: Sequence[torch.Tensor]) -> torch.dtype:
    """Tensors without dimensions have a say only in the kind of number, as scalars have.

    Source: result_type, aten/src/ATen/native/TypeProperties.cpp.
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


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
