"""The commands ``merge`` and ``simulate``: several ranks of one run side by side."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import redirect_stdout

from dispatch_flops.cli.arguments import (
    DEPTH_HELP,
    Commands,
    add_causal_option,
    add_command,
    add_flops_option,
    add_phase_option,
    add_table_options,
    natural,
    positive,
)
from dispatch_flops.cli.cluster_formats import CLUSTER_FORMATS, show_cluster
from dispatch_flops.cli.exit_codes import OK
from dispatch_flops.cli.show import load_saved
from dispatch_flops.errors import ConfigError, DispatchFlopsError, TargetError
from dispatch_flops.profile.cluster import ClusterProfile

JOB = (
    "a function that takes a DeviceMesh, builds and shards the model, and returns a function that "
    "runs one step"
)

_MERGE_EPILOG = """\
examples:
  dispatch-flops merge rank0.json rank1.json
  dispatch-flops merge rank*.json --output cluster.json
  dispatch-flops merge cluster.json --format html --output cluster.html
"""

_TARGET = f"TARGET is package.module:NAME or path/to/file.py:NAME. NAME is {JOB}."
_SIMULATE_EPILOG = f"""\
{textwrap.fill(_TARGET, 99)}

examples:
  dispatch-flops simulate job.py:job --mesh pp=2,dp=64,tp=8 --rank 777
  dispatch-flops simulate job.py:job --mesh dp=8 --memory --output cluster.json
  dispatch-flops show cluster.json --format comm

Without --rank, one rank of each kind is simulated, and the cluster is filled from them.
On real ranks, torchrun runs the same job:
  torchrun --nproc-per-node 4 -m dispatch_flops profile job.py:job --mesh dp=2,tp=2
"""


def add_merge(commands: Commands) -> None:
    parser = add_command(
        commands, "merge", "merge the saved profiles of the ranks of one run", _MERGE_EPILOG
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help="profiles saved as JSON, or merged ones"
    )
    _add_cluster_view_options(parser)
    parser.set_defaults(run=run_merge)


def run_merge(options: Namespace) -> int:
    clusters = [_load(path) for path in options.files]
    if len(clusters) == 1:
        merged = clusters[0]
    else:
        if any(cluster.represented for cluster in clusters):
            raise TargetError("a simulated cluster is complete; merge it with no other file")
        profiles = [profile for cluster in clusters for profile in cluster.profiles.values()]
        notes = dict.fromkeys(note for cluster in clusters for note in cluster.notes)
        merged = dataclasses.replace(ClusterProfile.merge(profiles), notes=tuple(notes))
    show_cluster(merged, options)
    return OK


def _load(path: str) -> ClusterProfile:
    saved = load_saved(path)
    if isinstance(saved, ClusterProfile):
        return saved
    try:
        return ClusterProfile.merge([saved])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def add_simulate(commands: Commands) -> None:
    parser = add_command(
        commands, "simulate", "profile ranks of a cluster without the cluster", _SIMULATE_EPILOG
    )
    parser.add_argument("target", metavar="TARGET", help="the job to simulate (see below)")
    add_mesh_option(parser, required=True)
    parser.add_argument(
        "--rank",
        action="extend",
        nargs="+",
        type=natural,
        metavar="RANK",
        help="ranks to simulate (default: one of each kind)",
    )
    add_causal_option(parser)
    add_flops_option(parser)
    parser.add_argument(
        "--memory",
        action="store_true",
        help="also follow what each rank allocates, and show the peaks",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="without --rank: also simulate a random rank of each kind, and note where it differs",
    )
    parser.add_argument(
        "--timeout",
        type=positive,
        default=600,
        metavar="SECONDS",
        help="longest time for one rank (default: 600)",
    )
    _add_cluster_view_options(parser)
    parser.set_defaults(run=run_simulate)


def run_simulate(options: Namespace) -> int:
    if options.verify and options.rank is not None:
        raise TargetError("--verify is for one rank of each kind; omit --rank or --verify")
    mesh = parse_mesh(options.mesh)
    job = find_job(options.target)

    from dispatch_flops.cli.targets import raise_target_error
    from dispatch_flops.distributed import simulate

    try:
        with redirect_stdout(sys.stderr):
            cluster = simulate(
                job,
                mesh,
                "representative" if options.rank is None else options.rank,
                causal=options.causal,
                flops=options.flops,
                memory=options.memory,
                verify=options.verify,
                timeout_s=options.timeout,
            )
    except DispatchFlopsError:
        raise
    except (Exception, SystemExit) as error:
        raise_target_error(f"simulating {options.target}", error)
    show_cluster(cluster, options)
    return OK


def find_job(target: str) -> Callable[..., object]:
    """Return the function that TARGET names; raises TargetError if there is none."""
    from dispatch_flops.cli.targets.objects import find_factory

    job: Callable[..., object] = find_factory(target, JOB).found
    return job


def add_mesh_option(parser: ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--mesh",
        required=required,
        metavar="NAME=SIZE,...",
        help="the dimensions of the device mesh, outermost first, such as pp=2,dp=64,tp=8"
        + ("" if required else "; profiles a job on the ranks that torchrun started"),
    )


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``"dp=2,tp=4"`` as ``{"dp": 2, "tp": 4}``; raises TargetError for other text."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not (equals and name.isidentifier() and size.isdecimal() and int(size)):
            raise TargetError(
                f"--mesh {text!r}: {part!r} is not a dimension; write NAME=SIZE, such as dp=2,tp=4"
            )
        if name in mesh:
            raise TargetError(f"--mesh {text!r}: {name} is given twice; give it once")
        mesh[name] = int(size)
    return mesh


def _add_cluster_view_options(parser: ArgumentParser) -> None:
    add_table_options(parser, *CLUSTER_FORMATS)
    parser.add_argument("--depth", type=natural, metavar="N", help=DEPTH_HELP)
    add_phase_option(parser)
