"""Attention and encoder layers: the fast path, against the layers' Python code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.profiling import numbers, profile_of

NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@pytest.fixture
def slow_path() -> Any:
    enabled = torch.backends.mha.get_fastpath_enabled()

    def run(fn: Callable[[], Any]) -> Any:
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return fn()
        finally:
            torch.backends.mha.set_fastpath_enabled(enabled)

    return run


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_multi_head_attention_fast_path_costs_the_slow_path(
    slow_path: Any, weights: bool, averaged: bool, masked: bool
) -> None:
    mha, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.ones(3, 7, 16)
    mask = torch.zeros(7, 7) if masked else None

    @torch.no_grad()
    def run() -> Any:
        call = lambda: mha(  # noqa: E731
            x, x, x, need_weights=weights, attn_mask=mask, average_attn_weights=averaged
        )
        return profile_of(call, model=mha)

    fast, slow = run(), slow_path(run)
    assert numbers(fast.total()) == numbers(slow.total())
    assert fast.total().macs == 3 * (7 * 4 * 16 * 16 + 2 * 7 * 7 * 16)
    if not masked:
        assert "aten._native_multi_head_attention.default" in fast.by_operator()
    for profile in (fast, slow):  # the module never calls its ``out_proj``
        assert profile.by_module()["out_proj"].macs == 0
        assert profile.uncalled_modules() == []


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer_fast_path_costs_the_slow_path(
    slow_path: Any, activation: str, norm_first: bool
) -> None:
    layer = nn.TransformerEncoderLayer(
        16, 4, 24, activation=activation, batch_first=True, norm_first=norm_first
    ).eval()
    x = torch.ones(3, 7, 16)

    @torch.no_grad()
    def run() -> Any:
        return profile_of(layer, x, model=layer)

    fast, slow = run(), slow_path(run)
    assert "aten._transformer_encoder_layer_fwd.default" in fast.by_operator()
    for fqn in ("", "self_attn", "linear1", "linear2", "norm1", "norm2"):
        assert numbers(fast.by_module()[fqn]) == numbers(slow.by_module()[fqn]), fqn
    assert fast.by_module()["linear1"].macs == 3 * 7 * 16 * 24


@NESTED
def test_encoder_with_a_padding_mask_counts_real_tokens() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    lengths = (5, 3, 7)
    padding = torch.arange(7)[None, :] >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        profile = profile_of(lambda: encoder(torch.ones(3, 7, 16), src_key_padding_mask=padding))
    tokens, pairs = sum(lengths), sum(n * n for n in lengths)
    assert profile.total().macs == 2 * (tokens * (4 * 16 * 16 + 2 * 16 * 24) + 2 * pairs * 16)


def test_pieces_of_the_fast_path_match_closed_form() -> None:
    scores = torch.ones(2, 4, 5, 7)
    mask = torch.zeros(2, 4, 5, 7, dtype=torch.bool)
    softmax = profile_of(lambda: torch._masked_softmax(scores, mask, 3, 2)).total()
    assert softmax.flops == 5 * 2 * 4 * 5 * 7 - 2 * 2 * 4 * 5
    for dim, rows in ((3, 2 * 4 * 5), (1, 2 * 5 * 7)):
        gradient = profile_of(
            lambda dim=dim: torch.ops.aten._masked_softmax_backward(scores, scores, mask, dim)
        ).total()
        assert gradient.flops == 4 * 2 * 4 * 5 * 7 - rows
    qkv = profile_of(
        lambda: torch._transform_bias_rescale_qkv(torch.ones(2, 5, 48), torch.ones(48), 4)
    ).total()
    assert qkv.flops == 2 * 5 * (48 + 16)
