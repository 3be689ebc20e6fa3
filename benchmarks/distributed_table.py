"""Print work and communication of simulated ranks beside closed forms and torch's own counters.

    python -m benchmarks.distributed_table

A row per job and rank. The jobs are those of ``tests.models.parallel_jobs``; a slow test runs the
same jobs on 4 and 8 real gloo processes, and asserts that both agree in every integer. torch's
FlopCounterMode and CommDebugMode run around the same step on real gloo processes; what one of them
raises is below the table.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode as TorchCounter

from dispatch_flops import Profile
from dispatch_flops.distributed import simulate
from tests.helpers.ranks import run_on_ranks
from tests.models.parallel_jobs import JOBS

COLUMNS = ["job", "rank", "MACs", "truth", "comm calls", "truth", "comm bytes", "truth",
           "torch FLOPs / 2", "CommDebugMode calls"]  # fmt: skip
COUNTERS = ("FlopCounterMode", "CommDebugMode")


def of_torch(name: str, counter: str) -> int | str:
    """Return what one of torch's counters says of a job on this real rank, or what it raises."""
    job = JOBS[name]
    mesh = init_device_mesh("cpu", tuple(job.mesh.values()), mesh_dim_names=tuple(job.mesh))
    built = job.run(mesh)
    _, step = built if isinstance(built, tuple) else (None, built)
    mode: Any = TorchCounter(display=False) if counter == "FlopCounterMode" else CommDebugMode()
    try:
        with mode:
            step()
    except Exception as error:
        return _first_line(error)
    total: int = mode.get_total_counts() if counter == "CommDebugMode" else mode.get_total_flops()
    return total if counter == "CommDebugMode" else total // 2


# Workloads of ``run_on_ranks``, which finds them by name. A rank that raises leaves the others
# without a peer, so each has processes of its own.
for _name in JOBS:
    for _counter in COUNTERS:
        globals()[f"{_counter}_{_name}"] = partial(of_torch, _name, _counter)


def on_real_ranks(name: str, counter: str) -> list[int | str]:
    """Return what one of torch's counters says of a job, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        workload, world_size = f"{counter}_{name}", math.prod(JOBS[name].mesh.values())
        return run_on_ranks(__file__, [workload], world_size, Path(folder)).of(workload)


def _first_line(error: BaseException) -> str:
    """Return the error that was raised first, on one line."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def row(name: str, rank: int, profile: Profile, of_torch: list[list[int | str]]) -> list[str]:
    """Return a row of the table; the setup of a pipeline is left out on both sides."""
    job = JOBS[name]
    work, rows = job.work(rank), job.rows(rank)
    phases = ("forward", "backward", "recompute")
    step = [total for total in profile.communication if total.phase != "setup"]
    numbers = [
        sum(profile.total(phase).macs for phase in phases),  # type: ignore[arg-type]
        work.forward + work.backward + work.recompute,
        sum(total.calls for total in step),
        sum(calls for calls, _ in rows.values()),
        sum(total.payload_bytes for total in step),
        sum(size for _, size in rows.values()),
    ]
    seen = [by_rank[rank] for by_rank in of_torch]
    return [
        name,
        str(rank),
        *(f"{number:,}" for number in numbers),
        *(f"{found:,}" if isinstance(found, int) else "raises" for found in seen),
    ]


def errors(name: str, counter: str, by_rank: list[int | str]) -> str | None:
    """Return what a counter raised first: later errors are those of ranks without a peer."""
    raised = [found for found in by_rank if isinstance(found, str)]
    first = sorted(raised, key=lambda text: "gloo" in text)[:1]
    return f"- {counter}, {name}: `{first[0]}`" if first else None


def main() -> None:
    warnings.simplefilter("ignore")
    rows, notes = [], []
    for name, job in JOBS.items():
        ranks = [0, math.prod(job.mesh.values()) - 1]
        cluster = simulate(job.run, job.mesh, ranks=ranks)
        seen = [on_real_ranks(name, counter) for counter in COUNTERS]
        rows += [row(name, rank, profile, seen) for rank, profile in cluster.ranks.items()]
        notes += [errors(name, *pair) for pair in zip(COUNTERS, seen, strict=True)]
    print(tabulate(rows, COLUMNS, disable_numparse=True, stralign="right", tablefmt="github"))
    print("\n".join(["", *(note for note in notes if note is not None)]))


if __name__ == "__main__":
    main()
