"""Exact FLOP, MAC, byte and parameter counts for PyTorch programs, per module and operator.

Names are imported when they are first asked for: a saved ``Profile`` can be read, compared
and rendered where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dispatch_flops.tree import Profile

if TYPE_CHECKING:
    from dispatch_flops.analysis import Diff, diff
    from dispatch_flops.cost import OpCost, Phase, Share, Split
    from dispatch_flops.counter import FlopCounterMode
    from dispatch_flops.errors import DispatchFlopsError, UncountedOpsError, UncountedWarning
    from dispatch_flops.hardware import Machine
    from dispatch_flops.profiler import FlopsProfiler, get_model_profile
    from dispatch_flops.profiling import profile_model
    from dispatch_flops.registry import overridden, register_flops, unregister_flops
    from dispatch_flops.training import StepProfiler
    from dispatch_flops.tree import ModuleNode, OpTotal

__version__ = "0.1.0"

_HOME = {
    "DispatchFlopsError": "errors",
    "FlopCounterMode": "counter",
    "FlopsProfiler": "profiler",
    "Machine": "hardware",
    "ModuleNode": "tree",
    "OpCost": "cost",
    "OpTotal": "tree",
    "Share": "cost",
    "Split": "cost",
    "StepProfiler": "training",
    "UncountedOpsError": "errors",
    "UncountedWarning": "errors",
    "diff": "analysis",
    "get_model_profile": "profiler",
    "overridden": "registry",
    "profile_model": "profiling",
    "register_flops": "registry",
    "unregister_flops": "registry",
}

__all__ = [
    "DispatchFlopsError",
    "FlopCounterMode",
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
    "diff",
    "get_model_profile",
    "overridden",
    "profile_model",
    "register_flops",
    "unregister_flops",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOME[name] == "registry":  # ours come first, so that a user's duplicate is refused
        importlib.import_module(f"{__name__}.formulas")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _notebook_html(self: Profile) -> str:
    from dispatch_flops.renderers import notebook

    return notebook.render(self)


def _diff(self: Profile, other: Profile, phase: Phase | None = None) -> Diff:
    """What changed from this profile to ``other``, by module and by operator.

    Costs are those of one phase, or of all together. Modules are matched by name, operators by
    overload. The same as ``dispatch_flops.diff(self, other, phase)``.
    """
    from dispatch_flops import analysis

    return analysis.diff(self, other, phase)


# A profile is plain data: it knows no renderer and no question but those of its own tree. A
# notebook asks the object itself for its HTML, and a reader looks for ``diff`` there.
Profile._repr_html_ = _notebook_html  # type: ignore[method-assign]
Profile.diff = _diff  # type: ignore[method-assign]
