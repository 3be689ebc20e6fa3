"""Profiles of real ranks in one of them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed, nn

from dispatch_flops.distributed import gather
from dispatch_flops.errors import ConfigError, NotProfiledError, ProfileFormatError
from dispatch_flops.profile import Profile
from tests.helpers.profiling import profile_of
from tests.helpers.ranks import run_on_ranks


def gather_with_and_without_rank_1() -> list[Any]:
    """Gather on rank 2 from all ranks, then on rank 0 while rank 1 does not take part."""
    rank, group = distributed.get_rank(), distributed.group.WORLD
    profile = profile_of(nn.Linear(3, 5), torch.ones(rank + 1, 3))
    clusters = [gather(profile, dst=2, timeout_s=60)]
    if rank != 1:
        clusters.append(gather(profile, timeout_s=2))
    assert distributed.group.WORLD is group
    return [
        None if cluster is None else (list(cluster.ranks), cluster.missing, cluster.notes)
        for cluster in clusters
    ]


def gather_while_rank_1_is_killed() -> Any:
    rank = distributed.get_rank()
    profile = profile_of(nn.Linear(3, 5), torch.ones(rank + 1, 3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    cluster = gather(profile, timeout_s=3)
    return cluster and (list(cluster.ranks), cluster.missing, cluster.notes, cluster.total().macs)


def test_gather_without_a_process_group_holds_the_profile_alone() -> None:
    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    cluster = gather(profile)
    assert cluster is not None
    assert dict(cluster.ranks) == {0: profile}
    assert cluster.world_size == 1


def test_gather_refuses_the_path_of_a_profile() -> None:
    with pytest.raises(ConfigError, match="profile is of type str; pass a Profile"):
        gather("profile.json")  # type: ignore[arg-type]


@pytest.mark.parametrize("dst", [-1, 1, "0", None])
def test_gather_without_a_process_group_refuses_other_ranks_than_0(dst: Any) -> None:
    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    with pytest.raises(ConfigError, match="is not a rank; choose one of 0 to 0"):
        gather(profile, dst)


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), "60", None])
def test_gather_with_a_time_limit_that_is_none_names_it(timeout_s: Any) -> None:
    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    with pytest.raises(ConfigError, match="timeout_s=.*: pass seconds of 0 or more"):
        gather(profile, timeout_s=timeout_s)


@pytest.mark.slow
def test_gather_names_the_ranks_that_did_not_send(tmp_path: Path) -> None:
    results = run_on_ranks(__file__, ["gather_with_and_without_rank_1"], 3, tmp_path)
    first, second, third = results.of("gather_with_and_without_rank_1")
    note = "no profile arrived from rank 1 within 2 s"
    assert first == [None, ([0, 2], (1,), (note,))]
    assert second == [None]
    assert third == [([0, 1, 2], (), ()), None]


@pytest.mark.slow
@pytest.mark.whole
def test_gather_merges_the_other_ranks_when_one_was_killed(tmp_path: Path) -> None:
    workload = "gather_while_rank_1_is_killed"
    first, third = run_on_ranks(__file__, [workload], 3, tmp_path, killed=1).of(workload)
    note = "no profile arrived from rank 1 within 3 s"
    assert first == ([0, 2], (1,), (note,), 1 * 3 * 5 + 3 * 3 * 5)
    assert third is None


def gather_what_rank_0_cannot_read() -> str:
    """Gather on rank 0 a profile of rank 1 that another release wrote."""
    profile = profile_of(nn.Linear(3, 5), torch.ones(7, 3))
    start = time.monotonic()
    written = '{"schema_version": 0}' if distributed.get_rank() else profile.to_json()
    with patch.object(Profile, "to_json", lambda self: written):
        try:
            gather(profile, timeout_s=30)
        except ProfileFormatError:
            return "unreadable"
    return "went on" if time.monotonic() - start < 20 else "waited"


@pytest.mark.slow
def test_gather_of_a_profile_that_cannot_be_read_lets_its_rank_go_on(tmp_path: Path) -> None:
    workload = "gather_what_rank_0_cannot_read"
    results = run_on_ranks(__file__, [workload], 2, tmp_path)
    assert results.of(workload) == ["unreadable", "went on"]


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
