"""Normalisation layers: closed forms, forward and backward, through real torch calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.operators.registry import lookup
from tests.helpers.profiling import forward_and_backward_flops as costs
from tests.helpers.profiling import profile_of

N, C = 3 * 5 * 7, 5


def test_batch_norm_in_training_matches_closed_form() -> None:
    """Count the batches (integers, 0); normalise 6n + 2c; running 3c + 4c; affine 2n.

    Backward: Σg n-c; Σg(x-μ) 3n-c; input 5n + 5c; weight c.
    """
    forward, backward = costs(nn.BatchNorm1d(5), torch.rand(3, 5, 7))
    assert forward == 6 * N + 2 * C + 3 * C + 4 * C + 2 * N
    assert backward == (N - C) + (3 * N - C) + (5 * N + 5 * C) + C


def test_batch_norm_in_training_without_parameters_matches_closed_form() -> None:
    module = nn.BatchNorm1d(5, affine=False, track_running_stats=False)
    forward, backward = costs(module, torch.rand(3, 5, 7))
    assert forward == 6 * N + 2 * C
    assert backward == (N - C) + (3 * N - C) + (5 * N + 5 * C)


def test_batch_norm_of_an_input_without_gradient_matches_closed_form() -> None:
    _, backward = costs(nn.BatchNorm1d(5), torch.rand(3, 5, 7), needs_input=False)
    assert backward == (N - C) + (3 * N - C) + C


def test_batch_norm_in_evaluation_matches_closed_form() -> None:
    """1/√(v + ε) 3c; subtract, scale, affine 4n. Backward: rsqrt(v + ε) 2c; weight 3n-c, c;
    bias n-c; input c + n.
    """
    forward, backward = costs(nn.BatchNorm1d(5).eval(), torch.rand(3, 5, 7))
    assert forward == 3 * C + 2 * N + 2 * N
    assert backward == 2 * C + (3 * N - C) + C + (N - C) + C + N


def test_instance_norm_has_a_channel_per_sample() -> None:
    forward, _ = costs(nn.InstanceNorm1d(5), torch.rand(3, 5, 7))
    assert forward == 6 * N + 2 * (3 * 5)


def test_layer_norm_matches_closed_form() -> None:
    """Rows m = 15: 6n + 2m, affine 2n. Backward: 2n + n + 8n-m; weight 2n-7; bias n-7."""
    forward, backward = costs(nn.LayerNorm(7), torch.rand(3, 5, 7))
    assert forward == 6 * N + 2 * 15 + 2 * N
    assert backward == 2 * N + N + (8 * N - 15) + (2 * N - 7) + (N - 7)


def test_layer_norm_over_two_dimensions_without_weights_matches_closed_form() -> None:
    forward, backward = costs(nn.LayerNorm([5, 7], elementwise_affine=False), torch.rand(3, 5, 7))
    assert forward == 6 * N + 2 * 3
    assert backward == 2 * N + (8 * N - 3)


def test_layer_norm_without_bias_matches_closed_form() -> None:
    forward, backward = costs(nn.LayerNorm(7, bias=False), torch.rand(3, 5, 7))
    assert forward == 6 * N + 2 * 15 + N
    assert backward == 2 * N + N + (8 * N - 15) + (2 * N - 7)


def test_rms_norm_matches_closed_form() -> None:
    """Rows m = 15: square, mean, scale 3n, 2m, weight n."""
    forward, _ = costs(nn.RMSNorm(7), torch.rand(3, 5, 7))
    assert forward == 3 * N + 2 * 15 + N


def test_group_norm_matches_closed_form() -> None:
    """x[2,15,7], 3 groups: n = 210, k = 30, m = 6.

    Forward 6n + 2m + 2n. Backward: ds 2n-k, db n-k; input 2(k-m) + 3k + 11m + 4n;
    weight 4k - 15; bias k - 15.
    """
    n, k, m = 2 * 15 * 7, 2 * 15, 2 * 3
    forward, backward = costs(nn.GroupNorm(3, 15), torch.rand(2, 15, 7))
    assert forward == 6 * n + 2 * m + 2 * n
    internal = (2 * n - k) + (n - k)
    assert backward == internal + 2 * (k - m) + 3 * k + 11 * m + 4 * n + (4 * k - 15) + (k - 15)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_group_norm_on_every_device_costs_the_same(device: str) -> None:
    module = nn.GroupNorm(3, 15).to(device)
    forward, _ = costs(module, torch.rand(2, 15, 7, device=device))
    assert forward == 6 * 210 + 2 * 6 + 2 * 210


def test_parts_of_synchronised_batch_norm_match_closed_form() -> None:
    """They run only on CUDA; their formulas need only shapes.

    Two devices, statistics[2,5]: 19 to merge each, 4 + 3 + 5 per channel.
    """
    x, row, stats = (torch.rand(size, device="meta") for size in ((3, 5, 7), (5,), (2, 5)))

    def flops(name: str, *args: Any) -> Any:
        op = getattr(torch.ops.aten, name).default
        rule = lookup(op)
        assert rule is not None
        return rule.answer(op, args, {}, None)

    assert flops("batch_norm_stats", x, 1e-5) == 4 * N + 2 * C
    assert flops("batch_norm_elemt", x, row, row, row, row, 1e-5) == 4 * N
    assert flops("batch_norm_elemt", x, None, None, row, row, 1e-5) == 2 * N
    assert flops("batch_norm_gather_stats", x, stats, stats, row, row, 0.1, 1e-5, 3) == (
        19 * 2 * 5 + (4 + 3 + 5) * 5
    )
    assert flops("batch_norm_update_stats", x, row, row, 0.1) == 4 * N + 7 * C
    reduced = (x, x, row, row, row, True, True, True)
    assert flops("batch_norm_backward_reduce", *reduced) == 4 * N - 2 * C + C
    spread = (x, x, row, row, row, row, row, row)
    assert flops("batch_norm_backward_elemt", *spread) == 5 * N + 5 * C


def test_weight_norm_matches_closed_form() -> None:
    """v[7,5] in 7 rows: norms 2n, quotients 7, products n. Backward 5n + 3·7."""
    v, g = torch.rand(7, 5, requires_grad=True), torch.rand(7, 1, requires_grad=True)
    op = torch.ops.aten._weight_norm_interface

    def run() -> None:
        op(v, g)[0].backward(torch.ones(7, 5))

    profile = profile_of(run, strict=True)
    assert profile.total("forward").flops == 2 * 35 + 7 + 35
    assert profile.total("backward").flops == 5 * 35 + 3 * 7
