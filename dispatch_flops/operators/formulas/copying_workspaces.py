"""Kernels of the CPU that copy some arguments first: those with gaps, or masks.

The CPU's allocator reports what such a call takes. On other devices it counts as 0: their kernels
take most arguments as they are.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import packets
from dispatch_flops.operators.workspaces import Condition, always, builtin_workspace

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_HALF = (torch.bfloat16, torch.float16)
_MASKS = (torch.bool, torch.uint8)

_TAKE_CONTIGUOUS = """
    native_layer_norm _softmax _log_softmax _safe_softmax _softmax_backward_data
    _log_softmax_backward_data gelu_backward tril triu channel_shuffle pixel_shuffle
    pixel_unshuffle col2im grid_sampler_2d grid_sampler_2d_backward _adaptive_avg_pool2d
    _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward avg_pool2d
    avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward
"""
_TAKE_CONTIGUOUS_AND_VALUES = """
    rrelu_with_noise searchsorted _cdist_forward _cdist_backward embedding_dense_backward
    _embedding_bag
"""
_ALLOCATE = """
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit native_group_norm
    native_group_norm_backward im2col upsample_nearest2d _upsample_nearest_exact2d
    upsample_bilinear2d upsample_bicubic2d upsample_nearest2d_backward
    _upsample_nearest_exact2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
"""


def _is_strided(args: tuple[Any, ...]) -> bool:
    for arg in args:  # noqa: SIM110 - asked in every call, and ``any`` takes twice as long
        if arg.__class__ in _PLAIN and not arg.is_contiguous():
            return True
    return False


def _is_masked(args: tuple[Any, ...]) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def _is_strided_or_in_half(args: tuple[Any, ...]) -> bool:
    return args[1].dtype in _HALF or _is_strided(args)


def _register(names: str, condition: Condition, *, is_steady: bool) -> None:
    @builtin_workspace(packets(*names.split()), condition, is_steady=is_steady)
    def workspace(*args: Any, **_: Any) -> int | None:
        return None if args[0].is_cpu and condition(args) else 0


_register(_TAKE_CONTIGUOUS, _is_strided, is_steady=True)
_register(_TAKE_CONTIGUOUS_AND_VALUES, _is_strided, is_steady=False)
_register(_ALLOCATE, always, is_steady=True)
_register("_euclidean_dist", always, is_steady=False)
_register("index index_put _index_put_impl_", _is_masked, is_steady=False)


@builtin_workspace(packets("native_layer_norm_backward"), _is_strided_or_in_half, is_steady=True)
def layer_norm_backward(*args: Any, **_: Any) -> int | None:
    """Sums of both parameters' gradients, for each thread, of N normalized elements.

    Bytes: 2·T·N·element, with T threads of the CPU.
    Source: LayerNormBackwardKernelImplInternal,
    aten/src/ATen/native/cpu/layer_norm_kernel.cpp.
    """
    x, shape = args[1:3]
    if not (x.is_cpu or x.is_meta):
        return 0
    if x.is_cpu and _is_strided_or_in_half(args):
        return None
    if not any(args[-1][1:]):
        return 0
    size: int = 2 * torch.get_num_threads() * math.prod(shape) * x.element_size()
    return size
