"""Attention and the layers built on it cost what their definitions cost.

Only MACs are compared: torch scales q and k where the definition scales the scores, and its
softmax also looks for rows that are fully masked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dispatch_flops import FlopCounterMode
from tests.oracles.attention import attention, encoder_layer, multi_head_attention
from tests.oracles.comparing import check, examples, flag, macs_of, same_values, size, tensor
from tests.oracles.counting import count


@examples(25)
@given(size, st.integers(1, 2), st.integers(1, 3), size, size, size, size, flag, st.booleans())
def test_sdpa_costs_its_definition(
    batch: int,
    key_heads: int,
    share: int,
    queries: int,
    keys: int,
    width: int,
    value_width: int,
    causal: bool,
    grad: bool,
) -> None:
    """Every query head and every pair of query and key counts, also where masked."""
    q = tensor(batch, key_heads * share, queries, width, grad=grad)
    k = tensor(batch, key_heads, keys, width, grad=grad, seed=1)
    v = tensor(batch, key_heads, keys, value_width, grad=grad, seed=2)
    expected = count(attention, q, k, v, causal=causal)
    check(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=share > 1),
        expected,
        only_macs=True,
    )


@examples(20)
@given(size, size, size, st.tuples(flag, flag, flag))
def test_unfused_attention_backward_counts_needed_gradients(
    queries: int, keys: int, width: int, need: tuple[bool, bool, bool]
) -> None:
    q = tensor(2, 3, queries, width, grad=need[0])
    k = tensor(2, 3, keys, width, grad=need[1], seed=1)
    v = tensor(2, 3, keys, width, grad=need[2], seed=2)
    with sdpa_kernel(SDPBackend.MATH):
        expected = count(attention, q, k, v)
        check(lambda: F.scaled_dot_product_attention(q, k, v), expected, only_macs=True)


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_backward_recomputes_the_scores(causal: bool) -> None:
    """The fused kernel keeps no scores: it computes q k^T again, besides the gradients, which are
    two products for each of the two products of the forward pass."""
    q = tensor(2, 3, 5, 4, grad=True)
    k, v = (tensor(2, 3, 7, 4, grad=True, seed=i) for i in (1, 2))
    for chosen in ("full", "half"):
        kept = chosen == "half" and causal
        expected = count(attention, q, k, v, causal=causal, kept_only=kept)
        pairs = 2 * 3 * (sum(range(1, 6)) if kept else 5 * 7)
        assert expected.macs == pairs * (4 + 4)
        with FlopCounterMode(display=False, causal=chosen) as fc:
            F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        assert fc.profile.total("forward").macs == expected.macs
        assert fc.profile.total("backward").macs == expected.backward_macs
        assert fc.profile.total("recompute").macs == pairs * 4


@examples(20)
@given(size, size, size)
def test_causal_half_counts_the_pairs_that_are_kept(queries: int, keys: int, width: int) -> None:
    q, k = tensor(2, 3, queries, width), tensor(2, 3, keys, width, seed=1)
    expected = count(attention, q, k, k, causal=True, kept_only=True)
    with FlopCounterMode(display=False, causal="half") as fc:
        F.scaled_dot_product_attention(q, k, k, is_causal=True)
    assert fc.profile.total("forward").macs == expected.macs


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("cross", [True, False])
def test_multi_head_attention_costs_its_definition(train: bool, weights: bool, cross: bool) -> None:
    torch.manual_seed(0)
    batch, queries, keys, size, heads = 2, 3, 5, 6, 2
    sizes = {"kdim": 7, "vdim": 4} if cross else {}
    layer = nn.MultiheadAttention(size, heads, batch_first=True, **sizes).double().train(train)
    query = tensor(batch, queries, size)
    key = tensor(batch, keys, 7, seed=1) if cross else query
    value = tensor(batch, keys, 4, seed=2) if cross else query
    expected = count(multi_head_attention, query, key, value, _attention_weights(layer), heads)
    check(lambda: layer(query, key, value, need_weights=weights)[0], expected, only_macs=True)


@pytest.mark.parametrize("train", [True, False])
def test_encoder_layer_costs_its_definition(train: bool) -> None:
    """Training, evaluation and the fused fast path cost the same."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 11, dropout=0.0, batch_first=True).double()
    layer.train(train)
    x = tensor(2, 5, 6)
    expected = count(encoder_layer, x, _encoder_weights(layer), 2)
    projections, pairs, perceptron = 4 * 6 * 6 * 5, 2 * 5 * 5 * 6, 2 * 6 * 11 * 5
    assert expected.macs == 2 * (projections + pairs + perceptron)
    check(lambda: layer(x), expected, only_macs=True)
    with torch.no_grad(), FlopCounterMode(display=False) as fc:
        out = layer(x)
    same_values(out, expected.result)
    assert fc.profile.total("forward").macs == expected.macs


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_with_padding_counts_real_lengths() -> None:
    """The fast path packs the sequences: each costs as much as without padding."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 11, batch_first=True).double()
    encoder = nn.TransformerEncoder(layer, 2).eval()
    lengths = [4, 2, 5]
    x = tensor(3, 5, 6)
    padding = torch.arange(5) >= torch.tensor(lengths)[:, None]
    alone = [count(encoder_layer, x[:1, :n], _encoder_weights(layer), 2).macs for n in lengths]
    with torch.no_grad():
        macs, _ = macs_of(lambda: encoder(x, src_key_padding_mask=padding))
    assert macs == 2 * sum(alone)
    assert sum(alone) == sum(4 * 36 * n + 2 * n * n * 6 + 2 * 6 * 11 * n for n in lengths)


def _attention_weights(layer: nn.MultiheadAttention) -> Mapping[str, Any]:
    if layer.in_proj_weight is not None:
        projections = layer.in_proj_weight.chunk(3)
    else:
        projections = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = layer.in_proj_bias.chunk(3)
    return {
        **dict(zip(("wq", "wk", "wv"), projections, strict=True)),
        **dict(zip(("bq", "bk", "bv"), biases, strict=True)),
        "wo": layer.out_proj.weight,
        "bo": layer.out_proj.bias,
    }


def _encoder_weights(layer: nn.TransformerEncoderLayer) -> Mapping[str, Any]:
    return {
        **_attention_weights(layer.self_attn),
        "w1": layer.linear1.weight,
        "b1": layer.linear1.bias,
        "w2": layer.linear2.weight,
        "b2": layer.linear2.bias,
        "g1": layer.norm1.weight,
        "n1": layer.norm1.bias,
        "g2": layer.norm2.weight,
        "n2": layer.norm2.bias,
    }
