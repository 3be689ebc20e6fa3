"""The profiles of several ranks of one run, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

from dispatch_flops.errors import ConfigError, ProfileFormatError
from dispatch_flops.profile.communication import CommCost
from dispatch_flops.profile.cost import PHASES, OpCost, Phase, add_costs, check_phase
from dispatch_flops.profile.fields import texts
from dispatch_flops.profile.holders import check_profile
from dispatch_flops.profile.json_data import parse_saved
from dispatch_flops.profile.mesh_positions import STAGE_DIMS, coordinates_of, fills
from dispatch_flops.profile.profile import CLUSTER_SCHEMA, Profile
from dispatch_flops.profile.rank_figures import (
    BY,
    By,
    Spread,
    module_values,
    spread_of,
    total_of,
    value_of,
)

CLUSTER_VERSION = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class ClusterProfile:
    """The profiles of the ranks of one run; ranks are shown side by side and never averaged.

    profiles: ``{rank: profile}`` of the ranks that were profiled or simulated.
    represented: ``{rank: representative}`` of further ranks, whose profile equals that of a
        simulated one except for the rank.
    world_size: number of ranks of the run. notes: what a reader must know of the merge.

    Methods take ``phase``, one phase or None (the default) for all, and ``dim``, the name of a
    dimension of the mesh.

    Example::

        cluster = ClusterProfile.merge([Profile.from_json(text) for text in texts])
        cluster.total("backward").flops  # of all ranks together
        cluster.imbalance("flops")  # maximum / mean over ranks
        cluster.along("pp")[0].straggler("communication")
    """

    profiles: Mapping[int, Profile]
    represented: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    world_size: int
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        counts = {
            "profiled": self.profiles,
            "represented": self.represented,
            "missing": self.missing,
        }
        shown = ", ".join(f"{len(ranks)} {name}" for name, ranks in counts.items() if ranks)
        return f"<ClusterProfile of {self.world_size} ranks: {shown}>"

    def __str__(self) -> str:
        """Return the printout: figures over ranks, communication and modules."""
        from dispatch_flops.renderers import cluster_table  # above this room: imported when shown

        return cluster_table.render(self)

    @classmethod
    def merge(cls, profiles: Iterable[Profile]) -> ClusterProfile:
        """Return the profiles of the ranks of one run together.

        Ranks without a profile are ``missing``. Raises ConfigError without a profile, for what is
        not a list of them, for two profiles of one rank, and for profiles of different runs.
        """
        if not isinstance(profiles, Iterable) or isinstance(profiles, str):
            raise ConfigError(f"profiles is of type {type(profiles).__name__}; pass a list of them")
        merged: dict[int, Profile] = {}
        for profile in profiles:
            check_profile("one of the profiles", profile)
            rank = profile.run.rank
            if rank in merged:
                raise ConfigError(
                    f"two profiles are of rank {rank}; merge one profile of each rank of one run"
                )
            merged[rank] = profile
        if not merged:
            raise ConfigError("there is nothing to merge; pass the profile of at least one rank")
        ranks = sorted(merged)
        world_size = _common_world_size([merged[rank] for rank in ranks])
        return cls(profiles={rank: merged[rank] for rank in ranks}, world_size=world_size)

    # -- ranks ------------------------------------------------------------------------------

    @property
    def ranks(self) -> Mapping[int, Profile]:
        """``{rank: profile}`` of all known ranks; a represented rank has its representative's."""
        known = {**self.profiles}
        known |= {rank: self.profiles[of] for rank, of in self.represented.items()}
        return MappingProxyType(dict(sorted(known.items())))

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks of the run whose profile is not known."""
        known = self.profiles.keys() | self.represented.keys()
        return tuple(rank for rank in range(self.world_size) if rank not in known)

    @cached_property
    def mesh(self) -> dict[str, int] | None:
        """``{dimension: size}`` of the device mesh, outermost first.

        It is the mesh of all ranks, which some of them know. Without one it is the mesh that ranks
        have in common; None where none is known, or ranks have meshes of their own.
        """
        known = [mesh for mesh in map(_mesh_of, self.profiles.values()) if mesh is not None]
        known = [mesh for mesh in known if fills(mesh, self.world_size)] or known
        return known[0] if known and all(mesh == known[0] for mesh in known) else None

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the position of a rank in each mesh dimension; empty where no mesh is known.

        Raises ConfigError for a rank that the run does not have.
        """
        if rank not in range(self.world_size):
            raise ConfigError(
                f"rank {rank!r:.60} is out of range; the run has ranks 0 to {self.world_size - 1}"
            )
        run = self.profiles[rank].run if rank in self.profiles else None
        own = run.coordinates if run is not None and run.rank == rank else {}
        mesh = self.mesh or {}
        return (coordinates_of(rank, mesh) if fills(mesh, self.world_size) else {}) | own

    def stage(self, rank: int) -> int | None:
        """Return the pipeline stage of a rank, its position in a mesh dimension such as "pp"."""
        found = self.coordinates(rank)
        return next((found[name] for name in STAGE_DIMS if name in found), None)

    def along(self, dim: str) -> dict[int, ClusterProfile]:
        """Return ``{position: the ranks at that position}`` of a mesh dimension.

        Raises ConfigError if the mesh has no such dimension.
        """
        mesh = self.mesh or {}
        if dim not in mesh:
            raise ConfigError(
                f"dim={dim!r:.60} is not a mesh dimension; choose one of "
                f"{', '.join(mesh) or '(none)'}"
            )
        at = {rank: self.coordinates(rank).get(dim) for rank in self.ranks}
        return {
            position: self._part([rank for rank in at if at[rank] == position])
            for position in sorted({p for p in at.values() if p is not None})
        }

    def _part(self, ranks: list[int]) -> ClusterProfile:
        """Return these ranks alone; one of the ranks of each representative stays profiled."""
        heads: dict[int, int] = {}
        for rank in ranks:
            source = self.represented.get(rank, rank)
            if source not in heads or rank == source:
                heads[source] = rank
        profiles = {head: self.profiles[source] for source, head in heads.items()}
        represented = {
            rank: heads[self.represented.get(rank, rank)] for rank in ranks if rank not in profiles
        }
        return ClusterProfile(
            profiles=profiles, represented=represented, world_size=self.world_size, notes=self.notes
        )

    # -- figures ----------------------------------------------------------------------------

    def total(self, phase: Phase | None = None) -> OpCost:
        """Return the cost of all known ranks together, in one phase or in all."""
        self._check_phase(phase)
        return add_costs(
            total_of(self.profiles[rank], phase) * len(same)
            for rank, same in self.same_ranks().items()
        )

    def communication(self, phase: Phase | None = None) -> CommCost:
        """Return calls and bytes of communication of all known ranks together."""
        self._check_phase(phase)
        costs = (
            total.cost * len(same)
            for rank, same in self.same_ranks().items()
            for total in self.profiles[rank].communication
            if phase is None or total.phase == phase
        )
        return sum(costs, start=CommCost())

    def value(self, rank: int, by: By = "flops", phase: Phase | None = None) -> float | None:
        """Return a figure of one rank; None where it was not measured.

        by: "macs", "flops", "bytes" (read and written), "communication" (payload bytes), "time"
            (seconds), "memory" (bytes at the peak) or "params" (elements on this rank).

        Raises ConfigError for another ``by`` or an unknown phase, KeyError for an unknown rank.
        """
        self._check_figure(by, phase)
        return value_of(self.profiles[self.represented.get(rank, rank)], by, phase)

    def spread(self, by: By = "flops", phase: Phase | None = None) -> Spread | None:
        """Return minimum, maximum, total and straggler of a figure; None where not measured."""
        values = {
            rank: value
            for rank in self.profiles
            if (value := self.value(rank, by, phase)) is not None
        }
        return spread_of(values, self.same_ranks())

    def minimum(self, by: By = "flops", phase: Phase | None = None) -> float | None:
        """Return the smallest figure of a rank."""
        spread = self.spread(by, phase)
        return None if spread is None else spread.minimum

    def maximum(self, by: By = "flops", phase: Phase | None = None) -> float | None:
        """Return the largest figure of a rank."""
        spread = self.spread(by, phase)
        return None if spread is None else spread.maximum

    def imbalance(self, by: By = "flops", phase: Phase | None = None) -> float | None:
        """Return maximum / mean over ranks: 1.0 where all are equal; None where all are 0."""
        spread = self.spread(by, phase)
        return None if spread is None else spread.imbalance

    def straggler(self, by: By = "flops", phase: Phase | None = None) -> int | None:
        """Return the first rank that has the largest figure."""
        spread = self.spread(by, phase)
        return None if spread is None else spread.straggler

    def by_module(
        self, by: By = "flops", phase: Phase | None = None
    ) -> dict[tuple[int | None, str], Spread]:
        """Return ``{(stage, fqn): spread of the inclusive figure over the ranks of the stage}``.

        Stages are apart, because modules of different stages may have equal names. The stage is
        None without a pipeline. Communication is that of the module itself.
        """
        self._check_figure(by, phase)
        classes = self.same_ranks()
        values: dict[tuple[int | None, str], dict[int, float]] = {}
        for rank, profile in self.profiles.items():
            stage = self.stage(rank)
            for fqn, value in module_values(profile, by, phase):
                values.setdefault((stage, fqn), {})[rank] = value
        spreads = {key: spread_of(found, classes) for key, found in values.items()}
        return {key: spread for key, spread in spreads.items() if spread is not None}

    def _check_figure(self, by: By, phase: Phase | None) -> None:
        if by not in BY:
            raise ConfigError(f"by={by!r:.60}: choose one of {', '.join(BY)}")
        self._check_phase(phase)

    def _check_phase(self, phase: Phase | None) -> None:
        if phase is not None and phase not in PHASES:
            ops = (op for profile in self.profiles.values() for op in profile.op_totals())
            check_phase(phase, (op.phase for op in ops))

    def same_ranks(self) -> dict[int, list[int]]:
        """Return ``{profiled rank: all ranks that it stands for, itself first}``."""
        classes = {rank: [rank] for rank in self.profiles}
        for rank, source in self.represented.items():
            classes[source].append(rank)
        return classes

    # -- saving -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as plain dicts, lists, strings and numbers."""
        return {
            "schema": CLUSTER_SCHEMA,
            "version": CLUSTER_VERSION,
            "world_size": self.world_size,
            "notes": list(self.notes),
            "represented": [
                {"by": rank, "ranks": same[1:]}
                for rank, same in self.same_ranks().items()
                if len(same) > 1
            ],
            "profiles": [
                {"rank": rank, "profile": profile.to_dict()}
                for rank, profile in self.profiles.items()
            ],
        }

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the cluster as JSON text; ``from_json`` gives back an equal one.

        indent: spaces of each level; None (the default) for one line.
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Any) -> ClusterProfile:
        """Return the cluster that ``to_dict`` wrote; raises ProfileFormatError on other data."""
        if not isinstance(data, dict) or data.get("schema") != CLUSTER_SCHEMA:
            raise ProfileFormatError(
                f'this is not a merged profile: the key "schema" is not "{CLUSTER_SCHEMA}"'
            )
        if data.get("version") != CLUSTER_VERSION:
            raise ProfileFormatError(
                f"saved with cluster version {data.get('version')!r:.60}; this release reads "
                f"version {CLUSTER_VERSION}: read it with the release that wrote it"
            )
        try:
            return cls(
                profiles={
                    _rank(row["rank"]): Profile.from_dict(row["profile"])
                    for row in data["profiles"]
                },
                represented={
                    _rank(rank): _rank(row["by"])
                    for row in data["represented"]
                    for rank in row["ranks"]
                },
                world_size=_rank(data["world_size"]),
                notes=texts(data["notes"]),
            )._checked()
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ProfileFormatError(f"the merged profile is damaged: {error}") from error

    def _checked(self) -> ClusterProfile:
        if not self.profiles:
            raise ValueError("it has no profiles")
        known = [*self.profiles, *self.represented]
        if len(set(known)) < len(known) or not all(rank < self.world_size for rank in known):
            raise ValueError("a rank is there twice, or is not below world_size")
        if not set(self.represented.values()) <= self.profiles.keys():
            raise ValueError("a representative has no profile")
        return self

    @classmethod
    def from_json(cls, text: str) -> ClusterProfile:
        """Return the cluster that ``to_json`` wrote; raises ProfileFormatError on other text."""
        return cls.from_dict(parse_saved(text, "merged"))


