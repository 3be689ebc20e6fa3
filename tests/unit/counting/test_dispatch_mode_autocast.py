"""A program gives the same results under autocast inside a counter as outside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dispatch_flops import FlopCounterMode

B, S, D, H = 3, 5, 16, 2


@torch.library.custom_op("dispatch_flops_autocast::product", mutates_args=())
def product(a: Tensor, b: Tensor) -> Tensor:
    return (a @ b).float()


def programs() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    x, a, b = torch.randn(B, S, D), torch.randn(3, 4), torch.randn(5, 4)
    sequence, image = torch.randn(7, 2, 4), torch.randn(2, 3, 8, 8)
    encoder = nn.TransformerEncoderLayer(D, H, 32, batch_first=True).eval()
    attention = nn.MultiheadAttention(D, H, batch_first=True).eval()
    lstm, gru, rnn = nn.LSTM(4, 6), nn.GRU(4, 6), nn.RNN(4, 6)
    lstm_cell, gru_cell, rnn_cell = nn.LSTMCell(4, 6), nn.GRUCell(4, 6), nn.RNNCell(4, 6)
    bilinear, conv = nn.Bilinear(4, 4, 5), nn.Conv2d(3, 5, 3)
    geometry: Any = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    found = {
        "encoder layer": lambda: encoder(x),
        "multi-head attention": lambda: attention(x, x, x)[0],
        "scaled dot product attention": lambda: F.scaled_dot_product_attention(x, x, x),
        "einsum": lambda: torch.einsum("ij,kj->ik", a, b),
        "tensordot": lambda: torch.tensordot(a, b, dims=([1], [1])),
        "inner": lambda: torch.inner(a, b),
        "multi_dot": lambda: torch.linalg.multi_dot([a, b.t(), b]),
        "chain_matmul": lambda: torch.chain_matmul(a, b.t(), b),
        "matmul": lambda: a @ b.t(),
        "kron": lambda: torch.kron(a, b),
        "cdist": lambda: torch.cdist(a, b),
        "lstm": lambda: lstm(sequence)[0],
        "gru": lambda: gru(sequence)[0],
        "rnn": lambda: rnn(sequence)[0],
        "lstm cell": lambda: lstm_cell(sequence[0])[0],
        "gru cell": lambda: gru_cell(sequence[0]),
        "rnn cell": lambda: rnn_cell(sequence[0]),
        "bilinear": lambda: bilinear(a, a),
        "conv": lambda: conv(image),
        "aten.convolution": lambda: torch.ops.aten.convolution(image, conv.weight, None, *geometry),
        "custom operator": lambda: product(a, b.t()),
        "layer_norm": lambda: F.layer_norm(x, (D,)),
        "softmax": lambda: F.softmax(a, -1),
        "binary_cross_entropy": lambda: F.binary_cross_entropy(a.sigmoid(), a.sigmoid()),
    }
    if hasattr(torch, "_foreach_mm"):  # runs mm on CPU; has a kernel for CUDA
        found["products of lists"] = lambda: torch._foreach_mm([a], [b.t()])[0]
    return found


@contextmanager
def autocast(dtype: torch.dtype, *, is_disabled_within: bool, caches: bool) -> Iterator[None]:
    with ExitStack() as regions:
        regions.enter_context(torch.autocast("cpu", dtype, cache_enabled=caches))
        if is_disabled_within:
            regions.enter_context(torch.autocast("cpu", enabled=False))
        yield


def outcome(run: Callable[[], Tensor]) -> Any:
    """Return dtype and values of the result, or what was raised (an LSTM has no float16)."""
    try:
        result = run()
    except RuntimeError as error:
        return str(error)
    return result.dtype, result.tolist()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_autocast_in_a_counter_gives_the_same_result(
    name: str, grad_mode: Callable[[], Any]
) -> None:
    run = programs()[name]
    for dtype in (torch.bfloat16, torch.float16):
        for is_disabled_within in (False, True):
            for caches in (True, False):
                region = autocast(dtype, is_disabled_within=is_disabled_within, caches=caches)
                with grad_mode(), region:
                    expected = outcome(run)
                    with FlopCounterMode(display=False):
                        found = outcome(run)
                assert found == expected


def test_autocast_within_a_counter_ends_with_its_region() -> None:
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    with torch.inference_mode(), FlopCounterMode(display=False):
        with torch.autocast("cpu", torch.bfloat16):
            inside = torch.einsum("ij,kj->ik", a, b)
        after = torch.einsum("ij,kj->ik", a, b)
    assert (inside.dtype, after.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_of_the_encoder_fast_path_counts_the_same() -> None:
    layer, x = nn.TransformerEncoderLayer(D, H, 32, batch_first=True).eval(), torch.randn(B, S, D)
    macs = []
    for is_enabled in (False, True):
        with (
            torch.no_grad(),
            torch.autocast("cpu", torch.bfloat16, enabled=is_enabled),
            FlopCounterMode(layer, display=False) as counter,
        ):
            layer(x)
        macs.append(counter.get_total_macs())
    # Four projections and two products of the feed-forward; scores and their values.
    assert macs == [B * (4 * S * D * D + 2 * S * D * 32) + 2 * B * S * S * D] * 2
