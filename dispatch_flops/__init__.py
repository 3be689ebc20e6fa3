"""Exact FLOP, MAC, byte and parameter counts for PyTorch programs, per module and operator.

Names are imported when they are first used: a saved ``Profile`` can be read, compared and
rendered where torch is not installed.
"""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch_flops import analysis, compile, distributed, errors, integrations, renderers
    from dispatch_flops.analysis.diff import diff
    from dispatch_flops.analysis.machines import Machine
    from dispatch_flops.compile.backend import counting_backend
    from dispatch_flops.errors import DispatchFlopsError, UncountedOpsError, UncountedWarning
    from dispatch_flops.operators.building_blocks import attention_cost, matmul_cost
    from dispatch_flops.operators.conventions import conventions
    from dispatch_flops.operators.registry import overridden, register_flops, unregister_flops
    from dispatch_flops.operators.workspaces import register_workspace
    from dispatch_flops.planning.planner import plan
    from dispatch_flops.profile.communication import CommGroup, CommTotal
    from dispatch_flops.profile.cost import OpCost, Share, Split
    from dispatch_flops.profile.profile import Profile
    from dispatch_flops.profile.tree import ModuleNode, OpTotal
    from dispatch_flops.profilers.counter import FlopCounterMode
    from dispatch_flops.profilers.flops_profiler import FlopsProfiler
    from dispatch_flops.profilers.meter import FlopMeter
    from dispatch_flops.profilers.model import profile_model
    from dispatch_flops.profilers.model_totals import get_model_profile
    from dispatch_flops.profilers.training import StepProfiler
    from dispatch_flops.timing.peaks import measure_machine

__version__ = "0.1.0"

__all__ = [
    "CommGroup",
    "CommTotal",
    "DispatchFlopsError",
    "FlopCounterMode",
    "FlopMeter",
    "FlopsProfiler",
    "Machine",
    "ModuleNode",
    "OpCost",
    "OpTotal",
    "Profile",
    "Share",
    "Split",
    "StepProfiler",
    "UncountedOpsError",
    "UncountedWarning",
    "__version__",
    "analysis",
    "attention_cost",
    "compile",
    "conventions",
    "counting_backend",
    "diff",
    "distributed",
    "errors",
    "get_model_profile",
    "integrations",
    "matmul_cost",
    "measure_machine",
    "overridden",
    "plan",
    "profile_model",
    "register_flops",
    "register_workspace",
    "renderers",
    "unregister_flops",
]

_ROOMS = frozenset(("analysis", "compile", "distributed", "errors", "integrations", "renderers"))
_HOME = {
    "CommGroup": "profile.communication",
    "CommTotal": "profile.communication",
    "DispatchFlopsError": "errors",
    "FlopCounterMode": "profilers.counter",
    "FlopMeter": "profilers.meter",
    "FlopsProfiler": "profilers.flops_profiler",
    "Machine": "analysis.machines",
    "ModuleNode": "profile.tree",
    "OpCost": "profile.cost",
    "OpTotal": "profile.tree",
    "Profile": "profile.profile",
    "Share": "profile.cost",
    "Split": "profile.cost",
    "StepProfiler": "profilers.training",
    "UncountedOpsError": "errors",
    "UncountedWarning": "errors",
    "attention_cost": "operators.building_blocks",
    "conventions": "operators.conventions",
    "counting_backend": "compile.backend",
    "diff": "analysis.diff",
    "get_model_profile": "profilers.model_totals",
    "matmul_cost": "operators.building_blocks",
    "measure_machine": "timing.peaks",
    "overridden": "operators.registry",
    "plan": "planning.planner",
    "profile_model": "profilers.model",
    "register_flops": "operators.registry",
    "register_workspace": "operators.workspaces",
    "unregister_flops": "operators.registry",
}


if not TYPE_CHECKING:  # to type checkers, a name that is not listed above is misspelt

    def __getattr__(name: str) -> Any:
        # Everything that an import creates is kept, so a collection would find nothing to release.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            return _import(name)
        finally:
            if was_collecting:
                gc.enable()


def _import(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME[name] in ("operators.registry", "operators.workspaces"):
        # The formulas that ship come first, so that a user's duplicate is refused.
        importlib.import_module(f"{__name__}.operators.formulas")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    found.__module__ = __name__  # the path that users import it by
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
