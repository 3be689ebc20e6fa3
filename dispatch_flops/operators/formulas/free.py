"""Operators that do no arithmetic worth counting, each group with its reason.

Views, metadata and bare allocations move no bytes either. Fills write their result and read
nothing. All others move their inputs and outputs. Random numbers are in sampling.py, picking by
index is in scatter.py.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import declare_free
from dispatch_flops.profile.cost import OpCost

Tensor = torch.Tensor

VIEWS = """
    alias as_strided detach diagonal expand lift_fresh permute select slice slice_inverse split
    split_with_sizes squeeze t transpose unbind unfold unsqueeze view view_as_complex
    view_as_real _conj _neg_view _fw_primal _make_dual _reshape_alias values indices
    crow_indices col_indices ccol_indices row_indices _values _indices _nested_get_values
    _nested_view_from_buffer _nested_view_from_jagged _test_autograd_multiple_dispatch_view
    _unsafe_view lift set shallow_copy_data resize resize_as _resize_output _mkldnn_transpose
    unsafe_split unsafe_split_with_sizes
"""

# Reads of a tensor's description, in no profile.
QUERIES = """
    size stride numel dim storage_offset is_contiguous is_strides_like_format
    is_non_overlapping_and_dense sym_size sym_stride sym_numel sym_storage_offset
    sym_is_contiguous _nested_tensor_size _nested_tensor_strides _nested_tensor_storage_offsets
"""

BOOKKEEPING = """
    is_same_size is_set_to is_pinned sym_constrain_range sym_constrain_range_for_size
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size
    _has_same_storage_numel record_stream q_scale q_zero_point q_per_channel_axis
    q_per_channel_scales q_per_channel_zero_points qscheme _assert_tensor_metadata _assert_async
    _assert_scalar _functional_assert_async _functional_assert_scalar _make_dep_token _print
    _foobar _fused_sdp_choice _use_cudnn_ctc_loss _use_miopen_ctc_loss
    _nested_compute_contiguous_strides_offsets _nested_get_jagged_dummy _nested_get_lengths
    _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx
    _test_functorch_fallback _test_optional_filled_intlist _test_optional_floatlist
    _test_optional_intlist _test_parallel_materialize _test_warn_in_autograd
    _test_autograd_multiple_dispatch
"""

ALLOCATIONS = """
    empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided
    _efficientzerotensor _empty_affine_quantized _empty_per_channel_affine_quantized from_file
    _new_zeros_with_same_feature_meta
"""

FILLS = """
    zero zeros zeros_like new_zeros ones ones_like new_ones fill full full_like new_full
    scalar_tensor eye tril_indices triu_indices _foreach_zero
"""

COPIES = """
    clone _to_copy _lazy_clone _pin_memory _foreach_clone
    contiguous cat stack _stack _chunk_cat block_diag narrow_copy repeat
    repeat_interleave flip roll rot90 channel_shuffle native_channel_shuffle
    pixel_shuffle pixel_unshuffle constant_pad_nd reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d im2col diag_embed
    diagonal_scatter select_scatter slice_scatter as_strided_scatter select_backward
    slice_backward diagonal_backward max_unpool2d max_unpool3d complex to_mkldnn _mkldnn_reshape
    mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight to_padded_tensor
    _pack_padded_sequence _jagged_to_padded_dense_forward _padded_dense_to_jagged_forward
    _nested_from_padded _nested_from_padded_tensor _nested_from_padded_and_nested_example
    _nested_tensor_from_tensor_list _nested_tensor_from_mask
    _nested_tensor_from_mask_left_aligned _nested_select_backward _conj_copy _fw_primal_copy
    _indices_copy _make_dual_copy _neg_view_copy _nested_get_values_copy
    _nested_view_from_buffer_copy _nested_view_from_jagged_copy _reshape_alias_copy
    _reshape_copy _test_autograd_multiple_dispatch_view_copy _values_copy alias_copy
    as_strided_copy ccol_indices_copy col_indices_copy crow_indices_copy detach_copy
    diagonal_copy expand_copy indices_copy lift_fresh_copy permute_copy row_indices_copy
    select_copy slice_copy split_copy split_with_sizes_copy squeeze_copy t_copy transpose_copy
    unbind_copy unfold_copy unsqueeze_copy values_copy view_as_complex_copy view_as_real_copy
    view_copy
"""

OVERWRITES = """
    copy _copy_from _copy_from_and_resize _foreach_copy
"""

SELECTIONS = """
    where masked_fill masked_select masked_scatter masked_scatter_backward nonzero
    nonzero_static
"""

LOGIC = """
    bitwise_and bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift
    __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__
    __irshift__ gcd lcm hash_tensor _is_all_true _is_any_true
"""


def written(*args: Any, out: Any = None, **_: Any) -> OpCost:
    """Bytes of a fill: it writes its result, or in place its first argument; it reads the number
    that it fills with, where that is a tensor.
    """
    return OpCost(
        bytes_read=nbytes(args[1:]), bytes_written=nbytes(args[:1] if out is None else out)
    )


def copied(self: Any, src: Any, *_: Any, out: Any = None, **__: Any) -> OpCost:
    """Bytes of ``copy``: it reads the source and writes every element of the destination."""
    return OpCost(bytes_read=nbytes(src), bytes_written=nbytes(self))


@depends_on_numbers
def _ranged(*args: Any, out: Any = None, **_: Any) -> OpCost:
    """Bytes of a range, whose length follows from its bounds and its step."""
    return written(*args, out=out)


def _triangle(is_lower: bool) -> Callable[..., OpCost]:
    """Return the formula of the bytes of ``tril`` or ``triu``."""

    def triangle(self: Tensor, diagonal: int = 0, *, out: Tensor, **_: Any) -> OpCost:
        """Bytes: the kept part is read; in place nothing is read, and only zeros are written."""
        *batch, rows, columns = self.shape
        below = sum(min(max(i + diagonal + is_lower, 0), columns) for i in range(rows))
        kept = prod(batch) * (below if is_lower else rows * columns - below)
        if out is self:
            return OpCost(bytes_written=(self.numel() - kept) * self.element_size())
        read = min(kept * self.element_size(), nbytes(self))
        return OpCost(bytes_read=read, bytes_written=nbytes(out))

    return triangle


declare_free(ops(*VIEWS.split()), "view of the same memory", moves=False)
declare_free(
    ops(*QUERIES.split()) + ops("device", "layout", library="prim"),
    "metadata",
    moves=False,
    is_recorded=False,
)
declare_free(ops(*BOOKKEEPING.split()), "metadata, assertion or bookkeeping", moves=False)
declare_free(ops(*ALLOCATIONS.split()), "allocation", moves=False)
declare_free(ops("_local_scalar_dense"), "one number read by the host")
declare_free(ops(*COPIES.split()), "copy, cast, padding or layout")
declare_free(ops("tril"), "copy of a triangle", formula=_triangle(is_lower=True))
declare_free(ops("triu"), "copy of a triangle", formula=_triangle(is_lower=False))
declare_free(ops(*SELECTIONS.split()), "selection; its comparison is counted separately")
declare_free(ops(*LOGIC.split()), "integer and boolean arithmetic")
declare_free(ops(*FILLS.split()), "fill with constants or integers", formula=written)
declare_free(ops("arange", "range"), "fill with constants or integers", formula=_ranged)
declare_free(ops(*OVERWRITES.split()), "copy", formula=copied)
