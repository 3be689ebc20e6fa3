"""``gather``: the profiles of a running program's ranks in one of them."""

from __future__ import annotations

import dataclasses
import itertools
import time
import zlib
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import distributed

from dispatch_flops import _torch
from dispatch_flops.analysis.machines import is_finite
from dispatch_flops.distributed.watchdog import LONGEST_S
from dispatch_flops.errors import ConfigError, NotProfiledError
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.holders import check_profile
from dispatch_flops.profile.mesh_positions import named_ranks

_numbers = itertools.count()  # of this process's calls; all ranks call gather equally often


def gather(profile: Profile, dst: int = 0, *, timeout_s: float = 300.0) -> ClusterProfile | None:
    """Return the profiles of all ranks on rank ``dst``, and None on the other ranks.

    Every rank of the default process group calls it, after the counter's block::

        with FlopCounterMode(model, display=False) as counter:
            model(x).sum().backward()
        cluster = gather(counter.profile)
        if cluster is not None:
            print(cluster.maximum("flops"), cluster.straggler("flops"))

    Profiles travel through the store by which the process group was initialised, so no collective
    runs, and a rank that has ended does not block the others. The first call of each rank is
    answered by the first of the others, and so on: a rank that leaves a call out is late from then
    on, with the profiles of other steps.

    profile: of this rank. dst: the rank that receives.
    timeout_s: longest time to wait for all other ranks together, in seconds. The profiles of ranks
        that are late are missing in the result, which names them in ``missing`` and ``notes``.

    Without a process group, rank 0 is the only one, and the result holds ``profile`` alone.
    Raises ConfigError if ``profile`` is not one, ``dst`` is not a rank or ``timeout_s`` is not a
    number of 0 or more, and NotProfiledError on a simulated rank.
    """
    check_profile("profile", profile)
    check_timeout(timeout_s)
    has_group = distributed.is_available() and distributed.is_initialized()
    rank, world_size = 0, 1
    if has_group:
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if type(dst) is not int or not 0 <= dst < world_size:
        raise ConfigError(f"dst={dst!r:.60} is not a rank; choose one of 0 to {world_size - 1}")
    if not has_group:
        return ClusterProfile.merge([profile])
    if distributed.get_backend() == "fake":
        raise NotProfiledError(
            "a simulated rank has no other ranks; simulate() merges their profiles"
        )
    box = _Box(_torch.default_store(), next(_numbers), time.monotonic() + min(timeout_s, LONGEST_S))
    profile = _with_rank(profile, rank, world_size)
    if rank != dst:
        box.send(rank, profile)
        return None
    found = {rank: profile}
    try:
        for other in range(world_size):
            if other != rank and (received := box.receive(other)) is not None:
                found[other] = received
    finally:
        box.confirm()
    missing = [other for other in range(world_size) if other not in found]
    cluster = ClusterProfile.merge(found[other] for other in sorted(found))
    if not missing:
        return cluster
    note = f"no profile arrived from {named_ranks(missing)} within {timeout_s:g} s"
    return dataclasses.replace(cluster, notes=(*cluster.notes, note))


def gather_if_several(profile: Profile, *, timeout_s: float = 300.0) -> ClusterProfile | None:
    """Return the profiles of all ranks on rank 0; None elsewhere, and without other ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return gather(profile, timeout_s=timeout_s) if distributed.get_world_size() > 1 else None


class _Box:
    """Profiles of one call of ``gather``, in the store of the process group."""

    def __init__(self, store: Any, number: int, deadline: float) -> None:
        self._store = store
        self._name = f"dispatch_flops/gather/{number}"
        self._deadline = deadline

    def send(self, rank: int, profile: Profile) -> None:
        """Store the profile of this rank, and wait until it was read.

        The process of this rank may host the store, which must not end before that.
        """
        self._store.set(f"{self._name}/{rank}", zlib.compress(profile.to_json().encode()))
        with suppress(RuntimeError):
            self._wait(f"{self._name}/done")

    def receive(self, rank: int) -> Profile | None:
        """Return the profile of a rank; None if it does not arrive in time."""
        key = f"{self._name}/{rank}"
        try:
            self._wait(key)
            text = zlib.decompress(self._store.get(key)).decode()
        except RuntimeError:  # the time is over, or the store is gone
            return None
        with suppress(RuntimeError):  # some stores keep every key
            self._store.delete_key(key)
        return Profile.from_json(text)

    def confirm(self) -> None:
        """Let the other ranks go on."""
        with suppress(RuntimeError):
            self._store.set(f"{self._name}/done", b"1")

    def _wait(self, key: str) -> None:
        left = max(self._deadline - time.monotonic(), 0.001)
        self._store.wait([key], timedelta(seconds=left))


def check_timeout(timeout_s: object) -> None:
    """Raise ConfigError for what is not a time to wait."""
    if not is_finite(timeout_s) or timeout_s < 0:
        raise ConfigError(f"timeout_s={timeout_s!r:.60}: pass seconds of 0 or more")


def _with_rank(profile: Profile, rank: int, world_size: int) -> Profile:
    """Return the profile with its rank and world size, which a counter without a group lacks."""
    run = dataclasses.replace(profile.run, rank=rank, world_size=world_size)
    return dataclasses.replace(profile, run=run)
