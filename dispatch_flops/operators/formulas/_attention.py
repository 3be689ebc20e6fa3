"""Cost of attention, the same for every kernel.

Letters: B batch, H query heads, Hkv key and value heads, Sq queries, Sk keys, d size of query and
key heads, dv size of value heads. A pair is one score that is needed. By default all B·H·Sq·Sk
are; ``causal="half"`` excludes those that a causal or windowed kernel skips.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import add

import torch

from dispatch_flops.operators.conventions import conventions
from dispatch_flops.operators.tensors import is_strided_nested, nested_sizes
from dispatch_flops.profile.cost import OpCost, Share, Split, contraction

# Primitives per pair and per row of one softmax: max (a reduction, 1 per pair less 1 per row),
# difference, exp, sum (as max), quotient. ``_safe_softmax`` also compares each score with -inf.
SOFTMAX_PER_PAIR = 5
SOFTMAX_LESS_PER_ROW = 2
SAFE_SOFTMAX_PER_PAIR = SOFTMAX_PER_PAIR + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Keys that a query may attend to: from ``left`` before its own position to ``right`` after.

    None means no limit. from_end: the last query is aligned with the last key (bottom-right), else
    the first query with the first key (top-left).
    """

    left: int | None = None
    right: int | None = None
    from_end: bool = False

    def pairs_and_rows(self, sq: int, sk: int) -> tuple[int, int]:
        """Return the number of scores in the band, and of queries that have at least one."""
        shift = sk - sq if self.from_end else 0
        upper = sk if self.right is None else shift + self.right
        lower = -sq if self.left is None else shift - self.left
        pairs = _scores_up_to(sq, sk, upper) - _scores_up_to(sq, sk, lower - 1)
        first, last = max(0, -upper), min(sq - 1, sk - 1 - lower)
        return pairs, max(0, last - first + 1) if pairs else 0


FULL = Band()


def _scores_up_to(sq: int, sk: int, offset: int) -> int:
    """Count pairs (i, j) with j <= i + offset: row i has min(sk, max(0, i + offset + 1)).

    Those row lengths run over offset+1 ... offset+sq: a triangle up to sk, full rows beyond.
    """
    low, high = max(1, offset + 1), min(sk, offset + sq)
    triangle = (low + high) * (high - low + 1) // 2 if high >= low else 0
    return triangle + sk * max(0, offset + sq - max(sk, offset))


