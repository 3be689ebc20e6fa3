"""Operators that torch's own machinery calls: profiler, export, inductor, oneDNN's packing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dispatch_flops.cost import ZERO, OpCost
from dispatch_flops.formulas._arithmetic import adds, contract
from dispatch_flops.formulas._ops import packets
from dispatch_flops.formulas.matmul import inner_products
from dispatch_flops.registry import free, register_flops
from dispatch_flops.tensors import flops

Tensor = torch.Tensor

free(
    packets(
        "_record_function_enter",
        "_record_function_enter_new",
        "_record_function_exit",
        "_call_end_callbacks_on_jit_fut",
        library="profiler",
    )
    + packets("access_subclass_inner_tensor", library="export")
    + packets("_reinterpret_tensor", "resize_storage_bytes_", library="inductor")
    + packets("_nbytes", "data_ptr", "_get_mkldnn_serialized_md", library="mkldnn"),
    "bookkeeping",
    moves=False,
)
free(
    packets("_cudnn_rnn_flatten_weight", "_nested_sum_backward")
    + packets("_mkl_reorder_linear_weight", library="mkl")
    + packets(
        "_reorder_convolution_transpose_weight",
        "_reorder_convolution_weight",
        "_reorder_linear_weight",
        "_reorder_mkldnn_rnn_layer_weight",
        library="mkldnn",
    )
    + packets("conv2d_prepack", library="mkldnn_prepacked"),
    "copy into another layout",
)


@register_flops(packets("accumulate_grad_", library="inductor"))
def accumulate_grad(
    variable: Tensor, grad: Tensor | None, new_grad: Tensor | None, *, out: Any, **_: Any
) -> OpCost:
    """grad + new_grad, where both exist."""
    if grad is None or new_grad is None:
        return ZERO
    return flops(adds(new_grad.numel(), new_grad))


@register_flops(packets("_foreach_mm_native_0", library="_native"))
def foreach_mm(a: Sequence[Tensor], b: Sequence[Tensor], *, out: Any, **_: Any) -> OpCost:
    """One matrix product for each pair. MACs: M·N·K each."""
    pairs = zip(a, b, strict=True)
    return sum((contract(inner_products(x, y), x, y) for x, y in pairs), start=ZERO)
