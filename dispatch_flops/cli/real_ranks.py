"""``profile --mesh``: profile a job on the ranks that torchrun started."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from dispatch_flops.cli.cluster_formats import show_cluster
from dispatch_flops.cli.clusters import find_job, parse_mesh
from dispatch_flops.cli.exit_codes import OK
from dispatch_flops.cli.output import print_progress
from dispatch_flops.errors import DispatchFlopsError, TargetError

# What applies to a job.
_OPTIONS = frozenset(("mesh", "device", "memory", "causal", "flops", "format", "output", "depth"))


def run_profile_on_ranks(options: Namespace) -> int:
    """Run one step of the job on every rank; rank 0 shows the merged profile."""
    _refuse_options_of_models(options)
    mesh = parse_mesh(options.mesh)
    world_size, ranks = os.environ.get("WORLD_SIZE"), math.prod(mesh.values())
    if "RANK" not in os.environ or world_size is None:
        raise TargetError(
            f"--mesh needs torchrun: torchrun --nproc-per-node {ranks} -m dispatch_flops profile "
            "...; without a cluster, use dispatch-flops simulate"
        )
    if ranks != int(world_size):
        raise TargetError(
            f"--mesh {options.mesh} has {ranks} ranks and torchrun started {world_size}; make them "
            "equal"
        )
    job = find_job(options.target)

    from dispatch_flops.cli.targets import raise_target_error
    from dispatch_flops.distributed import gather

    try:
        with _own_group(options.device), redirect_stdout(sys.stderr):
            if os.environ["RANK"] == "0":
                print_progress(f"profiling {options.target} on {world_size} ranks")
            profile = _profile(job, mesh, options)
            cluster = gather(profile)
    except DispatchFlopsError:
        raise
    except (Exception, SystemExit) as error:
        raise_target_error(f"rank {os.environ['RANK']} of {options.target}", error)
    if cluster is not None:
        show_cluster(cluster, options)
    return OK


def _refuse_options_of_models(options: Namespace) -> None:
    for name, default in options.defaults.items():
        if name not in _OPTIONS and getattr(options, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise TargetError(f"{option} is for a model; with --mesh TARGET is a job, so omit it")


def _profile(job: Any, mesh: Mapping[str, int], options: Namespace) -> Any:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    from dispatch_flops.distributed.simulation import as_step
    from dispatch_flops.profile.mesh_positions import mesh_dims
    from dispatch_flops.profilers.counter import FlopCounterMode

    kind = options.device.partition(":")[0]
    device_mesh = init_device_mesh(kind, tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    model, step = as_step(job(device_mesh))
    with FlopCounterMode(
        model,
        display=False,
        causal=options.causal,
        flops=options.flops,
        memory=options.memory,
        mesh=device_mesh,
    ) as counter:
        step()
    profile = counter.profile
    run = dataclasses.replace(
        profile.run,
        mesh=mesh_dims(distributed.get_rank(), mesh),
        command=getattr(options, "command_line", None),
    )
    return dataclasses.replace(profile, run=run)


@contextmanager
def _own_group(device: str) -> Iterator[None]:
    """Initialise the default process group for a block, unless the user's code has done so."""
    import torch
    from torch import distributed

    if distributed.is_initialized():
        yield
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        distributed.destroy_process_group()
