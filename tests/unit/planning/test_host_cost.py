"""The measured time of the host for an operator."""

from __future__ import annotations

import torch

from dispatch_flops.planning.host_cost import measure_host_s_per_operator


def test_host_cost_is_positive_and_leaves_the_random_state() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        assert 0 < measure_host_s_per_operator() < 1
    assert torch.equal(torch.get_rng_state(), before)
