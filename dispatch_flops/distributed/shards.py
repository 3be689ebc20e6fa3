"""Which ranks of a cluster do the same: those of one pipeline stage with equal parameter shards."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.modules.module import register_module_forward_pre_hook

from dispatch_flops.counting.sharded_parameters import flat_parameters
from dispatch_flops.profile.mesh_positions import STAGE_DIMS, coordinates_of


@dataclass(frozen=True, slots=True)
class Shard:
    """How a parameter is divided between ranks.

    cuts: mesh dimension and tensor dimension of each cut, in the order of the cuts.
    is_flat: it consists of parameters that FSDP1 cuts together, wherever a cut falls.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[str, int], ...]
    is_flat: bool = False

    def local_shapes(
        self, at: Mapping[str, int], mesh: Mapping[str, int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the shard at a position of the mesh, after each cut.

        The rank holds the last. It computes with an earlier one where FSDP undoes the later cuts.
        A cut in n parts gives ceil(size / n) to each rank while there is something left.
        Source: torch.chunk, by which DTensor cuts.
        """
        shapes = [list(self.shape)]
        for name, dim in self.cuts:
            shape = shapes[-1].copy()
            part = -(-shape[dim] // mesh[name])
            shape[dim] = max(0, min(part, shape[dim] - part * at[name]))
            shapes.append(shape)
        return tuple(map(tuple, shapes))


@contextmanager
def observed_shards() -> Iterator[set[Shard]]:
    """Yield a set that receives the shards of the modules that are called first in the block.

    FSDP gathers parameters when a module is called, so they are looked at before.
    """
    shards: set[Shard] = set()
    seen: set[int] = set()

    def look(module: nn.Module, args: object) -> None:
        if id(module) not in seen:
            seen.update(id(below) for below in module.modules())
            shards.update(_shards_of(module))

    hook = register_module_forward_pre_hook(look)
    try:
        yield shards
    finally:
        hook.remove()


def _shards_of(module: nn.Module) -> Iterator[Shard]:
    if flat_parameters(module.modules()).ids:
        yield Shard(shape=(), cuts=(), is_flat=True)
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            cuts = [
                (name, placement)
                for name, placement in zip(names, parameter.placements, strict=False)
                if placement.is_shard() or _is_strided(placement)
            ]
            # A strided shard is cut after the shards of the mesh dimensions to its right.
            cuts.sort(key=lambda cut: _is_strided(cut[1]))
            yield Shard(
                tuple(parameter.shape),
                tuple((name, placement.dim) for name, placement in cuts),  # type: ignore[attr-defined]
            )


def _is_strided(placement: Placement) -> bool:
    return hasattr(placement, "split_factor")


def ranks_by_stage(mesh: Mapping[str, int]) -> list[list[int]]:
    """Return the ranks of each pipeline stage; all ranks together without a pipeline."""
    stage_dim = next((name for name in STAGE_DIMS if name in mesh), None)
    stages: dict[int | None, list[int]] = {}
    for rank, at in enumerate(positions(mesh)):
        stages.setdefault(None if stage_dim is None else at[stage_dim], []).append(rank)
    return list(stages.values())


def positions(mesh: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield the position of every rank, in the order of the ranks."""
    for at in itertools.product(*map(range, mesh.values())):
        yield dict(zip(mesh, at, strict=True))


def unnamed_dims(shards: Iterable[Shard], mesh: Mapping[str, int]) -> set[str]:
    """Return the names of dimensions that parameters are sharded over and the mesh lacks."""
    return {name for shard in shards for name, _ in shard.cuts if name not in mesh}


def classes(
    ranks: Sequence[int], shards: Iterable[Shard], mesh: Mapping[str, int]
) -> list[list[int]]:
    """Return the ranks in groups whose parameter shards have equal shapes, in order of rank.

    Shapes are equal after each cut: ranks with equal parts of unequal shards compute differently.
    """
    named = [shard for shard in shards if not unnamed_dims([shard], mesh)]
    groups: dict[object, list[int]] = {}
    for rank in ranks:
        at = coordinates_of(rank, mesh)
        shapes = tuple(shard.local_shapes(at, mesh) for shard in named)
        groups.setdefault(shapes, []).append(rank)
    return list(groups.values())
