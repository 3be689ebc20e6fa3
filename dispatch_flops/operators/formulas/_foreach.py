"""Formulas of ``_foreach_*`` operators, made from those for one tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import same_numbers
from dispatch_flops.profile.cost import OpCost


def each(formula: Callable[..., int]) -> Callable[..., OpCost]:
    """Return a formula that sums ``formula`` over the items of lists.

    List arguments (tensors, scalars) are passed item by item, others whole. An in-place variant
    returns nothing; its first list then holds the results.
    """

    def summed(*args: Any, out: Any = None, **kwargs: Any) -> OpCost:
        results = args[0] if out is None else out
        flops = sum(
            formula(
                *(_item(arg, index) for arg in args),
                out=result,
                **{name: _item(arg, index) for name, arg in kwargs.items()},
            )
            for index, result in enumerate(results)
        )
        return OpCost(flops=flops, bytes_read=nbytes(args, kwargs), bytes_written=nbytes(results))

    return same_numbers(formula, summed)


def _item(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, (list, tuple)) else value
