"""A callback in a program of several ranks merges their profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from dispatch_flops.distributed import ClusterProfile
from dispatch_flops.integrations.callback import StepCallback
from tests.helpers.ranks import run_on_ranks


def second_step() -> Any:
    """Profile the second of three steps; rank r has r + 1 rows."""
    rank = distributed.get_rank()
    model, x = nn.Linear(3, 5), torch.ones(rank + 1, 3)
    callback = StepCallback(profile_step=2)
    printed: list[str] = []
    callback._write = lambda: printed.append(callback._text())  # type: ignore[method-assign]
    callback.reset()
    for _ in range(3):
        callback.begin(model)
        callback.add_batch(x)
        model(x).sum().backward()
        callback.end(silent=rank != 0, rank=rank, world_size=2)
    callback.finish()
    return callback.cluster and callback.cluster.to_json(), printed


@pytest.mark.slow
def test_callback_merges_the_profiles_of_all_ranks_on_rank_0(tmp_path: Path) -> None:
    (text, printed), (other, not_printed) = run_on_ranks(__file__, ["second_step"], 2, tmp_path).of(
        "second_step"
    )
    cluster = ClusterProfile.from_json(text)
    # forward, and the weight's gradient
    assert [cluster.value(rank, "macs") for rank in (0, 1)] == [2 * 3 * 5, 2 * 2 * 3 * 5]
    assert cluster.straggler("macs") == 1
    assert len(printed) == 1
    assert "2 of 2 ranks" in printed[0]
    assert (other, not_printed) == (None, [])
