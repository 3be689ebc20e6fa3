"""Layers of vLLM, causal_conv1d and DeepSpeed, once they are loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dispatch_flops.operators.formulas._arithmetic import same_shaped
from dispatch_flops.operators.formulas._attention import (
    forward,
    forward_in_words,
    rectangle,
    total,
)
from dispatch_flops.operators.formulas.attention_packed import values_at_hand
from dispatch_flops.operators.formulas.norm import fused_rms_norm
from dispatch_flops.operators.formulas.partial_access import picked_bytes
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.numbers import depends_on_numbers
from dispatch_flops.operators.registry import declare_free, register_flops
from dispatch_flops.profile.cost import OpCost, Share, Split, contraction, flops

Tensor = torch.Tensor
aten = torch.ops.aten


def into(cost: OpCost, written: Any, *read: Any) -> OpCost:
    """Return the cost with the bytes of a call that writes ``written``, which are arguments."""
    return dataclasses.replace(cost, bytes_read=nbytes(read), bytes_written=nbytes(written))


# -- vLLM ----------------------------------------------------------------------------------------
# Source of all: vllm-project/vllm, csrc/torch_bindings.cpp. ``vllm::unified_attention`` reads what
# it attends to from the forward context, which its arguments do not show: it is listed.


def _gated(result: Tensor, input: Tensor, activation: Any, **options: Any) -> OpCost:
    """Cost of an activation of one half of ``input``, times the other half."""
    cost = same_shaped(activation, result, **options) + flops(result.numel())
    return into(cost, result, input)


@register_flops(["_C::silu_and_mul", "_C::mul_and_silu"])
def silu_and_mul(result: Tensor, input: Tensor, *, out: None, **_: Any) -> OpCost:
    """FLOPs: silu's and 1 per result. Source: vllm-project/vllm, csrc/torch_bindings.cpp."""
    return _gated(result, input, aten.silu)


@register_flops("_C::gelu_and_mul")
def gelu_and_mul(result: Tensor, input: Tensor, *, out: None, **_: Any) -> OpCost:
    """FLOPs: gelu's and 1 per result. Source: vllm-project/vllm, csrc/torch_bindings.cpp."""
    return _gated(result, input, aten.gelu)


@register_flops("_C::gelu_tanh_and_mul")
def gelu_tanh_and_mul(result: Tensor, input: Tensor, *, out: None, **_: Any) -> OpCost:
    """FLOPs: tanh gelu's and 1 per result. Source: vllm-project/vllm, csrc/torch_bindings.cpp."""
    return _gated(result, input, aten.gelu, approximate="tanh")


@register_flops("_C::rms_norm")
def rms_norm(
    result: Tensor, input: Tensor, weight: Tensor, epsilon: float, *, out: None, **_: Any
) -> OpCost:
    """FLOPs: those of ``aten._fused_rms_norm`` over the last dimension.

    Source: vllm-project/vllm, csrc/torch_bindings.cpp.
    """
    cost = flops(fused_rms_norm(input, [input.shape[-1]], weight, out=result))
    return into(cost, result, input, weight)


@register_flops("_C::fused_add_rms_norm")
def fused_add_rms_norm(
    input: Tensor, residual: Tensor, weight: Tensor, epsilon: float, *, out: None, **_: Any
) -> OpCost:
    """residual += input; input = rms_norm(residual).

    FLOPs: ``rms_norm``'s and 1 per element. Source: vllm-project/vllm, csrc/torch_bindings.cpp.
    """
    cost = flops(fused_rms_norm(input, [input.shape[-1]], weight, out=input) + input.numel())
    return into(cost, (input, residual), input, residual, weight)


