"""Dimensions of a device mesh: what ``plan`` shards over, and which ranks share their samples."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile
from dispatch_flops.profile.mesh_positions import data_parallel_size_of

DIMS = ("dp", "tp")


def is_job(build: Callable[..., Any]) -> bool:
    """Return True for a function that needs an argument ``mesh``: it shards its model itself."""
    try:
        parameter = inspect.signature(build).parameters.get("mesh")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty


def check_dims(mesh: Mapping[str, int]) -> None:
    """Raise ConfigError for a dimension over which ``plan`` does not shard by itself."""
    others = [name for name in mesh if name not in DIMS]
    if others:
        raise ConfigError(
            f"mesh has {', '.join(others)}: a model is sharded over dp and tp; for other "
            "dimensions pass a job, a function with a parameter mesh that shards its model"
        )


def of_all_ranks(
    found: tuple[int | None, int | None], mesh: Mapping[str, int]
) -> tuple[int | None, int | None]:
    """Return samples and tokens of all ranks from those of one; None where not known.

    Both are unknown where ``data_parallel_size_of`` the mesh is.
    """
    times = data_parallel_size_of(mesh)
    if times is None:
        return None, None
    samples, tokens = (None if count is None else count * times for count in found)
    return samples, tokens


def observed_samples(profiles: Iterable[Profile]) -> tuple[int | None, int | None]:
    """Return samples and tokens of the calls of the model, on the first rank that shows them.

    A micro-batch is a call. Later pipeline stages are called with activations.
    """
    for profile in profiles:
        inputs, calls = profile.run.inputs, profile.root.calls
        if not inputs or not calls or inputs[0].shape is None or not inputs[0].shape:
            continue
        shape = inputs[0].shape
        is_ids = len(shape) == 2 and inputs[0].dtype.startswith(("int", "uint"))
        return shape[0] * calls, math.prod(shape) * calls if is_ids else None
    return None, None
