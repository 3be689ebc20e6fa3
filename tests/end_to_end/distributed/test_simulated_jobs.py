"""Simulated ranks equal real ranks, and both equal closed forms, for every kind of parallelism."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.distributed import ClusterProfile, gather, simulate
from tests.helpers.ranks import ATTEMPTS, figures, peaks, run_on_ranks
from tests.models.parallel_jobs import JOBS, Job, Work

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


def _merged(job: Job) -> list[str]:
    """Run a job as one of the real ranks; rank 0 returns the merged profiles as JSON."""
    mesh = init_device_mesh("cpu", tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
    clusters = []
    for _ in range(ATTEMPTS):
        built = job.run(mesh)
        model, step = built if isinstance(built, tuple) else (None, built)
        # Simulated ranks have no workspaces of oneDNN's products in half precision (limits.md).
        with (
            torch.backends.mkldnn.flags(enabled=False, allow_tf32=None),
            FlopCounterMode(model, display=False, memory=True, mesh=mesh) as counter,
        ):
            step()
        cluster = gather(counter.profile, timeout_s=60)
        clusters += [] if cluster is None else [cluster.to_json()]
    return clusters


def _of_size(world_size: int) -> list[str]:
    return [name for name, job in JOBS.items() if math.prod(job.mesh.values()) == world_size]


def jobs_of_four_ranks() -> dict[str, list[str]]:
    return {name: _merged(JOBS[name]) for name in _of_size(4)}


def jobs_of_eight_ranks() -> dict[str, list[str]]:
    return {name: _merged(JOBS[name]) for name in _of_size(8)}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[ClusterProfile]]:
    """Return the merged profiles of every attempt of every job on real ranks."""
    found: dict[str, list[ClusterProfile]] = {}
    for workload, world_size in (("jobs_of_four_ranks", 4), ("jobs_of_eight_ranks", 8)):
        folder = tmp_path_factory.mktemp("ranks")
        texts = run_on_ranks(__file__, [workload], world_size, folder).of(workload)[0]
        found |= {name: [*map(ClusterProfile.from_json, each)] for name, each in texts.items()}
    return found


def work_of(profile: Profile) -> Work:
    return Work(*(profile.total(phase).macs for phase in ("forward", "backward", "recompute")))


def rows_by_phase(profile: Profile) -> dict[tuple[str, str], tuple[int, int]]:
    rows: dict[tuple[str, str], tuple[int, int]] = {}
    for total in profile.communication:
        if total.phase != "setup":
            calls, size = rows.get((total.phase, total.kind), (0, 0))
            rows[total.phase, total.kind] = (calls + total.calls, size + total.payload_bytes)
    return rows


@pytest.mark.parametrize("name", JOBS)
def test_simulated_rank_has_the_work_and_communication_of_the_closed_form(name: str) -> None:
    job = JOBS[name]
    last = math.prod(job.mesh.values()) - 1
    cluster = simulate(job.run, job.mesh, ranks=[0, last])
    for rank, profile in cluster.ranks.items():
        assert work_of(profile) == job.work(rank)
        assert rows_by_phase(profile) == job.rows(rank)
        assert profile.uncounted_ops() == {}


@pytest.mark.whole
@pytest.mark.parametrize("name", JOBS)
def test_simulated_ranks_equal_real_ranks(real: dict[str, list[ClusterProfile]], name: str) -> None:
    job = JOBS[name]
    ranks = range(math.prod(job.mesh.values()))
    cluster = simulate(job.run, job.mesh, ranks=ranks, memory=True)
    for attempt in real[name]:
        assert [*cluster.ranks] == [*attempt.ranks] == [*ranks]
    for rank in ranks:
        found, expected = cluster.ranks[rank], [attempt.ranks[rank] for attempt in real[name]]
        assert [figures(found)] * ATTEMPTS == [*map(figures, expected)], f"rank {rank}"
        assert peaks(found) in [*map(peaks, expected)], f"rank {rank}"


@pytest.mark.whole
@pytest.mark.parametrize("name", JOBS)
def test_real_ranks_have_the_work_and_communication_of_the_closed_form(
    real: dict[str, list[ClusterProfile]], name: str
) -> None:
    for rank, profile in real[name][0].ranks.items():
        assert work_of(profile) == JOBS[name].work(rank)
        assert rows_by_phase(profile) == JOBS[name].rows(rank)


def test_splits_that_depend_on_data_are_noted() -> None:
    """Rows per expert that a router counts have no values here: each is taken as 1."""

    def job(mesh: DeviceMesh) -> Any:
        expert = nn.Linear(3, 5)
        counts = torch.zeros(2, dtype=torch.long)
        return expert, lambda: [expert(torch.ones(int(rows.item()), 3)) for rows in counts]

    cluster = simulate(job, {"ep": 2}, ranks=[0])
    assert cluster.total("forward").macs == 2 * 3 * 5
    assert any("tokens per expert, may differ on a real run" in note for note in cluster.notes)
