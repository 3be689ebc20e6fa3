"""Run functions on real gloo processes, several workloads in each.

A workload is a module-level function of a test file; it returns what can be pickled. The processes
import that file by its path, run the workloads in turn and send the results back.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from dispatch_flops import Profile

TIMEOUT_S = 240


class Results:
    """What workloads returned, by name and rank; a workload that raised fails its tests alone."""

    def __init__(self, by_rank: list[dict[str, Any]]) -> None:
        self._by_rank = by_rank

    def of(self, workload: str) -> list[Any]:
        """Return the result of each rank; raises AssertionError with the traceback of one."""
        found = [results[workload] for results in self._by_rank]
        for rank, (error, _) in enumerate(found):
            assert error is None, f"rank {rank}: {error}"
        return [result for _, result in found]


# Processes are forked from one that has imported torch, which takes seconds.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "pytest",
        "dispatch_flops",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.tensor.parallel",
    ]
)


def run_on_ranks(
    file: str, workloads: list[str], world_size: int, folder: Path, *, killed: int | None = None
) -> Results:
    """Run each function of ``file`` on that many gloo processes.

    folder: a temporary folder of this run's own. killed: the rank that kills itself, which has no
    results.
    """
    ranks = [
        _processes.Process(target=_run_rank, args=(file, world_size, folder, rank, workloads))
        for rank in range(world_size)
    ]
    end = time.monotonic() + TIMEOUT_S
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(max(0, end - time.monotonic()))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    by_rank = []
    for number, rank in enumerate(ranks):
        if number == killed:
            assert rank.exitcode == -signal.SIGKILL
            continue
        path = folder / f"{number}.pickle"
        errors = (folder / f"{number}.stderr").read_text()
        assert path.exists(), f"rank {number} ended without results: {errors[-3000:]}"
        by_rank.append(pickle.loads(path.read_bytes()))
    return Results(by_rank)


def rows_of(profile: Profile) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Return ``{(module, phase, kind): (calls, payload bytes)}`` of the communication."""
    rows: dict[tuple[str, str, str], tuple[int, int]] = {}
    for total in profile.communication:
        key = (total.fqn, total.phase, total.kind)
        calls, size = rows.get(key, (0, 0))
        rows[key] = calls + total.calls, size + total.payload_bytes
    return rows


def figures(profile: Profile) -> dict[str, Any]:
    """Return every count that a simulated rank shares with the real one."""
    return {
        "costs": {
            (node.fqn, op.op, op.phase): (op.calls, op.cost and (op.cost.macs, op.cost.flops))
            for node in profile.nodes()
            for op in node.ops
            if op.cost is None or op.cost.flops
        },
        "modules": {
            node.fqn: (
                node.calls,
                node.own_params,
                node.total_params,
                node.local_params,
                node.trainable_params,
                node.active_params,
            )
            for node in profile.nodes()
        },
        "communication": sorted(map(repr, profile.communication)),
        "rank": (profile.run.rank, profile.run.world_size),
    }


# On a real rank, gloo's thread may release what it sent a moment after the program goes on. A job
# runs this often, so that it released in time in one of the runs.
ATTEMPTS = 3


def peaks(profile: Profile) -> dict[str, dict[str, int]]:
    """Return ``{phase: {role: bytes}}`` at the peak of each phase."""
    memory = profile.memory
    assert memory is not None
    phases = [peak.peak_at.phase for peak in memory.devices[0].peaks]
    return {phase: {**memory.by_role(phase)} for phase in phases}


def _load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("workloads", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


def _run(workload: Any) -> tuple[str | None, Any]:
    try:
        return None, workload()
    except Exception:
        return traceback.format_exc(), None


def _run_rank(file: str, world_size: int, folder: Path, rank: int, names: list[str]) -> None:
    """Run the workloads as one of the ranks."""
    with Path(os.devnull).open("w") as out, (folder / f"{rank}.stderr").open("w") as errors:
        os.dup2(out.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    workloads = _load(file)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    results = {}
    for name in names:
        torch.manual_seed(0)
        results[name] = _run(getattr(workloads, name))
        if results[name][0] is not None:
            break  # the ranks may be out of step
    for name in names:
        results.setdefault(name, ("an earlier workload failed", None))
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
