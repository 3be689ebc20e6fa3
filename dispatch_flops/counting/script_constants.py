"""Operators that TorchScript calls with constants of a graph.

When it optimizes a graph that was traced, in the first call, it asks which of its constants are
equal and reads their values. A dispatch mode is given such constants as numbers, which the
operators refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dispatch_flops._torch import OpOverload

_ASKED = (torch.ops.aten.equal.default, torch.ops.aten._local_scalar_dense.default)
_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def taking_constants(call: Callable[..., Any], func: OpOverload) -> Callable[..., Any]:
    """Return what runs ``func`` as ``call`` does, and takes numbers for constants."""
    if func not in _ASKED:
        return call

    def run(*args: Any) -> Any:
        try:
            return call(*args)
        except RuntimeError:
            if not any(type(arg) in _DTYPES for arg in args):
                raise
        return call(*map(_as_tensor, args))

    return run


def _as_tensor(value: Any) -> torch.Tensor:
    dtype = _DTYPES.get(type(value))
    return value if dtype is None else torch.tensor(value, dtype=dtype)
