"""Operators that read only a part of their arguments, or write more than their results.

An argument of which only the shape matters is not read. A mask of gradients decides what a backward
reads. Positions that are data are assumed to be distinct, so their number is at most that of the
source's elements.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from dispatch_flops.operators.access import Access, Arguments, declare_access
from dispatch_flops.operators.formulas._ops import ops
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import tells_apart
from dispatch_flops.operators.tensors import is_given, is_sparse, stored_elements

Tensor = torch.Tensor


def picked_bytes(source: Tensor | None, elements: int) -> int:
    """Return the bytes of ``elements`` distinct elements of ``source``, at most all of it."""
    if source is None:
        return 0
    return min(elements * source.element_size(), nbytes(source))


def read_in_part(arguments: Arguments, elements: dict[str, int]) -> Access:
    """Return the access of a call that reads so many elements of these arguments."""
    partial = {name: count for name, count in elements.items() if count < arguments[name].numel()}
    picked = (picked_bytes(arguments[name], count) for name, count in partial.items())
    return Access(unread=tuple(partial), picked=sum(picked))


# Only the shape --------------------------------------------------------------------------

_PADS = [f"{mode}_pad{d}d_backward" for mode in ("reflection", "replication") for d in (1, 2, 3)]
_AVERAGES = [
    f"{prefix}avg_pool{d}d_backward"
    for prefix in ("", "adaptive_", "_adaptive_", "mkldnn_adaptive_")
    for d in (2, 3)
]
_MAXIMA = [
    f"{name}_backward"
    for d in (2, 3)
    for name in (f"max_pool{d}d_with_indices", f"adaptive_max_pool{d}d", f"fractional_max_pool{d}d")
]


@declare_access(ops(*_PADS, *_AVERAGES, *_MAXIMA))
def shape_of_self(arguments: Arguments, out: Any) -> Access:
    """The input gives the shape of the gradient."""
    return Access(unread=("self",))


# Losses ----------------------------------------------------------------------------------


@declare_access(ops("nll_loss_forward", "nll_loss2d_forward"))
def nll_loss(arguments: Arguments, out: Any) -> Access:
    """One element per target, and at most as many class weights."""
    targets = arguments["target"].numel()
    picked = picked_bytes(arguments["self"], targets) + picked_bytes(arguments["weight"], targets)
    return Access(unread=("self", "weight"), picked=picked)


@declare_access(ops("nll_loss_backward", "nll_loss2d_backward"))
def nll_loss_backward(arguments: Arguments, out: Any) -> Access:
    """The total weight is read for a mean only."""
    unread = ["self", "weight"]
    if arguments["reduction"] != _MEAN:
        unread.append("total_weight")
    weights = picked_bytes(arguments["weight"], arguments["target"].numel())
    return Access(unread=unread, picked=weights)


_MEAN = 1  # at::Reduction::Mean


# Picks and copies ------------------------------------------------------------------------


@declare_access(ops("masked_select"))
def masked_select(arguments: Arguments, out: Tensor) -> Access:
    """The mask, and the elements that it selects."""
    return Access(unread=("self",), picked=picked_bytes(arguments["self"], out.numel()))


_COPIES = """
    narrow_copy select_copy slice_copy diagonal_copy as_strided_copy unfold_copy expand_copy
    split_copy split_with_sizes_copy unbind_copy alias_copy detach_copy permute_copy t_copy
    transpose_copy squeeze_copy unsqueeze_copy view_copy _reshape_copy _reshape_alias_copy
    view_as_real_copy view_as_complex_copy lift_fresh_copy
"""


@declare_access(ops(*_COPIES.split()))
def copy_of_view(arguments: Arguments, out: Any) -> Access:
    """As much of the source as the view shows, each element once."""
    (source,) = [name for name in ("self", "input") if name in arguments]
    return Access(unread=(source,), picked=min(nbytes(arguments[source]), nbytes(out)))


@declare_access(ops("select_scatter", "slice_scatter", "diagonal_scatter", "as_strided_scatter"))
def copy_with_part_replaced(arguments: Arguments, out: Tensor) -> Access:
    """The part that replaces, and the rest of the original."""
    rest = arguments["self"].numel() - arguments["src"].numel()
    return Access(unread=("self",), picked=picked_bytes(arguments["self"], max(rest, 0)))


_PADDINGS = [f"{mode}_pad{d}d" for mode in ("reflection", "replication") for d in (1, 2, 3)]


@declare_access(ops("constant_pad_nd", *_PADDINGS))
def padding(arguments: Arguments, out: Tensor) -> Access:
    """What a negative padding crops is not read."""
    source: Tensor = arguments["self"]
    pads = arguments["pad"] if "pad" in arguments else arguments["padding"]
    kept = list(source.shape)
    for i in range(len(pads) // 2):  # the last dimension comes first
        kept[-1 - i] += min(pads[2 * i], 0) + min(pads[2 * i + 1], 0)
    return Access(
        unread=("self",), picked=picked_bytes(source, prod(max(size, 0) for size in kept))
    )


# Products --------------------------------------------------------------------------------


@declare_access(ops("mm", "bmm", "mv"))
def product(arguments: Arguments, out: Tensor) -> Access | None:
    """Nothing for an empty result, as that of an expert without tokens."""
    return Access(unread=tuple(arguments)) if out.numel() == 0 else None


@declare_access(ops("addmm", "baddbmm", "addbmm", "addmv", "addr", "_addmm_activation"))
@tells_apart(0)
def scaled_addend(arguments: Arguments, out: Tensor) -> Access | None:
    """With beta = 0 the addend is ignored, whatever it holds."""
    without_addend = Access(unread=("self",)) if arguments.get("beta") == 0 else None
    return product(arguments, out) or without_addend


# Sparse operands -------------------------------------------------------------------------


@declare_access(ops("add", "sub"))
def sparse_addend(arguments: Arguments, out: Any) -> Access | None:
    """In place, a dense tensor is touched where a sparse addend stores elements."""
    total, addend = arguments["self"], arguments["other"]
    if out is not total or is_sparse(total):
        return None
    if not isinstance(addend, torch.Tensor) or not is_sparse(addend):
        return None
    touched = picked_bytes(total, stored_elements(addend))
    return Access(unread=("self",), picked=touched, kept=nbytes(total) - touched)


@declare_access(ops("sparse_mask"))
def sparse_mask(arguments: Arguments, out: Tensor) -> Access:
    """The mask, and the elements that it selects."""
    return Access(unread=("self",), picked=picked_bytes(arguments["self"], stored_elements(out)))


# Backward of layers ----------------------------------------------------------------------


def _unless(**needed: bool) -> list[str]:
    return [name for name, is_needed in needed.items() if not is_needed]


def _unneeded(grads: Any, mask: Iterable[bool]) -> tuple[Any, ...]:
    return tuple(grad for grad, is_needed in zip(grads, mask, strict=False) if not is_needed)


@declare_access(ops("mps_convolution_backward", "mps_convolution_transpose_backward"))
def mps_convolution_backward(arguments: Arguments, out: Any) -> Access:
    """The weight for the input's gradient, the input for the weight's, neither for the bias's."""
    mask = arguments["output_mask"]
    to_input, to_weight, *_ = mask
    unread = _unless(self=to_weight, weight=to_input)
    return Access(unread=unread, unneeded=_unneeded(out, mask))