def causal_band(is_causal: bool) -> Band:
    """Return the band without keys after the query if causal, else the full one."""
    return Band(right=0) if is_causal else FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Amount of work, summed over all items of the batch and all heads.

    pairs: Σ needed scores. rows: Σ queries with at least one. queries: Σ B·H·Sq. keys: Σ B·H·Sk,
    each key counted for every query head that it serves. repeats: Σ B·(H-Hkv)·Sk, the keys that
    grouped-query attention repeats.
    """

    pairs: int
    rows: int
    queries: int
    keys: int
    repeats: int
    d: int
    dv: int

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            pairs=self.pairs + other.pairs,
            rows=self.rows + other.rows,
            queries=self.queries + other.queries,
            keys=self.keys + other.keys,
            repeats=self.repeats + other.repeats,
            d=self.d,
            dv=self.dv,
        )


def rectangle(
    batch: int, heads: int, kv_heads: int, sq: int, sk: int, d: int, dv: int, band: Band = FULL
) -> Scores:
    """Return the scores of ``batch`` items of equal lengths; ``causal="half"`` applies the band."""
    kept = conventions().causal == "half" and band != FULL
    pairs, rows = band.pairs_and_rows(sq, sk) if kept else (sq * sk, sq if sk else 0)
    return Scores(
        pairs=batch * heads * pairs,
        rows=batch * heads * rows,
        queries=batch * heads * sq,
        keys=batch * heads * sk,
        repeats=batch * max(0, heads - kv_heads) * sk,
        d=d,
        dv=dv,
    )


def heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band = FULL) -> Scores:
    """q[B,H,Sq,d], k[B,Hkv,Sk,d], v[B,Hkv,Sk,dv]; nested: each item by its own lengths."""
    if is_strided_nested(q):
        return total(
            rectangle(1, hq, hk, sq, sk, d, dv, band)
            for (hq, sq, d), (hk, sk, _), (_, _, dv) in zip(
                nested_sizes(q), nested_sizes(k), nested_sizes(v), strict=True
            )
        )
    *batch, heads, sq, d = q.shape
    return rectangle(prod(batch), heads, k.shape[-3], sq, k.shape[-2], d, v.shape[-1], band)


def heads_third(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Band = FULL) -> Scores:
    """q[B,Sq,H,d], k[B,Sk,Hkv,d], v[B,Sk,Hkv,dv]."""
    batch, sq, heads, d = q.shape
    return rectangle(batch, heads, k.shape[2], sq, k.shape[1], d, v.shape[-1], band)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    items: int,
    longest_q: int,
    longest_k: int,
    band: Band = FULL,
    paged: bool = False,
) -> Scores:
    """Sequences laid end to end: q[Tq,H,d], k[Tk,Hkv,d], v[Tk,Hkv,dv].

    For sequence boundaries that are data on a device, which is not read. Σ Sq·Sk is at most
    Tq·longest_k and at most longest_q·Tk. The smaller is an upper bound, exact if the shorter
    side's sequences are equally long. Paged keys [pages,size,Hkv,d] hold more than is used:
    Tq·longest_k.
    A band is applied to rectangles of the longest lengths, scaled to Tq rows, rounded up. Where the
    rows of a shorter sequence may be longer than the mean of these, all count as the longest row.
    """
    heads, d = q.shape[-2:]
    total_q = q.numel() // (heads * d) if heads * d else 0
    kv_heads, total_k = k.shape[-2], items * longest_k
    bound = total_q * longest_k
    if not paged:
        total_k = k.numel() // (kv_heads * d) if kv_heads * d else 0
        bound = min(bound, longest_q * total_k)
    full = rectangle(1, heads, kv_heads, total_q, total_k, d, v.shape[-1])
    rows = total_q
    if conventions().causal == "half" and band != FULL and longest_q:
        # A sequence shorter than the longest may have longer rows than it: a decoded token sees all
        # keys. Not so where all are equally long, or each sees itself, or from the first key on.
        is_mean_longest = (
            total_q == items * longest_q
            or (total_q, longest_q) == (total_k, longest_k)
            or (band.left is None and not band.from_end)
        )
        measured = longest_q if is_mean_longest else 1
        pairs, kept_rows = band.pairs_and_rows(measured, longest_k)
        bound = min(bound, -(-pairs * total_q // measured))
        rows = -(-kept_rows * total_q // measured)
    return Scores(
        pairs=heads * bound,
        rows=heads * rows if bound else 0,
        queries=full.queries,
        keys=full.keys,
        repeats=full.repeats,
        d=d,
        dv=full.dv,
    )


def total(items: Iterable[Scores]) -> Scores:
    """Return the sum of the items' scores; all heads have equal sizes."""
    parts = list(items)
    return reduce(add, parts) if parts else rectangle(0, 0, 0, 0, 0, 0, 0)


# -- costs in words, for ``dispatch-flops ops`` ----------------------------------------------


SCALES_OF_8_BITS = "The scales of 8-bit operands are merged into the softmax's."
PACKED_BOUND = "Packed, with lengths on a device: an upper bound."


_PAIRS = "Σ H·Sq·Sk pairs of a query and a key"


def forward_in_words(
    masks: str, *, dropout: bool = True, macs: str = f"pairs·(d+dv), {_PAIRS}"
) -> str:
    """Return what ``forward`` costs.

    masks: when the kernel masks scores, such as "if causal"; "" if never. dropout: it may drop.
    """
    return _in_words(
        f"MACs: {macs}. FLOPs: 2·MACs",
        "q and k times the root of the scale",
        "6 per pair less 2 per row (softmax)",
        masks and f"1 per pair {masks}",
        dropout and "2 per pair with dropout",
    )


