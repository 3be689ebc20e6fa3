"""Operators that torch's own machinery calls: profiler, export, inductor, oneDNN's packing, FSDP.

Operators of libraries that are loaded on first use are given by name, because looking them up
would load the library.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import adds, cost_of, muls
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.free import copied
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.operator_keys import find_loaded, schema_of
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.profile.cost import ZERO, OpCost, flops

Tensor = torch.Tensor

declare_free(
    ops(
        "_record_function_enter",
        "_record_function_enter_new",
        "_record_function_exit",
        "_call_end_callbacks_on_jit_fut",
        library="profiler",
    ),
    "annotation for a profiler",
    moves=False,
    is_recorded=False,
)
declare_free(
    ops("access_subclass_inner_tensor", library="export")
    + ops("_reinterpret_tensor", "resize_storage_bytes_", library="inductor")
    + ops("_nbytes", "data_ptr", "_get_mkldnn_serialized_md", library="mkldnn"),
    "bookkeeping",
    moves=False,
)
declare_free(
    ops("_cudnn_rnn_flatten_weight", "_nested_sum_backward")
    + ops("_mkl_reorder_linear_weight", library="mkl")
    + ops(
        "_reorder_convolution_transpose_weight",
        "_reorder_convolution_weight",
        "_reorder_linear_weight",
        "_reorder_mkldnn_rnn_layer_weight",
        library="mkldnn",
    )
    + ops("conv2d_prepack", library="mkldnn_prepacked"),
    "copy into another layout",
)


def _takes(name: str, arguments: int) -> bool:
    op = find_loaded(name)
    return op is not None and len(schema_of(op).arguments) == arguments


# Before torch 2.13 the operator does not take the old gradient: whether it adds is unknown.
@register_flops([op for op in ops("accumulate_grad_", library="inductor") if _takes(op, 3)])
def accumulate_grad(
    variable: Tensor, grad: Tensor | None, new_grad: Tensor | None, *, out: Any, **_: Any
) -> OpCost:
    """grad + new_grad, where both exist."""
    if grad is None or new_grad is None:
        return ZERO
    return flops(adds(new_grad.numel(), new_grad))


# Libraries that are loaded late ------------------------------------------------------------


_PRIMS_FREE = """
    convert_element_type copy_strided copy_to device_put iota item
    inductor_force_stride_order inductor_lookup_seed inductor_random inductor_randint
    inductor_seed inductor_seeds broadcast_in_dim cat transpose empty empty_strided fill
    _low_memory_max_pool_offsets_to_indices normal rev reshape slice slice_in_dim squeeze view_of
    where _make_token _sink_tokens
"""
_FSDP_FREE = "chunk_cat chunk_cat_mixed_dtype split_with_sizes_copy"

declare_free(ops(*_PRIMS_FREE.split(), library="prims"), "moves data or makes random numbers")
declare_free(ops(*_FSDP_FREE.split(), library="fsdp"), "packs data for communication")


def _copied_in(inputs: Any, *_: Any, out: Any, **__: Any) -> OpCost:
    """Bytes of this rank's shards and of its part of the buffer; ``out`` is (part, buffer)."""
    return OpCost(bytes_read=nbytes(inputs), bytes_written=nbytes(out[0]))


declare_free(["fsdp::all_gather_copy_in"], "packs data for communication", formula=_copied_in)
declare_free(["fsdp::copy_"], "copy", formula=copied)


@register_flops("prims::fma")
def fma(*_: Any, out: Tensor, **__: Any) -> int:
    """a·b + c in one instruction, where b may be a number: 1 product and 1 sum per element."""
    return muls(out.numel(), out) + adds(out.numel(), out)


@register_flops("prims::_low_memory_max_pool_with_offsets")
def low_memory_max_pool(
    x: Tensor, kernel_size: list[int], *args: Any, out: Any, **kwargs: Any
) -> OpCost:
    """Max pooling that returns small offsets instead of indices, with as many comparisons."""
    is_2d = len(kernel_size) == 2
    aten = torch.ops.aten
    pool = aten.max_pool2d_with_indices if is_2d else aten.max_pool3d_with_indices
    return cost_of(pool, x, kernel_size, *args, out=out, **kwargs)
