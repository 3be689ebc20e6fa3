"""Adapters for formulas written for ``torch.utils.flop_counter``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload


def accept_torch_style(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``formula``, wrapped if it was written for ``torch.utils.flop_counter``.

    A formula of torch's takes shapes in place of tensors and ``out_shape=``, or tensors and
    ``out_val=``, and returns FLOPs. It is recognised by these parameter names.
    """
    if getattr(formula, "_get_raw", False):
        return lambda *args, out=None, **kwargs: formula(*args, out_val=out, **kwargs)
    try:
        # torch's decorator wraps a formula of shapes in one of tensors; the outer one is called.
        outer = inspect.signature(formula, follow_wrapped=False).parameters
        names = outer if "out_val" in outer else inspect.signature(formula).parameters
    except (TypeError, ValueError):
        return formula
    if "out_shape" in names and "out" not in names:
        return lambda *args, out=None, **kwargs: formula(
            *_shapes(args), out_shape=_shapes(out), **_shapes(kwargs)
        )
    if "out_val" in names and "out" not in names:
        return lambda *args, out=None, **kwargs: formula(*args, out_val=out, **kwargs)
    return formula


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return type(value)(_shapes(item) for item in value)
    if isinstance(value, dict):
        return {name: _shapes(item) for name, item in value.items()}
    return value


def registered_with_torch(op: Any) -> Callable[..., Any] | None:
    """Return the formula registered with ``torch.utils.flop_counter.register_flop_formula``.

    op: an overload, a higher-order operator or a Triton kernel.

    None for an operator without one, and for torch's own operators.
    """
    if isinstance(op, OpOverload) and op.namespace == "aten":
        return None
    formula = _torch.formula_of_torchs_own_counter(op)
    return None if formula is None else accept_torch_style(formula)
