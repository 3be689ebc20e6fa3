"""Programs of several ranks: merge the profiles of their ranks, or simulate ranks in one process.

gather          merge the profiles of a running program's ranks
simulate        profile ranks of a cluster without the cluster
ClusterProfile  the profiles of several ranks side by side
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch_flops.distributed.gathering import gather
    from dispatch_flops.distributed.simulation import simulate
    from dispatch_flops.profile.cluster import ClusterProfile

__all__ = ["ClusterProfile", "gather", "simulate"]

_HOME = {
    "ClusterProfile": "profile.cluster",
    "gather": "distributed.gathering",
    "simulate": "distributed.simulation",
}


if not TYPE_CHECKING:  # to type checkers, a name that is not listed above is misspelt

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used: a saved cluster is read where torch is missing."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"dispatch_flops.{_HOME[name]}"), name)
        found.__module__ = __name__
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted(__all__)
