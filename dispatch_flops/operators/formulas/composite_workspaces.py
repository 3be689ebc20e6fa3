"""What kernels keep that run other operators below the dispatcher, on each device.

N elements of the operand, R of the result, s bytes of an element.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.copying_workspaces import is_strided
from dispatch_flops.operators.workspaces import builtin_workspace


@builtin_workspace(ops("roll"), is_strided, is_steady=True)
def roll(x: torch.Tensor, shifts: Any, dims: Any = (), **_: Any) -> int | None:
    """Bytes: N·s for each dimension but the last, all of which are kept to the end.

    Source: roll_common, aten/src/ATen/native/TensorTransformations.h.
    """
    if x.is_cpu and is_strided((x,)):
        return None
    return max(0, len(dims) - 1) * _bytes(x)


@builtin_workspace(ops("affine_grid_generator"))
def affine_grid(theta: torch.Tensor, size: Any, *_: Any, **__: Any) -> int:
    """The coordinates of each position, and a one.

    Bytes: (dims + 1)·positions·s.
    Source: make_base_grid_4D and make_base_grid_5D,
    aten/src/ATen/native/AffineGridGenerator.cpp.
    """
    batch, _channels, *lengths = size
    coordinates = batch * math.prod(lengths) * (len(lengths) + 1)
    return int(coordinates * theta.element_size())


@builtin_workspace(ops("_safe_softmax"), is_strided, is_steady=True)
def safe_softmax(
    x: torch.Tensor, dim: int, dtype: torch.dtype | None = None, **_: Any
) -> int | None:
    """Which elements are -inf, which rows are wholly so, and -inf itself; before, a cast operand.

    Bytes: the greater of N + N/row + s and, where dtypes differ, N·(size of the result's).
    Source: _safe_softmax, aten/src/ATen/native/transformers/attention.cpp.
    """
    if x.is_cpu and is_strided((x,)):
        return None
    if not x.dim():
        return 0
    masks = x.numel() + x.numel() // max(1, x.shape[dim]) + x.element_size()
    if dtype is None or dtype is x.dtype:
        return masks
    return max(x.numel() * dtype.itemsize, masks)


@builtin_workspace(ops("isinf"))
def isinf(x: torch.Tensor, **_: Any) -> int:
    """Bytes: N·s of absolute values; of complex numbers, those of one part, and a mask.

    Source: isinf, aten/src/ATen/native/TensorCompare.cpp.
    """
    if x.is_complex():
        return _bytes(x) // 2 + x.numel()
    return _bytes(x) if x.is_floating_point() else 0


@builtin_workspace(ops("abs", "angle"))
def parts_of_complex_numbers(x: torch.Tensor, **_: Any) -> int:
    """Bytes: N·s of a complex result, of whose real parts the result is a copy.

    Source: unary_op_impl_with_complex_to_float_out, aten/src/ATen/native/UnaryOps.cpp.
    """
    return _bytes(x) if x.is_complex() else 0


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
