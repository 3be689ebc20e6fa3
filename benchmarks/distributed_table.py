"""Print work and communication of simulated ranks beside closed forms and torch's own counters.

    python -m benchmarks.distributed_table

A row per job and rank. The jobs are those of ``tests.models.parallel_jobs``; a slow test runs the
same jobs on 4 and 8 real gloo processes, and asserts that both agree in every integer. torch's
FlopCounterMode and CommDebugMode run around the same step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

from tabulate import tabulate
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.flop_counter import FlopCounterMode as TorchCounter

from dispatch_flops import Profile
from dispatch_flops.distributed import simulate
from tests.models.parallel_jobs import JOBS, Job

COLUMNS = ["job", "rank", "MACs", "truth", "comm calls", "truth", "comm bytes", "truth",
           "torch FLOPs / 2", "CommDebugMode calls"]  # fmt: skip


def of_torch(job: Job, rank: int) -> tuple[str, str]:
    """Return what torch's two counters say of a rank's step, or the error that one raises."""
    seen: list[str] = []

    def under(counter: Any, read: Callable[[Any], int]) -> str:
        def run(mesh: Any) -> Any:
            built = job.run(mesh)
            _, step = built if isinstance(built, tuple) else (None, built)

            def counted() -> None:
                with counter:
                    step()

            return counted

        try:
            simulate(run, job.mesh, ranks=[rank])
            return f"{read(counter):,}"
        except Exception as error:
            return type(error).__name__

    seen.append(under(TorchCounter(display=False), lambda c: c.get_total_flops() // 2))
    seen.append(under(CommDebugMode(), lambda c: c.get_total_counts()))
    return seen[0], seen[1]


def row(name: str, rank: int, profile: Profile) -> list[str]:
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
    return [name, str(rank), *(f"{number:,}" for number in numbers), *of_torch(job, rank)]


def main() -> None:
    warnings.simplefilter("ignore")
    rows = []
    for name, job in JOBS.items():
        ranks = [0, math.prod(job.mesh.values()) - 1]
        cluster = simulate(job.run, job.mesh, ranks=ranks)
        rows += [row(name, rank, profile) for rank, profile in cluster.ranks.items()]
    print(tabulate(rows, COLUMNS, disable_numparse=True, stralign="right", tablefmt="github"))


if __name__ == "__main__":
    main()
