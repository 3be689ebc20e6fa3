"""Positions of ranks in a device mesh that holds all ranks of a run in order."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from dispatch_flops.profile.run_info import MeshDim

STAGE_DIMS = ("pp", "pipe", "pipeline", "stage")  # names of the dimension of pipeline stages
# Dimensions whose ranks have samples of their own, and those whose ranks share them.
DATA_DIMS = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard", "dp_replicate", "dp_shard")
SHARING_DIMS = ("tp", *STAGE_DIMS)


def coordinates_of(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    """Return the position of a rank in a mesh that holds all ranks in order.

    coordinates_of(5, {"dp": 2, "tp": 4})  # {"dp": 1, "tp": 1}
    """
    positions: dict[str, int] = {}
    for name, size in reversed(list(mesh.items())):
        rank, positions[name] = divmod(rank, size)
    return {name: positions[name] for name in mesh}


def rank_at(position: Mapping[str, int], mesh: Mapping[str, int]) -> int:
    """Return the rank at a position of such a mesh: ``coordinates_of`` the other way round."""
    rank = 0
    for name, size in mesh.items():
        rank = rank * size + position[name]
    return rank


def common_dims(ranks: Iterable[int], mesh: Mapping[str, int]) -> list[str]:
    """Return the dimensions of such a mesh in which these ranks have equal positions."""
    at = [coordinates_of(rank, mesh) for rank in ranks]
    return [name for name in mesh if len({position[name] for position in at}) == 1]


def mesh_dims(rank: int, mesh: Mapping[str, int]) -> tuple[MeshDim, ...]:
    """Return the dimensions of such a mesh with the positions of ``rank``."""
    at = coordinates_of(rank, mesh)
    return tuple(MeshDim(name=name, size=mesh[name], coordinate=at[name]) for name in mesh)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ranks as text, with ranges: ``[0, 1, 2, 5] -> "0-2, 5"``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)


def named_ranks(ranks: Collection[int]) -> str:
    """Return ranks as text, with the word: ``"rank 3"`` or ``"ranks 0-2, 5"``."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def fills(mesh: Mapping[str, int], world_size: int) -> bool:
    """Return True if such a mesh has as many positions as there are ranks."""
    return bool(mesh) and math.prod(mesh.values()) == world_size


def data_parallel_size_of(mesh: Mapping[str, int]) -> int | None:
    """Return how many times the samples of one rank the mesh has.

    None where a dimension is not known to have samples of its own, or to share them.
    """
    if not mesh.keys() <= {*DATA_DIMS, *SHARING_DIMS}:
        return None
    return math.prod(size for name, size in mesh.items() if name in DATA_DIMS)
