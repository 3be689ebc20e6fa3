"""flex_attention, a higher-order operator: attention with a user's score_mod and block mask.

Letters as in ``_attention``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from dispatch_flops.operators.conventions import conventions
from dispatch_flops.operators.formulas._arithmetic import adds
from dispatch_flops.operators.formulas._attention import Scores, rectangle, softmax
from dispatch_flops.operators.formulas._ops import higher_order
from dispatch_flops.operators.formulas._score_functions import flops_per_score
from dispatch_flops.operators.registry import register_flops
from dispatch_flops.operators.tensors import has_no_data
from dispatch_flops.profile.cost import OpCost, Share, Split, contraction

Tensor = torch.Tensor

# Positions in the block mask's flat tuple: for each block of queries how many partial and full
# blocks of keys it has, and their indices; from the end, how many queries and keys a block has.
_COUNTS, _INDICES = (2, 4), (3, 5)
_QUERIES_PER_BLOCK, _KEYS_PER_BLOCK = -3, -2


def _flex_scores(q: Tensor, k: Tensor, v: Tensor, block_mask: tuple[Any, ...]) -> Scores:
    """Return the whole rectangle, or with ``causal="half"`` the blocks of the mask, each whole.

    A mask without data (meta, fake) counts as many blocks as it has room for.
    """
    batch, heads, sq, d = q.shape
    sk = k.shape[-2]
    scores = rectangle(batch, heads, k.shape[1], sq, sk, d, v.shape[-1])
    scores = dataclasses.replace(scores, repeats=(batch * heads - k.shape[0] * k.shape[1]) * sk)
    counts = [t for t in (block_mask[i] for i in _COUNTS) if isinstance(t, Tensor)]
    if conventions().causal == "full" or not counts:
        return scores
    keys = min(sk, int(block_mask[_KEYS_PER_BLOCK]))
    if any(has_no_data(count) for count in counts):
        room = sum(t.shape[-1] for t in (block_mask[i] for i in _INDICES) if isinstance(t, Tensor))
        pairs = batch * heads * sq * min(sk, room * keys)
    else:
        block = min(sq, int(block_mask[_QUERIES_PER_BLOCK])) * keys
        # A mask of one batch or head applies to all.
        pairs = sum(
            int(t.sum()) * (batch // t.shape[0]) * (heads // t.shape[1]) * block for t in counts
        )
    return dataclasses.replace(scores, pairs=min(scores.pairs, pairs))


def _buffers(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what score_mod takes besides: after the scale and the kernel's options."""
    return tuple(rest[2]) if len(rest) > 2 else ()


@register_flops("flex_lib::zeros_and_scatter", by_name=True)
def zeros_and_scatter(*, vals: Tensor, out: Tensor, **_: Any) -> int:
    """Gradient of a tensor that a score_mod indexes. FLOPs: 1 per value (a sum).

    Source: torch._higher_order_ops.flex_attention.
    """
    return adds(vals.numel(), vals)


@register_flops(higher_order("flex_attention"), cacheable=False)
def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    *rest: Any,
    out: Any,
    **_: Any,
) -> OpCost:
    """q[B,H,Sq,d], k[B,Hkv,Sk,d], v[B,Hkv,Sk,dv]; k and v may have batch size 1.

    MACs: pairs·(d+dv). FLOPs: 2·MACs + 1 per pair (scale) + ``_safe_softmax``'s + 4 per row (log
    and sum of logsumexp, it and the maximum divided by log 2) + score_mod's operators per pair.
    Source: math_attention of torch._higher_order_ops.flex_attention, one pass for maximum and sum.
    """
    scores = _flex_scores(q, k, v, block_mask)
    extra = scores.pairs + 4 * scores.rows + softmax(scores.pairs, scores.rows, safe=True)
    extra += scores.pairs * flops_per_score(score_mod, q, _buffers(rest))
    return contraction(scores.pairs * (scores.d + scores.dv), extra_flops=extra)


@register_flops(higher_order("flex_attention_backward"), cacheable=False)
def flex_attention_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    _output: Tensor,
    _logsumexp: Tensor,
    _grad: Tensor | None,
    grad_logsumexp: Tensor | None,
    fw_graph: Any,
    joint_graph: Any,
    block_mask: tuple[Any, ...],
    *rest: Any,
    out: Any,
    **_: Any,
) -> Split:
    """MACs: 2·pairs·(d+dv), and pairs·d recomputed.

    FLOPs, own: 2·MACs + 2·dv-1 per row (sum of output times gradient) + 3 per pair (difference,
    product, scale; 4 with a gradient of logsumexp) + sums over heads and batches that share keys.
    Recomputed: 2·MACs + 3 per pair (scale, exp(score - logsumexp)). score_mod's operators per pair
    are recomputed, those of its gradient are own.
    Source: sdpa_dense_backward of torch._higher_order_ops.flex_attention.
    """
    scores = _flex_scores(q, k, v, block_mask)
    pairs, d, dv = scores.pairs, scores.d, scores.dv
    extra = scores.rows * max(0, 2 * dv - 1) + pairs * (3 + (grad_logsumexp is not None))
    extra += scores.repeats * (d + dv)
    extra += pairs * flops_per_score(joint_graph, q, _buffers(rest), takes_grad=True)
    own = contraction(2 * pairs * (d + dv), extra_flops=extra)
    changed = flops_per_score(fw_graph, q, _buffers(rest))
    again = contraction(pairs * d, extra_flops=pairs * (3 + changed))
    return Split(own=own, shares=(Share(cost=again, phase="recompute"),))
