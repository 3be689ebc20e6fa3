"""What runs operators, also on arguments that torch's own kernels refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.operators.tensors import has_no_data

aten = torch.ops.aten
_RUN_GROUPED_MM = _torch.kernel_of(aten._grouped_mm.default)
_RUN_BATCH_NORM_BACKWARD = _torch.kernel_of(aten.native_batch_norm_backward.default)
_DTYPES = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


def kernel(func: OpOverload) -> Callable[..., Any]:
    """Return what runs the operator."""
    return _KERNELS.get(func) or _torch.kernel_of(func)


def _grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Give the result's shape also for dtypes that torch refuses on the meta device."""
    if not has_no_data(a) or a.dtype is torch.bfloat16:
        out: torch.Tensor = _RUN_GROUPED_MM(a, b, offs, bias, out_dtype)
        return out
    out = (a[0] if a.dim() > b.dim() else a) @ (b[0] if b.dim() > a.dim() else b)
    if offs is not None and a.dim() == b.dim() == 2:
        out = out.new_empty((len(offs), *out.shape))
    return out.to(out_dtype or a.dtype)


def _batch_norm_backward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor | None, ...]:
    """Give no gradient that was not asked for; the meta device returns the input's in any case."""
    grads = _RUN_BATCH_NORM_BACKWARD(*args, **kwargs)
    mask = kwargs["output_mask"] if kwargs else args[-1]  # the last parameter
    return tuple(grad if is_asked else None for grad, is_asked in zip(grads, mask, strict=True))


def _taking_constants(func: OpOverload) -> Callable[..., Any]:
    """Return what runs ``func``, and takes numbers for constants of a graph.

    When TorchScript optimizes a graph that was traced, in the first call, it asks which of its
    constants are equal and reads their values. A dispatch mode is given such constants as numbers,
    which the operators refuse.
    """
    call = _torch.kernel_of(func)
    return lambda *args: call(*map(_as_tensor, args))


def _as_tensor(value: Any) -> torch.Tensor:
    dtype = _DTYPES.get(type(value))
    return value if dtype is None else torch.tensor(value, dtype=dtype)


_KERNELS: dict[OpOverload, Callable[..., Any]] = {
    aten._grouped_mm.default: _grouped_mm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    **{op: _taking_constants(op) for op in (aten.equal.default, aten._local_scalar_dense.default)},
}
