"""Memory that CUDA's kernels allocate for themselves, for runs on the meta device.

On CUDA the allocator reports it. B batch, H heads, Q queries, K keys, E head size, s bytes of an
element.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.formulas.casting_workspaces import SHORT_INTEGERS
from dispatch_flops.operators.formulas.product_workspaces import (
    BATCHES,
    MATRICES,
    VECTORS,
    bytes_copied,
)
from dispatch_flops.operators.workspaces import always, builtin_workspace

_MOST_MULTIPROCESSORS = 160  # of a CUDA device; H100 and H200 have 132
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_HALF = (torch.bfloat16, torch.float16)
_NORMS = (
    "native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm", "_fused_rms_norm_backward"
)  # fmt: skip


@builtin_workspace(ops("_scaled_dot_product_flash_attention"), always, is_steady=True)
def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0, *_: Any, **__: Any
) -> int | None:
    """Nothing, where no kernel splits the keys; the state of random numbers with dropout.

    Few blocks of queries have their keys split among the multiprocessors of a device, whose number
    is not known.
    Source: set_params_splitkv and num_splits_heuristic,
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
    """
    if dropout_p:
        return 16
    batch, heads, queries, head_size = q.shape
    block_of_keys = 256 if head_size <= 64 else 128 if head_size <= 128 else 64
    if k.shape[2] <= block_of_keys:
        return 0
    if queries == 1 and k.shape[1] != heads:
        heads = k.shape[1]  # the heads of a group become queries
    blocks = batch * heads * _rounded_up(queries, 64) // 64
    return 0 if blocks >= 0.8 * 2 * _MOST_MULTIPROCESSORS else None


@builtin_workspace(ops("_scaled_dot_product_flash_attention_backward"), always, is_steady=True)
def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *_: Any,
    **__: Any,
) -> int | None:
    """Sums of rows, gradients of queries in float32, those of keys and values by query head.

    Bytes: 4·B·H·Q'·(1 + E'), with Q rounded up to 128 and E to 32, and to 256 above 192;
    2·B·H·K·E·s where keys have fewer heads; B·H·Q·E·s for each of gradient and result that is not
    contiguous with queries before heads. Deterministic algorithms need more, by the device.
    Source: mha_bwd, as above.
    """
    if torch.are_deterministic_algorithms_enabled():
        return None
    batch, heads, queries, head_size = q.shape
    of_row = 1 + (_rounded_up(head_size, 32) if head_size <= 192 else 256)
    size = 4 * batch * heads * _rounded_up(queries, 128) * of_row
    if k.shape[1] != heads:
        size += 2 * batch * heads * k.shape[2] * head_size * k.element_size()
    for tensor in (grad, out):
        if not tensor.transpose(1, 2).is_contiguous():
            size += tensor.numel() * tensor.element_size()
    return size


@builtin_workspace(ops("_scaled_dot_product_efficient_attention"))
def efficient_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    """The result in float32, of half precision and more than 128 values of a head.

    Bytes: 4·B·H·Q·(values of a head), else 0.
    Source: kNeedsOutputAccumulatorBuffer,
    aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h.
    """
    values = v.shape[-1]
    return 4 * q.numel() // q.shape[-1] * values if q.dtype in _HALF and values > 128 else 0


@builtin_workspace((*MATRICES, *VECTORS, *BATCHES), always, is_steady=True, of_cuda=True)
def products(*operands: Any, **_: Any) -> int | None:
    """Bytes: those of each factor whose rows and columns both have gaps; of the whole batch.

    Of a product with a vector, those of the matrix.
    Source: prepare_matrix_for_cublas and prepare_batch_matrix_for_cublas,
    aten/src/ATen/native/cuda/Blas.cpp.
    """
    factors = [factor for factor in operands[-2:] if factor.dim() > 1]
    if any(_has_data(factor) or factor.layout is not torch.strided for factor in factors):
        return None
    if not all(factor.numel() for factor in factors):
        return 0
    size: int = sum(math.prod(factor.shape[:-2]) * bytes_copied(factor) for factor in factors)
    return size


@builtin_workspace(
    ops("sum", "nansum", "prod", "cumsum", "cumprod", "mean"), always, is_steady=True, of_cuda=True
)
def sums(x: torch.Tensor, *_: Any, dtype: torch.dtype | None = None, **__: Any) -> int | None:
    """Bytes: N·(size of the result's dtype) of N elements that are cast first.

    Those are whole numbers, added up as int64, and what ``dtype`` names, but not half precision
    that is added up in float32. The sums of blocks, where one takes several, are left out.
    Source: make_reduction, aten/src/ATen/native/ReduceOpsUtils.h.
    """
    if _has_data(x):
        return None
    result = torch.int64 if dtype is None and x.dtype in SHORT_INTEGERS else dtype or x.dtype
    is_cast = result is not x.dtype and not (x.dtype in _HALF and result is torch.float32)
    size: int = x.numel() * result.itemsize if is_cast else 0
    return size


@builtin_workspace(ops("all", "any"), always, is_steady=True, of_cuda=True)
def truths(x: torch.Tensor, *_: Any, **__: Any) -> int | None:
    """Nothing; the CPU casts to booleans first."""
    return None if _has_data(x) else 0


@builtin_workspace(ops("count_nonzero"), always, is_steady=True, of_cuda=True)
def counts(x: torch.Tensor, *_: Any, **__: Any) -> int | None:
    """Bytes: N of booleans, unless these are counted, and 8·N of the same as int64.

    Source: count_nonzero_cuda, aten/src/ATen/native/TensorAdvancedIndexing.cpp.
    """
    if _has_data(x):
        return None
    return (8 if x.dtype is torch.bool else 9) * x.numel()


@builtin_workspace(ops("_softmax_backward_data"), always, is_steady=True, of_cuda=True)
def softmax_backward(grad: torch.Tensor, out: torch.Tensor, *_: Any, **__: Any) -> int | None:
    """The product of the gradient and the result, and copies of what has gaps.

    Bytes: N·s of N gradients, and as many of each argument with gaps.
    Source: softmax_backward_cuda_out and host_softmax_backward,
    aten/src/ATen/native/cuda/SoftMax.cu.
    """
    if _has_data(grad):
        return None
    return grad.numel() * grad.element_size() + _copied(out)


@builtin_workspace(ops(*_NORMS), always, is_steady=True, of_cuda=True)
def norms(*args: Any, **_: Any) -> int | None:
    """Bytes: those of each argument that has gaps, which is copied.

    Source: layer_norm_cuda, layer_norm_backward_cuda and those of RMS norm,
    aten/src/ATen/native/cuda/layer_norm_kernel.cu.
    """
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return None if _has_data(args[0]) else sum(map(_copied, tensors))


@builtin_workspace(ops("native_dropout_backward"), always, is_steady=True, of_cuda=True)
def dropout_backward(grad: torch.Tensor, *_: Any, **__: Any) -> int | None:
    """Nothing. Source: native_dropout_backward_cuda, aten/src/ATen/native/cuda/Dropout.cu."""
    return None if _has_data(grad) else 0


def _has_data(tensor: torch.Tensor) -> bool:
    """Return True for a tensor of a real device, whose allocator reports; others may be wrapped."""
    return type(tensor) in _PLAIN and not tensor.is_meta


def _copied(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.numel() * tensor.element_size()


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