@register_flops("_C::rotary_embedding", by_name=True)
@depends_on_numbers
def rotary_embedding(
    *,
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    out: None,
    **_: Any,
) -> OpCost:
    """Rotate the first R of each head's elements in place, R the width of ``cos_sin_cache``.

    FLOPs: 3 per rotated element (of a pair: 4 products, a sum and a difference).
    Source: vllm-project/vllm, csrc/torch_bindings.cpp.
    """
    width = cos_sin_cache.shape[-1]
    elements = query.numel() + (key.numel() if key is not None else 0)
    read = nbytes((positions, query, key)) + positions.numel() * width * (
        cos_sin_cache.element_size()
    )
    cost = flops(3 * (elements // head_size) * width)
    return dataclasses.replace(cost, bytes_read=read, bytes_written=nbytes((query, key)))


@register_flops(
    ["_C::paged_attention_v1", "_C::paged_attention_v2"],
    by_name=True,
    cacheable=False,
    note=forward_in_words("with alibi", dropout=False, macs="pairs·2d, Σ H·length pairs")
    + " With lengths on a device every sequence counts as ``max_seq_len`` long, an upper bound.",
)
@depends_on_numbers
def paged_attention(
    *,
    query: Tensor,
    key_cache: Tensor,
    num_kv_heads: int,
    seq_lens: Tensor,
    max_seq_len: int,
    alibi_slopes: Tensor | None,
    out: None,
    **_: Any,
) -> OpCost:
    """query[sequences,H,d], one query each, and keys and values in pages.

    Source: vllm-project/vllm, csrc/torch_bindings.cpp.
    """
    sequences, heads, size = query.shape
    lengths = values_at_hand(seq_lens) or [max_seq_len] * sequences
    scores = total(rectangle(1, heads, num_kv_heads, 1, length, size, size) for length in lengths)
    cost = forward(scores, masked=alibi_slopes is not None, dropout=False)
    cached = 2 * sum(lengths) * num_kv_heads * size * key_cache.element_size()
    read = nbytes(query) + cached
    return dataclasses.replace(cost, bytes_read=read, bytes_written=nbytes(query))


# -- causal_conv1d -------------------------------------------------------------------------------
# mamba_ssm runs these. Its selective scan is a function of a C++ extension, which no dispatcher
# sees. Results are arguments. Source of all: Dao-AILab/causal-conv1d,
# causal_conv1d/cpp_functions.py (schemas) and csrc (what is computed).


def _causal(x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> OpCost:
    cost = contraction(
        x.numel() * weight.shape[-1], extra_flops=x.numel() if bias is not None else 0
    )
    return cost + same_shaped(aten.silu, x) if silu else cost


@register_flops("DaoAILab::_causal_conv1d_fwd_cpp", by_name=True)
def causal_conv1d(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
    out: None,
    **_: Any,
) -> OpCost:
    """x[B,D,L], each channel convolved with weight[D,W].

    MACs: B·D·L·W. FLOPs: 2·MACs + B·D·L (bias) + silu's. Source: csrc/causal_conv1d_fwd.cu.
    """
    cost = _causal(x, weight, bias, silu=silu_activation)
    read = (x, weight, bias, seq_idx, initial_states)
    return dataclasses.replace(
        cost, bytes_read=nbytes(read), bytes_written=nbytes(x) + nbytes(final_states_out)
    )


@register_flops("DaoAILab::_causal_conv1d_bwd_cpp", by_name=True)
def causal_conv1d_backward(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
    dinitial_states: Tensor | None,
    silu_activation: bool,
    out: None,
    **_: Any,
) -> Split:
    """MACs: 2·B·D·L·W. FLOPs: 2·MACs + B·D·L - D (the bias's sum) + silu's backward, for which the
    convolution is computed again: recomputation. Source: csrc/causal_conv1d_bwd.cu.
    """
    sums = max(x.numel() - weight.shape[0], 0) if bias is not None else 0
    own = contraction(2 * x.numel() * weight.shape[-1], extra_flops=sums)
    shares: tuple[Share, ...] = ()
    if silu_activation:
        own += same_shaped(aten.silu_backward, x, x)
        shares = (Share(cost=_causal(x, weight, bias, silu=False), phase="recompute"),)
    read = (x, weight, bias, dout, seq_idx, initial_states, dfinal_states)
    written = (dx, dweight, dbias, dinitial_states)
    return Split(own=into(own, written, *read), shares=shares)


@register_flops("DaoAILab::_causal_conv1d_update_cpp", by_name=True)
def causal_conv1d_update(
    *,
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
    out: None,
    **_: Any,
) -> OpCost:
    """As ``DaoAILab._causal_conv1d_fwd_cpp`` for new elements x[B,D] or x[B,D,L];
    conv_state[..,D,S] holds the past.

    The states move on in place; those in a circle (``cache_seqlens``) keep their positions, so W-1
    of each are read and L written. Source: csrc/causal_conv1d_update.cu.
    """
    cost = _causal(x, weight, bias, silu=silu_activation)
    channels = x.shape[0] * x.shape[1]
    seen = written = conv_state.shape[-1]
    if cache_seqlens is not None:
        seen, written = weight.shape[-1] - 1, x.numel() // channels if channels else 0
    read = nbytes((x, weight, bias, cache_seqlens, conv_state_indices))
    return dataclasses.replace(
        cost,
        bytes_read=read + picked_bytes(conv_state, channels * seen),
        bytes_written=nbytes(x) + picked_bytes(conv_state, channels * written),
    )


# -- DeepSpeed -----------------------------------------------------------------------------------
# Source: microsoft/DeepSpeed, csrc/cpu/comm/shm_interface.cpp. Its other kernels are functions of
# C++ extensions, which no dispatcher sees.

declare_free(
    ["deepspeed::inference_all_reduce", "deepspeed::inference_all_reduce_"],
    "communication, not compute",
)