def backward_in_words(masks: str, *, dropout: bool = True, bias: bool = False) -> str:
    """Return what ``backward`` costs; bias: the kernel may compute its gradient."""
    own = _in_words(
        f"MACs: 2·pairs·(d+dv), and pairs·d recomputed, {_PAIRS}. FLOPs: 2·MACs",
        "the gradients of q and k times the root of the scale",
        "4 per pair less 1 per row (softmax)",
        "1 per element of keys and values that is repeated for query heads",
        dropout and "1 per pair with dropout",
        bias and "1 per pair that the gradient of a bias sums",
    )
    recomputed = _in_words(
        "Recomputed: 2·MACs",
        "q and k times the root of the scale",
        "2 per pair (exponential)",
        masks and f"1 per pair {masks}",
        dropout and "2 per pair with dropout",
    )
    return f"{own} {recomputed}"


def _in_words(*costs: str | bool) -> str:
    return " + ".join(str(cost) for cost in costs if cost) + "."


# -- costs ---------------------------------------------------------------------------------


def forward(scores: Scores, *, masked: bool, dropout: bool) -> OpCost:
    """softmax(q·kᵀ·scale + mask) · v, as ``_scaled_dot_product_attention_math`` computes it.

    MACs: pairs·d for the scores, pairs·dv for the values.
    FLOPs: 2·MACs; q and k each times the root of the scale, keys once per query head; per pair 1
    for a mask (a causal one is added too), 6 less 2 per row for ``_safe_softmax``, 2 for dropout
    (the random mask scaled, then multiplied with).
    """
    extra = scaling(scores) + scores.pairs * (masked + 2 * dropout)
    extra += softmax(scores.pairs, scores.rows, safe=True)
    return contraction(scores.pairs * (scores.d + scores.dv), extra_flops=extra)


def softmax(pairs: int, rows: int, *, safe: bool = False) -> int:
    """FLOPs of softmax over rows of scores; safe: of ``_safe_softmax``."""
    per_pair = SAFE_SOFTMAX_PER_PAIR if safe else SOFTMAX_PER_PAIR
    return per_pair * pairs - SOFTMAX_LESS_PER_ROW * rows


def scaling(scores: Scores) -> int:
    """FLOPs of multiplying q and k (for each query head) by the root of the scale."""
    return (scores.queries + scores.keys) * scores.d


def backward(scores: Scores, *, masked: bool, dropout: bool, bias_grad: int | None = None) -> Split:
    """Gradients of ``forward`` for q, k and v, with the scores recomputed for them.

    Own, phase backward, as autograd of the math path computes it. MACs: pairs·dv for each of
    the gradients of v and of the probabilities, pairs·d for each of q and k. FLOPs: 2·MACs; per
    pair 1 for dropout (gradient times the saved mask) and, for softmax, 4 less 1 per row
    (product, sum, product, difference); q's and k's gradients times the root of the scale; the sum
    over the query heads that share a key or value; the sum over what the bias was broadcast over.
    Recomputed, as no kernel keeps the scores. MACs: pairs·d. FLOPs: 2·MACs, the scaling, per pair
    1 for a mask, 2 for exp(score - logsumexp), 2 for dropout.

    bias_grad: elements of the bias if its gradient is needed.
    """
    pairs = scores.pairs
    extra = pairs * dropout + 4 * pairs - scores.rows + scaling(scores)
    extra += scores.repeats * (scores.d + scores.dv)
    if bias_grad is not None:
        extra += max(0, pairs - bias_grad)
    own = contraction(2 * pairs * (scores.d + scores.dv), extra_flops=extra)
    again = contraction(
        pairs * scores.d, extra_flops=scaling(scores) + pairs * (masked + 2 + 2 * dropout)
    )
    return Split(own=own, shares=(Share(cost=again, phase="recompute"),))
