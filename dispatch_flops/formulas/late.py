"""Operators of libraries that are loaded when they are first used: compilers', FSDP's.

They are named, not looked up: looking would load the library.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.cost import OpCost
from dispatch_flops.formulas._arithmetic import adds, cost_of, muls
from dispatch_flops.registry import free, register_flops

_PRIMS_FREE = """
    convert_element_type copy_strided copy_to device_put iota item
    inductor_force_stride_order inductor_lookup_seed inductor_random inductor_randint
    inductor_seed inductor_seeds broadcast_in_dim cat transpose empty empty_strided fill
    _low_memory_max_pool_offsets_to_indices normal rev reshape slice slice_in_dim squeeze view_of
    where _make_token _sink_tokens
"""
_FSDP_FREE = "all_gather_copy_in chunk_cat copy_ split_with_sizes_copy"

free([f"prims::{name}" for name in _PRIMS_FREE.split()], "moves data or makes random numbers")
free([f"fsdp::{name}" for name in _FSDP_FREE.split()], "packs data for communication")


@register_flops("prims::fma")
def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *, out: Any, **_: Any) -> int:
    """a·b + c in one instruction, of one shape: 1 product and 1 sum per element."""
    return muls(out.numel(), a, b) + adds(out.numel(), out, c)


@register_flops("prims::_low_memory_max_pool_with_offsets")
def low_memory_max_pool(x: torch.Tensor, *args: Any, out: Any, **kwargs: Any) -> OpCost:
    """Max pooling that keeps small offsets in place of indices: as many comparisons."""
    pool = torch.ops.aten.max_pool2d_with_indices
    return cost_of(pool, x, *args, out=out, **kwargs)
