"""``simulate``: the profile of any rank of a cluster, from one process without the cluster."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal

from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from dispatch_flops.analysis.machines import is_finite
from dispatch_flops.distributed.fake_tensors import SimulatedTensorMode
from dispatch_flops.distributed.library_checks import without_tracing_checks
from dispatch_flops.distributed.messages import (
    Mailbox,
    MessageKey,
    MessageSent,
    MissingMessageError,
)
from dispatch_flops.distributed.shards import (
    Shard,
    classes,
    observed_shards,
    ranks_by_stage,
    unnamed_dims,
)
from dispatch_flops.distributed.verification import differences
from dispatch_flops.distributed.virtual_rank import training_models_of_the_job, virtual_rank
from dispatch_flops.distributed.watchdog import time_limit
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.operators.conventions import Causal, Flops, Target
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.memory import FollowMemory
from dispatch_flops.profile.mesh_positions import mesh_dims, named_ranks
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.units import times_text

Job = Callable[[DeviceMesh], Any]

_NOTE = "simulated in one process, without data and without the other ranks"
_FILLED = (
    "{} not simulated: each has the figures of {} of the same "
    "pipeline stage and the same sizes of parameter shards; communication names the groups of that "
    "rank; ranks that differ otherwise, as by uneven sequences or code that asks for its rank, are "
    "not told apart: name them in ranks="
)
_UNNAMED = (
    "parameters are sharded over {}, which mesh= does not name: ranks whose shards differ along it "
    "are not told apart; name them in ranks="
)
_FLAT = (
    "FSDP1 shards the parameters of a module together, so that ranks hold different parts of them: "
    "ranks that were not simulated may hold fewer parameters, and take other FLOPs in the "
    "optimizer's step; name them in ranks="
)
_VERIFIED = "verified: the counts of {}, chosen at random, equal those of a representative"
_DIFFERS = "rank {} differs from rank {}, which represents it: {}; name such ranks in ranks="
_VALUES_READ = (
    "values were read {}, as by .item(), and each was taken as 1: costs that depend on data, "
    "such as tokens per expert, may differ on a real run"
)
_OBJECTS_GATHERED = (
    "objects of all ranks were gathered {}, and those of other ranks taken as equal to the "
    "rank's own: costs that depend on them may differ on a real run"
)


def simulate(
    job: Job,
    mesh: Mapping[str, int],
    ranks: Iterable[int] | Literal["representative"] = "representative",
    *,
    causal: Causal = "full",
    flops: Flops = "all",
    target: Target = "cpu",
    memory: FollowMemory = False,
    memory_rounding: int = 1,
    verify: bool = False,
    timeout_s: float | None = 600.0,
) -> ClusterProfile:
    """Profile one step of ranks of a cluster, in this process and without the cluster.

        from torch.distributed.fsdp import fully_shard

        def job(mesh):
            model = torch.nn.Transformer(64, 4, 1, 1, 128)
            for layer in (*model.encoder.layers, *model.decoder.layers):
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
            return lambda: model(torch.ones(8, 2, 64), torch.ones(4, 2, 64)).sum().backward()

        cluster = simulate(job, mesh={"dp": 16}, ranks=[7])
        cluster.ranks[7].total("backward").flops
        cluster.ranks[7].comm_by("kind")  # its gathers and reduce-scatters

    job: builds and shards the model from a DeviceMesh, and returns a function without arguments
        that runs one step, or a pair of the model and that function. The same function runs on
        real ranks, under torchrun. Here all tensors are fake tensors on the CPU: they take no
        memory and have no values.
    mesh: name and size of each dimension, outermost first. World size is the product.
    ranks: which ranks to simulate. "representative" (the default) simulates one rank of each
        distinct kind, and fills the cluster from them: one of each pipeline stage, and one of each
        set of ranks whose parameter shards have equal shapes.
    causal, flops, target, memory, memory_rounding: as for FlopCounterMode.
    verify: also simulate one more rank of each kind, which a generator of random numbers with a
        fixed seed chooses. Notes of the cluster say where it differs from the rank that represents
        it, or that none differs. It has its own profile.
    timeout_s: longest time for one rank, in seconds; None for no limit. Other threads than the
        main one have no limit.

    Progress is printed to stderr, a line for each rank.

    A value that the step reads, as ``.item()`` does, is 1; a note of the cluster says so, because
    costs that depend on data may be different on a real run, such as those of experts. Objects that
    ranks gather are the rank's own; a note says so, too.

    Raises ConfigError for an unusable mesh, a rank outside it, ``verify`` with given ranks, and a
    time limit that is not above 0.
    Raises TargetError if the job does not take a mesh or return a step, if it does not end, if it
    trains a model that was built before it, or if a process group exists already. What the job
    raises is raised here, with a note that names the rank.
    """
    _check_job(job)
    dims = _checked_mesh(mesh)
    chosen = _checked_ranks(ranks, math.prod(dims.values()))
    if verify and chosen is not None:
        raise ConfigError('verify=True needs representatives; pass ranks="representative"')
    if timeout_s is not None and not (is_finite(timeout_s) and timeout_s > 0):
        raise ConfigError(
            f"timeout_s={timeout_s!r:.60}: pass seconds above 0, or None for no limit"
        )
    if distributed.is_initialized():
        raise TargetError(
            "a process group exists already; call destroy_process_group() first, or simulate in a "
            "process of its own"
        )
    simulator = _Simulator(
        job,
        dims,
        lambda model, device_mesh: FlopCounterMode(
            model,
            display=False,
            causal=causal,
            flops=flops,
            target=target,
            memory=memory,
            memory_rounding=memory_rounding,
            mesh=device_mesh,
        ),
        timeout_s,
    )
    if chosen is None:
        return simulator.representatives(verify=verify)
    return simulator.cluster(chosen)


class _Simulator:
    """Simulates ranks one after the other."""

    def __init__(
        self,
        job: Job,
        mesh: Mapping[str, int],
        new_counter: Callable[[Any, DeviceMesh], FlopCounterMode],
        timeout_s: float | None,
    ) -> None:
        self._job = job
        self._mesh = mesh
        self._new_counter = new_counter
        self._timeout_s = timeout_s
        self._mailbox = Mailbox()
        self._world_size = math.prod(mesh.values())
        self._values_read = self._objects_gathered = 0
        self._shards: dict[int, set[Shard]] = {}  # by the rank

    def cluster(self, ranks: Iterable[int]) -> ClusterProfile:
        """Return the profiles of these ranks."""
        return self._cluster({rank: self._profile(rank) for rank in ranks}, {})

    def representatives(self, *, verify: bool) -> ClusterProfile:
        """Return a profile of one rank of each kind, and the ranks that each stands for.

        verify: also return one of a random other rank of each kind, and what the two differ in.
        """
        generator = random.Random(0)
        compared: dict[int, int] = {}
        profiles: dict[int, Profile] = {}
        represented: dict[int, int] = {}
        for stage in ranks_by_stage(self._mesh):
            first = stage[0]
            profiles[first] = self._profile(first)
            for head, *others in classes(stage, self._shards[first], self._mesh):
                if head not in profiles:
                    profiles[head] = self._profile(head)
                represented |= dict.fromkeys(others, head)
                if verify and others:
                    compared[generator.choice(others)] = head
        for rank in compared:
            profiles[rank] = self._profile(rank)
            del represented[rank]
        notes = [*self._notes_on_shards()] if represented else []
        notes += _verification_notes(profiles, compared)
        return self._cluster(profiles, represented, notes)

    def _notes_on_shards(self) -> Iterator[str]:
        """Yield what represented ranks may differ in, because their shards are not known."""
        shards = set[Shard]().union(*self._shards.values())
        if unnamed := unnamed_dims(shards, self._mesh):
            yield _UNNAMED.format(", ".join(sorted(unnamed)))
        if any(shard.is_flat for shard in shards):
            yield _FLAT

    def _cluster(
        self,
        profiles: Mapping[int, Profile],
        represented: Mapping[int, int],
        further_notes: Iterable[str] = (),
    ) -> ClusterProfile:
        notes = [_NOTE]
        if represented:
            notes.append(_FILLED.format(_were(len(represented)), _one_of(len(profiles))))
        notes += further_notes
        if self._values_read:
            notes.append(_VALUES_READ.format(times_text(self._values_read)))
        if self._objects_gathered:
            notes.append(_OBJECTS_GATHERED.format(times_text(self._objects_gathered)))
        return ClusterProfile(
            profiles=dict(sorted(profiles.items())),
            represented=dict(sorted(represented.items())),
            world_size=self._world_size,
            notes=tuple(notes),
        )

    def _profile(self, rank: int) -> Profile:
        """Return the profile of a rank."""
        _print_progress(f"simulating rank {rank} of {self._world_size}")
        profile = self._run(rank, ())
        assert profile is not None
        return profile

    def _run(self, rank: int, awaited: tuple[MessageKey, ...]) -> Profile | None:
        """Run a rank until it has sent the last awaited message; without one, to its end.

        A message of another rank that is missing is awaited first.
        """
        while True:
            try:
                return self._attempt(rank, awaited[-1] if awaited else None)
            except MessageSent:
                return None
            except MissingMessageError as missing:
                sender = missing.key.channel.sender
                if missing.key in awaited:
                    raise TargetError(
                        f"ranks {sender} and {rank} wait for messages of each other"
                    ) from None
                _print_progress(f"  up to a message of rank {sender} to rank {rank}")
                self._run(sender, (*awaited, missing.key))

    def _attempt(self, rank: int, awaited: MessageKey | None) -> Profile | None:
        mode = SimulatedTensorMode()
        self._mailbox.start_rank(awaited)
        try:
            with (
                time_limit(self._timeout_s, f"rank {rank}"),
                virtual_rank(rank, self._mesh, mode, self._mailbox) as device_mesh,
            ):
                model, step = as_step(self._job(device_mesh))
                counter = self._new_counter(model, device_mesh)
                mode.values_read = 0
                with (
                    observed_shards() as shards,
                    training_models_of_the_job(),
                    without_tracing_checks(),
                    counter,
                ):
                    step()
                    mode.end_step()
        except MissingMessageError:
            raise
        except Exception as error:
            error.add_note(f"dispatch_flops: raised while rank {rank} was simulated")
            raise
        if awaited is not None:
            raise TargetError(f"rank {rank} ended before it sent what another rank waits for")
        self._values_read += mode.values_read
        self._objects_gathered += mode.objects_gathered
        self._shards[rank] = shards
        profile = counter.profile
        place = {"world_size": self._world_size, "mesh": mesh_dims(rank, self._mesh)}
        run = dataclasses.replace(profile.run, rank=rank, **place)  # type: ignore[arg-type]
        return dataclasses.replace(profile, run=run)


def _were(ranks: int) -> str:
    return "1 rank was" if ranks == 1 else f"{ranks} ranks were"


def _one_of(simulated: int) -> str:
    return "the simulated rank" if simulated == 1 else f"one of {simulated} simulated ranks"


def _verification_notes(
    profiles: Mapping[int, Profile], compared: Mapping[int, int]
) -> Iterator[str]:
    """Yield what the compared ranks differ in from their representatives.

    compared: ``{rank: its representative}``.
    """
    found = {rank: differences(profiles[head], profiles[rank]) for rank, head in compared.items()}
    for rank, texts in found.items():
        if texts:
            yield _DIFFERS.format(rank, compared[rank], ", ".join(texts))
    equal = [rank for rank, texts in found.items() if not texts]
    if equal:
        yield _VERIFIED.format(named_ranks(equal))


def _check_job(job: Any) -> None:
    if not callable(job) or isinstance(job, nn.Module):
        raise TargetError(
            f"the job is of type {type(job).__name__}; pass a function that takes a DeviceMesh"
        )
    try:
        signature = inspect.signature(job)
    except ValueError:  # some functions in C have none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TargetError(
            f"the job cannot be called with a DeviceMesh alone: {error}; pass a function that "
            "takes one"
        ) from None


def as_step(result: Any) -> tuple[Any, Callable[[], Any]]:
    """Return the model, or None, and the function that runs a step."""
    model, step = result if isinstance(result, tuple) and len(result) == 2 else (None, result)
    if not callable(step) or isinstance(step, nn.Module):
        raise TargetError(
            f"the job returned an object of type {type(result).__name__}; return a function "
            "without arguments that runs one step, or a pair of the model and that function"
        )
    return model, step


def _checked_mesh(mesh: Any) -> dict[str, int]:
    if not isinstance(mesh, Mapping) or not mesh:
        raise ConfigError(f'mesh={mesh!r:.60}: pass names and sizes, such as {{"dp": 2, "tp": 4}}')
    for name, size in mesh.items():
        if not isinstance(name, str) or not name or type(size) is not int or size < 1:
            raise ConfigError(
                f"mesh has {name!r:.60}: {size!r:.60}; a dimension has a name and a size of at "
                "least 1"
            )
    return dict(mesh)


def _checked_ranks(ranks: Any, world_size: int) -> list[int] | None:
    """Return the ranks to simulate; None for representatives."""
    if ranks == "representative":
        return None
    if isinstance(ranks, str) or not isinstance(ranks, Iterable):
        raise ConfigError(f'ranks={ranks!r:.60}: pass a list of ranks, or "representative"')
    chosen = list(dict.fromkeys(ranks))
    if not chosen:
        raise ConfigError('ranks is empty; pass at least one rank, or "representative"')
    for rank in chosen:
        if type(rank) is not int or not 0 <= rank < world_size:
            raise ConfigError(
                f"rank {rank!r:.60} is out of range; the mesh has ranks 0 to {world_size - 1}"
            )
    return chosen


def _print_progress(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)
