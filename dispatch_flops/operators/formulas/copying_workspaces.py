"""Kernels of the CPU that copy some arguments first: those with gaps, masks, half precision.

The CPU's allocator reports what such a call takes, and so does CUDA's of its kernels. On other
devices it counts as 0: theirs take most arguments as they are. What finds such kernels is
tests/end_to_end/sweep/test_workspaces.py.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.workspaces import Condition, always, builtin_workspace

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_HALF = (torch.bfloat16, torch.float16)
_MASKS = (torch.bool, torch.uint8)

_TAKE_CONTIGUOUS = """
    native_layer_norm _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    gelu_backward tril triu channel_shuffle pixel_shuffle pixel_unshuffle grid_sampler_2d
    grid_sampler_2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward avg_pool2d avg_pool2d_backward avg_pool3d
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d reflection_pad1d
    reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    multi_margin_loss multi_margin_loss_backward multilabel_margin_loss_forward
    multilabel_margin_loss_backward nll_loss_forward nll_loss_backward nll_loss2d_forward
    nll_loss2d_backward log_sigmoid_forward bucketize min max aminmax narrow_copy embedding
    index_select addbmm masked_scatter segment_reduce _segment_reduce_backward _ctc_loss
"""
_TAKE_REAL_AND_CONTIGUOUS = "var var_mean std std_mean"
_TAKE_SINGLE_PRECISION_AND_CONTIGUOUS = "index_add index_add_"
_TAKE_SINGLE_PRECISION_AND_LONG_INDICES = "gather scatter scatter_ scatter_add scatter_add_"
_TAKE_CONTIGUOUS_AND_VALUES = """
    rrelu_with_noise searchsorted _cdist_forward _cdist_backward embedding_dense_backward
"""
_ALLOCATE = """
    native_batch_norm native_batch_norm_backward _native_batch_norm_legit native_group_norm
    native_group_norm_backward _batch_norm_with_update batch_norm_backward im2col col2im
    upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d upsample_nearest2d
    _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_trilinear3d upsample_nearest2d_backward
    _upsample_nearest_exact2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
    unfold_backward index_reduce scatter_reduce native_dropout_backward
"""


def is_strided(args: tuple[Any, ...]) -> bool:
    """Return True if an argument is a tensor that has gaps."""
    for arg in args:  # noqa: SIM110 - asked in every call, and ``any`` takes twice as long
        if arg.__class__ in _PLAIN and not arg.is_contiguous():
            return True
    return False


def _is_masked(args: tuple[Any, ...]) -> bool:
    return any(index is not None and index.dtype in _MASKS for index in args[1])


def _is_strided_or_complex(args: tuple[Any, ...]) -> bool:
    return args[0].is_complex() or is_strided(args)


def _is_strided_or_in_half(args: tuple[Any, ...]) -> bool:
    return args[0].dtype in _HALF or is_strided(args)


def _is_in_half_or_of_short_indices(args: tuple[Any, ...]) -> bool:
    return args[0].dtype in _HALF or args[2].dtype is not torch.int64


def _register(names: str, condition: Condition, *, is_steady: bool) -> None:
    @builtin_workspace(ops(*names.split()), condition, is_steady=is_steady)
    def workspace(*args: Any, **_: Any) -> int | None:
        return None if condition(args) and args[0].is_cpu else 0


_register(_TAKE_CONTIGUOUS, is_strided, is_steady=True)
_register(_TAKE_CONTIGUOUS_AND_VALUES, is_strided, is_steady=False)
_register(_TAKE_REAL_AND_CONTIGUOUS, _is_strided_or_complex, is_steady=True)
_register(_TAKE_SINGLE_PRECISION_AND_CONTIGUOUS, _is_strided_or_in_half, is_steady=True)
_register(_TAKE_SINGLE_PRECISION_AND_LONG_INDICES, _is_in_half_or_of_short_indices, is_steady=True)
_register(_ALLOCATE, always, is_steady=True)
_register("_euclidean_dist _embedding_bag _embedding_bag_forward_only", always, is_steady=False)
_register("index index_put _index_put_impl_", _is_masked, is_steady=False)


@builtin_workspace(ops("native_layer_norm_backward"), _is_strided_or_in_half, is_steady=True)
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
    if not (x.numel() and any(args[-1][1:])):
        return 0
    size: int = 2 * torch.get_num_threads() * math.prod(shape) * x.element_size()
    return size
