"""Modules of a cluster as the page stores them: a tree for each pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from dispatch_flops.profile.cluster import ClusterProfile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.rank_figures import By, Spread
from dispatch_flops.renderers.cluster_marks import modules_of_unknown_cost
from dispatch_flops.renderers.cluster_table import level_of

MOST_ROWS = 3000  # deeper levels are left out
_FIGURES: tuple[By, ...] = ("flops", "communication", "params", "time")

Data = dict[str, Any]
Key = tuple[int | None, str]  # stage and fqn


def module_rows(
    cluster: ClusterProfile, views: Mapping[str, Phase | None], depth: int | None
) -> Data:
    """Return ``{name: column}`` with a row for every module of each stage, parents first.

    "spreads" has a number where ranks agree, else minimum, maximum, imbalance and straggler.
    Communication is that of the module itself. Levels are left out from the deepest on if there
    are more than 3,000 rows, as "left_out" says.

    depth: deepest level of modules; None for all.
    """
    classes = _classes(cluster)
    kept = _kept(list(classes), depth)
    index = {key: i for i, key in enumerate(kept)}
    parents = [_parent(key, index) for key in kept]
    return {
        "stage": [stage for stage, _ in kept],
        "fqn": [fqn for _, fqn in kept],
        "name": [_name(key, parent) for key, parent in zip(kept, parents, strict=True)],
        "class_name": [classes[key] for key in kept],
        "extra_repr": [""] * len(kept),
        "parent": [-1 if parent is None else index[parent] for parent in parents],
        "modules": [1] * len(kept),
        "lower_bound": {
            name: [index[key] for key in modules_of_unknown_cost(cluster, phase) if key in index]
            for name, phase in views.items()
        },
        "inexact": {},
        "left_out": len(classes) - len(kept),
        "spreads": {
            by: {name: _column(cluster, by, phase, kept) for name, phase in views.items()}
            for by in _FIGURES
        },
    }


def _classes(cluster: ClusterProfile) -> dict[Key, str]:
    found: dict[Key, str] = {}
    for rank, profile in cluster.profiles.items():
        stage = cluster.stage(rank)
        for node in profile.root.walk():
            found.setdefault((stage, node.fqn), node.class_name)
    return found


def _kept(keys: list[Key], depth: int | None) -> list[Key]:
    """Return the keys by stage and level; a level is kept where it fits with those above it."""
    levels = Counter(level_of(fqn) for _, fqn in keys)
    sizes = accumulate(levels[level] for level in range(max(levels) + 1))
    fitting = [level for level, size in enumerate(sizes) if not level or size <= MOST_ROWS]
    deepest = fitting[-1] if depth is None else min(depth, fitting[-1])
    kept = [key for key in keys if level_of(key[1]) <= deepest]
    return sorted(kept, key=lambda key: (key[0] or 0, level_of(key[1])))


def _parent(key: Key, known: Mapping[Key, int]) -> Key | None:
    stage, fqn = key
    if not fqn:
        return None
    above = fqn.rpartition(".")[0]
    return (stage, above) if (stage, above) in known else _parent((stage, above), known)


def _name(key: Key, parent: Key | None) -> str:
    """Return the name below the parent; of a model, its stage."""
    stage, fqn = key
    if parent is None:
        return fqn or ("" if stage is None else f"stage {stage}")
    return fqn[len(parent[1]) + 1 :] if parent[1] else fqn


def _column(
    cluster: ClusterProfile, by: By, phase: Phase | None, kept: list[Key]
) -> list[Any] | None:
    """Return the spread of a figure for each row; None where no module has any."""
    spreads = cluster.by_module(by, phase)
    column = [_short(spreads.get(key)) for key in kept]
    return column if any(column) else None


def _short(spread: Spread | None) -> float | list[float | None] | None:
    if spread is None:
        return None
    if spread.minimum == spread.maximum:
        return spread.minimum
    return [spread.minimum, spread.maximum, spread.imbalance, spread.straggler]
