"""This process's rank, and the device mesh that it is part of."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.profile import MeshDim


@dataclass(frozen=True, slots=True)
class Ranks:
    """Position of this process among those of the program.

    world_size: None where there is no default process group. mesh: None where none is known.
    mesh_dims: ``{ranks of a group: name of the mesh dimension}``.
    """

    rank: int = 0
    world_size: int | None = None
    mesh: tuple[MeshDim, ...] | None = None
    mesh_dims: dict[tuple[int, ...], str] = field(default_factory=dict)

    @classmethod
    def of(cls, names: ModuleNames, mesh: Any = None) -> Ranks:
        """Return the ranks of a run of these modules, which are read only if there are ranks.

        mesh: the program's DeviceMesh; None: that of the first DTensor among the parameters.
        """
        distributed = torch.distributed
        if not distributed.is_available() or not distributed.is_initialized():
            return cls()
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        mesh = mesh if mesh is not None else next(_meshes_of(names.modules()), None)
        if mesh is None or not mesh.mesh_dim_names:
            return cls(rank, world_size)
        coordinates = mesh.get_coordinate() or [None] * mesh.ndim
        dims = []
        groups: dict[tuple[int, ...], str] = {}
        for index, name in enumerate(mesh.mesh_dim_names):
            dims.append(MeshDim(name=name, size=mesh.size(index), coordinate=coordinates[index]))
            if coordinates[index] is not None:
                groups.setdefault(_torch.ranks_of_group(mesh.get_group(index)), name)
        return cls(rank, world_size, tuple(dims), groups)


def _meshes_of(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield the whole mesh of each DTensor parameter."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return
    for module in modules:
        for parameter in module._parameters.values():
            if isinstance(parameter, tensor.DTensor):
                yield _torch.whole_mesh(parameter.device_mesh)
