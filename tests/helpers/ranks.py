"""Real ranks of gloo, each a process, for tests of programs of several ranks.

As a script: ``python ranks.py RANK FOLDER``. FOLDER/run.json says what to run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.helpers.paths import REPOSITORY


def run_script(script: Path, world_size: int, *args: str, timeout_s: float = 120.0) -> list[str]:
    """Run ``python script RANK args...`` as so many processes; return what each printed.

    Asserts that each ends well. No process is left behind.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    try:
        outputs = []
        for rank, process in enumerate(processes):
            out, error = process.communicate(timeout=timeout_s)
            assert process.returncode == 0, f"rank {rank}: {error[-3000:]}"
            outputs.append(out)
        return outputs
    finally:
        for process in processes:
            process.kill()
            process.wait()


def real_clusters(jobs: Mapping[str, Sequence[tuple[str, int]]], folder: Path) -> dict[str, str]:
    """Return ``{job: JSON of its ClusterProfile}`` of jobs that ran on real ranks.

    jobs: names in tests.models.parallel, with the mesh of each; all of one world size.
    """
    (folder / "jobs.json").write_text(json.dumps({name: list(mesh) for name, mesh in jobs.items()}))
    world_size = 1
    for _, size in next(iter(jobs.values())):
        world_size *= size
    run_script(Path(__file__), world_size, str(world_size), str(folder))
    return {name: (folder / f"{name}.json").read_text() for name in jobs}


def _main(rank: int, world_size: int, folder: Path) -> None:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    from dispatch_flops import FlopCounterMode
    from dispatch_flops.distributed import gather
    from tests.models import parallel

    store = distributed.FileStore(str(folder / "store"), world_size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for name, dims in json.loads((folder / "jobs.json").read_text()).items():
        mesh = init_device_mesh(
            "cpu", tuple(size for _, size in dims), mesh_dim_names=tuple(dim for dim, _ in dims)
        )
        built = getattr(parallel, name)(mesh)
        model, step = built if isinstance(built, tuple) else (None, built)
        with FlopCounterMode(model, display=False) as counter:
            step()
        cluster = gather(counter.profile, timeout_s=60)
        if cluster is not None:
            (folder / f"{name}.json").write_text(cluster.to_json())
    distributed.destroy_process_group()


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
