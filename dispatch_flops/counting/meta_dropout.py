"""Dropout on tensors without data, by the operator that a device would run.

CUDA drops in one kernel, and keeps a mask of booleans. On the CPU, and on the meta device, torch
takes dropout apart, and the mask has the dtype of what is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor
from dispatch_flops.counting.autograd_kernels import Kernels, counters_in_force
from dispatch_flops.operators.conventions import Target
from dispatch_flops.operators.tensors import has_no_data

DROPOUT = torch.ops.aten.dropout.default
_TYPES = frozenset((Tensor, torch.nn.Parameter, FakeTensor))


def drop(target: Target, x: Tensor, p: float, train: bool) -> Tensor:
    """Run ``dropout`` as ``target`` would.

    CUDA's kernel raises for what is not of floating point. A program on the meta device goes on.
    Source: is_fused_kernel_acceptable, aten/src/ATen/native/Dropout.cpp.
    """
    is_fused = target == "cuda" and train and 0 < p < 1 and x.numel() > 0
    is_plain = type(x) in _TYPES and has_no_data(x) and x.device.type in ("meta", "cpu")
    has_kernel = x.is_floating_point() and not x.is_nested
    out: Tensor
    if is_fused and is_plain and has_kernel:
        out, _mask = torch.ops.aten.native_dropout(x, p, train)
    else:
        out = _torch.run_taken_apart(DROPOUT, x, p, train)
    return out


def kernels(target: Target) -> Kernels:
    """Return the kernels of dropout on tensors without data, where they are not torch's own."""
    if target == "cpu":
        return {}
    return {DROPOUT: dict.fromkeys(("AutogradMeta", "AutogradCPU"), _run)}  # CPU: fake tensors


def _run(_keyset: object, x: Tensor, p: float, train: bool) -> Tensor:
    if _torch.prefers_python():  # a trace, which is to have the operators that it has by itself
        out: Tensor = DROPOUT.decompose(x, p, train)
        return out
    active = counters_in_force()
    return drop(active[0].conventions.target if active else "cpu", x, p, train)
