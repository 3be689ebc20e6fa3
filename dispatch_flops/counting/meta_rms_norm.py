"""RMS norm on tensors without data, by the operator that CUDA runs.

CUDA has a kernel for it, and one for its backward. The meta device has the second alone, and torch
takes the first operator apart. Given a kernel, autograd makes the same node of it as on CUDA. What
autograd then runs is found once. Meta and fake tensors are handed to it where the innermost counter
of the thread counts for CUDA. A trace has the operators that it has by itself: its graph may run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor
from dispatch_flops.counting.autograd_kernels import Kernels, counters_in_force
from dispatch_flops.counting.plans import Plan
from dispatch_flops.counting.strategies import Mode, decompose
from dispatch_flops.operators.conventions import Target
from dispatch_flops.operators.tensors import has_no_data

FUSED = torch.ops.aten._fused_rms_norm.default
_HALF = (torch.bfloat16, torch.float16)
_of_autograd: list[Callable[..., Any]] = []  # once it is found


def normalize(mode: Mode, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run and record the kernel on tensors without data; else what the operator consists of."""
    if not has_no_data(args[0]) or _torch.traced_graph() is not None:
        return decompose(mode, plan, args, kwargs)
    if type(args[0]) is FakeTensor and not counters_in_force():  # its mode would take it apart
        plan = replace(plan, call=_norm)
    return mode.run_and_record(plan, args, kwargs)


def is_whole(args: Any, target: str) -> bool:
    """Return True where a torch that was built for CUDA runs its kernel, or would on the target.

    In inference mode the operator arrives whole on other devices, too.
    """
    x = args[0]
    if x.device.type not in ("cpu", "meta") or x.is_nested:
        return True
    return target == "cuda" and has_no_data(x) and _torch.traced_graph() is None


def kernels(target: Target) -> Kernels:
    """Return the kernels of RMS norm on tensors without data, where it is to be as on CUDA."""
    if target != "cuda":
        return {}
    _find_kernel_of_autograd()
    by_autograd = dict.fromkeys(("AutogradMeta", "AutogradCPU"), _run_by_autograd)
    return {FUSED: {"Meta": _run, **by_autograd}}  # CPU: fake tensors


def _run(_keyset: Any, *args: Any) -> tuple[Tensor, Tensor]:
    return _norm(*args)


def _run_by_autograd(keyset: Any, x: Tensor, *args: Any) -> Any:
    if _of_autograd and _is_as_on_cuda(x):
        return _of_autograd[0](keyset, x, *args)
    return FUSED.decompose(x, *args)


def _is_as_on_cuda(x: Tensor) -> bool:
    local = getattr(x, "_local_tensor", x)  # of a DTensor
    active = counters_in_force() if has_no_data(local) else []
    is_traced = _torch.prefers_python() or _torch.traced_graph() is not None
    return bool(active) and active[0].conventions.target == "cuda" and not is_traced


def _find_kernel_of_autograd() -> None:
    """Find what autograd runs for a device that has a kernel, unless it is replaced just now."""
    if _of_autograd:
        return
    library = _torch.Kernels(FUSED.namespace)
    try:
        library.register(FUSED, _run, "Meta")
        if (kernel := _torch.autograd_kernel(FUSED, "AutogradMeta")) is not None:
            _of_autograd.append(kernel)
    finally:
        library.remove()


def _norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    """Return the result, and the root mean squares of rows in the dtype that they add up in.

    Source: _fused_rms_norm_cuda, aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    outer = x.shape[: x.dim() - len(normalized_shape)]
    dtype = torch.float32 if x.dtype in _HALF else x.dtype
    of_rows = x.new_empty((*outer, *(1 for _ in normalized_shape)), dtype=dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format), of_rows
