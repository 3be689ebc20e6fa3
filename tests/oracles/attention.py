"""Definitions of attention and of the layers built on it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from tests.oracles.contractions import linear, plus
from tests.oracles.counting import Array, Number, dot, elementwise, fill
from tests.oracles.elementwise import layer_norm, softmax


def attention(
    q: Array, k: Array, v: Array, *, causal: bool = False, kept_only: bool = False
) -> Array:
    """softmax(q k^T / sqrt(d)) v of q (B, Hq, Sq, d), k (B, Hk, Sk, d), v (B, Hk, Sk, dv).

    Query head h reads key head ``h // (Hq // Hk)``. causal: query i attends to keys 0..i.
    kept_only: skip pairs that the mask removes; otherwise all Sq x Sk are computed.
    """
    batch, heads, queries, size = q.shape
    keys, width = k.shape[2], v.shape[3]
    share = heads // k.shape[1] if k.shape[1] else 1
    scale = Number(1 / math.sqrt(size))
    out = fill((batch, heads, queries, width), lambda *_: Number(0.0))
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = range(min(i + 1, keys)) if causal else range(keys)
                computed = seen if kept_only else range(keys)
                scores = {
                    j: dot((q[b, h, i, c], k[b, h // share, j, c]) for c in range(size)) * scale
                    for j in computed
                }
                weights = dict(zip(seen, softmax([scores[j] for j in seen]), strict=True))
                masked = Number(0.0, needs=any(s.needs for s in scores.values()))
                for c in range(width):
                    out[b, h, i, c] = dot(
                        (weights.get(j, masked), v[b, h // share, j, c]) for j in computed
                    )
    return out


def multi_head_attention(
    query: Array, key: Array, value: Array, p: Mapping[str, Array], heads: int
) -> Array:
    """The projections, attention and output projection of (B, S, E) tensors.

    p: ``wq, wk, wv`` (E, E_in), ``bq, bk, bv`` (E), ``wo`` (E, E), ``bo`` (E).
    """
    q = _split(linear(query, p["wq"], p["bq"]), heads)
    k = _split(linear(key, p["wk"], p["bk"]), heads)
    v = _split(linear(value, p["wv"], p["bv"]), heads)
    out = attention(q, k, v).transpose(0, 2, 1, 3)
    return linear(out.reshape(*out.shape[:2], -1), p["wo"], p["bo"])


def encoder_layer(x: Array, p: Mapping[str, Array], heads: int) -> Array:
    """Attention and a two-layer perceptron, each with a residual and a layer norm after it.

    p: as for ``multi_head_attention``, and ``w1, b1, w2, b2, g1, n1, g2, n2``.
    """
    x = _normed(plus(x, multi_head_attention(x, x, x, p, heads)), p["g1"], p["n1"])
    hidden = elementwise(Number.relu, linear(x, p["w1"], p["b1"]))
    return _normed(plus(x, linear(hidden, p["w2"], p["b2"])), p["g2"], p["n2"])


def _split(x: Array, heads: int) -> Array:
    """(B, S, E) to (B, heads, S, E / heads)."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _normed(x: Array, gain: Array, shift: Array) -> Array:
    out = fill(x.shape, lambda *_: None)
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            out[b, s, :] = layer_norm(list(x[b, s]), list(gain), list(shift), eps=1e-5)
    return out
