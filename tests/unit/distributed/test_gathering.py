"""Profiles of real ranks in one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from dispatch_flops.distributed import gather
from dispatch_flops.errors import ConfigError, NotProfiledError
from tests.helpers.profiling import profile_of
from tests.helpers.ranks import run_script

AFTER_DEATH = Path(__file__).parent / "gather_after_death.py"


def test_gather_without_a_process_group_holds_the_profile_alone() -> None:
    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    cluster = gather(profile)
    assert cluster is not None
    assert dict(cluster.ranks) == {0: profile}
    assert cluster.world_size == 1


def test_gather_names_the_ranks_that_ended_early(tmp_path: Path) -> None:
    outputs = run_script(AFTER_DEATH, 3, str(tmp_path / "store"))
    assert outputs[1] == ""
    assert json.loads(outputs[2]) == [[[0, 1, 2], [], []], None]
    note = "no profile arrived from rank 1 within 2 s"
    assert json.loads(outputs[0]) == [None, [[0, 2], [1], [note]]]


@pytest.mark.parametrize("dst", [-1, 1, "0", None])
def test_gather_on_a_rank_that_does_not_exist_is_a_config_error(dst: object) -> None:
    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="is not a rank; choose one of 0 to 0"):
            gather(profile, dst)  # type: ignore[arg-type]
    finally:
        distributed.destroy_process_group()


def test_gather_on_a_simulated_rank_says_that_there_are_no_others() -> None:
    from dispatch_flops.distributed import simulate

    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    with pytest.raises(NotProfiledError, match="simulate\\(\\) merges their profiles"):
        simulate(lambda mesh: lambda: gather(profile), {"dp": 2}, [0])