@declare_access(ops("linear_backward", "mkldnn_linear_backward"))
def linear_backward(arguments: Arguments, out: Any) -> Access:
    """The weight for the input's gradient, the input for the weight's."""
    to_input, to_weight, *_ = arguments["output_mask"]
    return Access(unread=_unless(self=to_weight, weight=to_input))


@declare_access(ops("matmul_backward"))
def matmul_backward(arguments: Arguments, out: Any) -> Access:
    """Each operand for the other's gradient."""
    to_self, to_other = arguments["mask"]
    return Access(unread=_unless(self=to_other, other=to_self))


@declare_access(
    ops("native_layer_norm_backward", "native_group_norm_backward", "_fused_rms_norm_backward")
)
def norm_backward(arguments: Arguments, out: Any) -> Access:
    """The bias's gradient is a sum of the result's; the weight is for the input's alone."""
    to_input, to_weight, *_ = arguments["output_mask"]
    either = to_input or to_weight
    unread = _unless(input=either, mean=either, rstd=either, weight=to_input)
    return Access(unread=[*unread, "bias"])


@declare_access(ops("native_batch_norm_backward", "batch_norm_backward"))
def batch_norm_backward(arguments: Arguments, out: Any) -> Access:
    """Training reads the statistics of the batch, evaluation the running ones.

    The meta device returns the input's gradient in any case.
    """
    train = arguments["train"] if "train" in arguments else arguments["update"]
    to_input, to_weight, _ = mask = arguments["output_mask"]
    either = to_input or to_weight
    centred = to_weight or (to_input and train)
    return Access(
        unread=_unless(
            input=centred,
            weight=to_input,
            running_mean=not train and to_weight,
            running_var=not train and either,
            save_mean=train and either,
            save_invstd=train and either,
            save_var=train and either,
        ),
        unneeded=_unneeded(out, mask),
    )


@declare_access(ops("cudnn_batch_norm_backward", "miopen_batch_norm_backward"))
def vendor_batch_norm_backward(arguments: Arguments, out: Any) -> Access:
    """Both libraries run it in training only."""
    return Access(unread=("running_mean", "running_var"))


# Written in place ------------------------------------------------------------------------


@declare_access(
    ops("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm")
)
def batch_norm(arguments: Arguments, out: Any) -> Access:
    """Training updates the running statistics."""
    return _with_running(arguments) if arguments["training"] else Access()


@declare_access(
    ops(
        "_batch_norm_with_update",
        "batch_norm_update_stats",
        "batch_norm_gather_stats",
        "batch_norm_gather_stats_with_counts",
    )
)
def batch_norm_update(arguments: Arguments, out: Any) -> Access:
    """The running statistics are updated; a gathering operator does not read the input."""
    return _with_running(arguments, *(("input",) if "mean" in arguments else ()))


def _with_running(arguments: Arguments, *unread: str) -> Access:
    running = (arguments.get("running_mean"), arguments.get("running_var"))
    return Access(unread=unread, written=tuple(filter(is_given, running)))


@declare_access(ops("rrelu_with_noise"))
def rrelu(arguments: Arguments, out: Any) -> Access:
    """Training draws the noise and writes it; evaluation does not use it."""
    return Access(unread=("noise",), written=(arguments["noise"],) * bool(arguments["training"]))


@declare_access(ops("rrelu_with_noise_backward"))
def rrelu_backward(arguments: Arguments, out: Any) -> Access:
    """Training multiplies by the noise and never looks at the input; evaluation does neither."""
    return Access(unread=("self",) if arguments["training"] else ("noise",))
