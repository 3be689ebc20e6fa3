"""Memory that kernels allocate for themselves.

B batch, H heads, Q queries, K keys, E head size, T threads of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.workspaces import always, builtin_workspace

_MOST_KEYS = 512  # kv_split_size


def _has_gaps(args: tuple[Any, ...]) -> bool:
    """Return True if numbers of a query, key or value do not follow each other.

    Torch copies such tensors since 2.14. F.scaled_dot_product_attention takes another kernel then.
    """
    return any(tensor.stride(-1) != 1 for tensor in args[:3])


@builtin_workspace(ops("_scaled_dot_product_flash_attention_for_cpu"), _has_gaps, is_steady=True)
def flash_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: Any,
    attn_mask: torch.Tensor | None = None,
    **__: Any,
) -> int | None:
    """A block of scores, its row maxima and sums, and a block of the result, for each thread.

    Bytes: T·(q·k + 2·q + q·E)·accumulator, T·q·k·element in half precision, of blocks with q
    queries and k keys, and a copy of a mask with gaps between its numbers.
    Source: cpu_flash_attention, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp. What it packs
    for float16 on some CPUs is allocated outside the allocator of tensors.
    """
    if _has_gaps((q, k, v)):
        return None
    queries, keys = _block(q, k)
    per_thread = queries * keys + 2 * queries + queries * q.shape[-1]
    reduced = queries * keys * q.element_size() if _is_reduced(q) else 0
    blocks = torch.get_num_threads() * (per_thread * _accumulator_size(q) + reduced)
    return blocks + _copied_mask(attn_mask)


def _may_be_unknown_backward(args: tuple[Any, ...]) -> bool:
    return _is_reduced(args[1]) or _has_gaps(args[1:])


@builtin_workspace(
    ops("_scaled_dot_product_flash_attention_for_cpu_backward"),
    _may_be_unknown_backward,
    is_steady=True,
)
def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *_: Any,
    attn_mask: torch.Tensor | None = None,
    **__: Any,
) -> int | None:
    """Two blocks of scores for each thread, row sums, and a gradient with queries before heads.

    Bytes: 2·T·q·k·accumulator, min(T, B·H)·q·accumulator, 2·T·q·k·element in half precision,
    B·H·Q·E·element where the gradient is not contiguous with queries before heads, and a copy of a
    mask as in forward. In half precision oneDNN's products may need more, which is not known.
    Source: cpu_flash_attention_backward, as above.
    """
    if _may_be_unknown_backward((grad, q, k, v)):
        return None
    queries, keys = _block(q, k)
    threads = torch.get_num_threads()
    accumulator = _accumulator_size(q)
    row_sums = min(threads, q.shape[0] * q.shape[1]) * queries * accumulator
    copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.numel() * grad.element_size()
    scores = 2 * threads * queries * keys * accumulator
    return scores + row_sums + copied + _copied_mask(attn_mask)


def _copied_mask(mask: torch.Tensor | None) -> int:
    """Return the bytes of the copy of a mask that has gaps; a broadcast one has none."""
    if mask is None or mask.stride(-1) in (0, 1) or mask.is_contiguous():
        return 0
    return mask.numel() * mask.element_size()


def _block(q: torch.Tensor, k: torch.Tensor) -> tuple[int, int]:
    """Return the queries and keys of a block; more queries make larger blocks."""
    queries = q.shape[-2]
    most = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(most, queries), min(_MOST_KEYS, k.shape[-2])


def _is_reduced(tensor: torch.Tensor) -> bool:
    return tensor.element_size() < 4


def _accumulator_size(tensor: torch.Tensor) -> int:
    return max(4, tensor.element_size())


# Kernels whose workspaces depend on the machine, the version of a library or on values: oneDNN's
# and cuDNN's layouts and scratchpads, LAPACK, FFT, sorting; those that keep a loss of every
# element before they reduce it; and those that run other operators, such as the whole layers of
# inference. On the CPU, the allocator reports them. oneDNN chooses kernel, layouts and scratchpad
# of a convolution by the CPU's instructions, its caches and its threads
# (oneDNN, src/cpu/x64/jit_brgemm_conv_utils.cpp, brgemm_convolution_utils::init_conf).
_UNKNOWN = """
    _chunk_cat _coalesce _ctc_loss_backward _embedding_bag_backward
    _embedding_bag_per_sample_weights_backward _fft_c2c _fft_c2r _fft_r2c _histogramdd_from_bin_cts
    _histogramdd_from_bin_tensors _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex
    _linalg_svd _native_multi_head_attention _nested_tensor_from_mask
    _nested_tensor_from_mask_left_aligned _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward
    _sparse_sparse_matmul _sparse_sum _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr
    _to_sparse_csc _to_sparse_csr _transformer_encoder_layer_fwd _trilinear _unique _unique2
    _unsafe_masked_index _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa allclose
    binary_cross_entropy binary_cross_entropy_with_logits bincount cholesky_solve dist geqrf histc
    histogram huber_loss isin kthvalue ldexp linalg_cholesky_ex linalg_eig
    linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq
    linalg_lu linalg_lu_solve linalg_matrix_exp linalg_matrix_sqrth linalg_pinv linalg_polar
    linalg_qr linalg_solve_triangular logsumexp lu_unpack masked_scatter_backward masked_select
    median miopen_rnn miopen_rnn_backward mse_loss multinomial mvlgamma nanmedian normal ormqr
    quantized_gru quantized_lstm renorm repeat_interleave smooth_l1_loss soft_margin_loss
    soft_margin_loss_backward sort sparse_mask sparse_sampled_addmm unique_consecutive unique_dim
"""
_UNKNOWN_QUANTIZED = """
    conv1d conv1d_dynamic conv1d_relu conv2d conv2d_add conv2d_add_relu conv2d_dynamic conv2d_relu
    conv3d conv3d_dynamic conv3d_relu conv_transpose1d conv_transpose1d_dynamic conv_transpose2d
    conv_transpose2d_dynamic conv_transpose3d conv_transpose3d_dynamic linear linear_dynamic
    linear_leaky_relu linear_relu linear_relu_dynamic linear_tanh
"""
# Registered by torch when they are first called.
_UNKNOWN_BY_NAME = (
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
)
_UNKNOWN_BUT_STEADY = """
    convolution convolution_backward mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn
    _cudnn_rnn_backward _flash_attention_backward _efficient_attention_backward
    _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention
    _scaled_dot_product_cudnn_attention_backward
"""


@builtin_workspace(ops(*_UNKNOWN_BUT_STEADY.split()), always, is_steady=True)
@builtin_workspace(ops(*_UNKNOWN_QUANTIZED.split(), library="quantized"), always)
@builtin_workspace((*ops(*_UNKNOWN.split()), *_UNKNOWN_BY_NAME), always)
def unknown(*_: Any, **__: Any) -> None:
    """Return None: what these kernels allocate for themselves has no formula."""