def is_cluster(text: str) -> bool:
    """Return True if a text is JSON that says that it is a cluster's."""
    try:
        data = parse_saved(text, "saved")
    except ProfileFormatError:
        return False
    return isinstance(data, dict) and data.get("schema") == CLUSTER_SCHEMA


def _common_world_size(profiles: list[Profile]) -> int:
    """Return the world size of all; raises ConfigError where they are of different runs."""
    first = profiles[0].run
    for profile in profiles[1:]:
        for name in ("world_size", "step", "causal", "flops", "subclass", "torch_version"):
            a, b = getattr(first, name), getattr(profile.run, name)
            if a != b:
                raise _different_runs(first.rank, profile.run.rank, name, a, b)
    last = profiles[-1].run.rank
    world_size = first.world_size or last + 1
    if last >= world_size:
        raise ConfigError(f"rank {last} is not below world_size={world_size}; check the profiles")
    _check_meshes(profiles, world_size)
    return world_size


def _check_meshes(profiles: list[Profile], world_size: int) -> None:
    """Raise ConfigError for two meshes of all ranks that differ.

    Other meshes may differ: a stage of a pipeline may have one of its own, or none.
    """
    whole = [(p.run.rank, mesh) for p in profiles if fills(mesh := _mesh_of(p) or {}, world_size)]
    for rank, mesh in whole:
        first, other = whole[0]
        if mesh != other:
            raise _different_runs(first, rank, "mesh", other, mesh)


def _different_runs(a: int, b: int, name: str, of_a: Any, of_b: Any) -> ConfigError:
    return ConfigError(
        f"the profiles are of different runs: {name} is {of_a} on rank {a} and {of_b} on rank {b}; "
        "merge the profiles of one run"
    )


def _mesh_of(profile: Profile) -> dict[str, int] | None:
    mesh = profile.run.mesh
    return None if mesh is None else {dim.name: dim.size for dim in mesh}


def _rank(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r:.60} is not a rank")
    return number
