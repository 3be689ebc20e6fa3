"""Every public object, by the name that users import it by."""

from __future__ import annotations

import importlib
import inspect
import sys
from types import ModuleType
from typing import Any

import dispatch_flops
from dispatch_flops import renderers

MODULES = (
    "dispatch_flops",
    "dispatch_flops.analysis",
    "dispatch_flops.compile",
    "dispatch_flops.distributed",
    "dispatch_flops.errors",
    "dispatch_flops.integrations.deepspeed",
    "dispatch_flops.integrations.lightning",
    "dispatch_flops.integrations.testing",
    "dispatch_flops.integrations.transformers",
    "dispatch_flops.renderers",
    *(f"dispatch_flops.renderers.{name}" for name in renderers.__all__ if name != "View"),
)

# Types of what public objects hold, return and take as settings; their own names are not public.
VALUES = """
    CommCost DeviceMemory FlopsProfilerConfig GenerationPlan HeldBytes Link MemoryPeak MemoryPoint
    MemoryProfile MemoryUse MeshDim MeterReading ModuleMemory PeakMoment PhaseBytes PhaseSeconds
    PlannedCluster PlannedGeneration PlannedRank PlannedStep RoleBytes RunInfo StepBounds
    StepCallback StepTiming TensorInput dispatch_flops.analysis.planned.Plan
""".split()


def modules() -> dict[str, ModuleType]:
    """Return the public modules, without those of frameworks that are not installed."""
    found = {}
    for name in MODULES:
        try:
            found[name] = importlib.import_module(name)
        except ImportError:
            assert name.startswith("dispatch_flops.integrations.")
    return found


def public_objects() -> dict[str, Any]:
    """Return ``{name in its module: class or function}``, each object once.

    Names at the root are shown without the root: ``Profile``, ``analysis.mfu``.
    """
    found: dict[str, Any] = {}
    for module in modules().values():
        room = module.__name__.removeprefix("dispatch_flops").removeprefix(".")
        for name in module.__all__:
            thing = getattr(module, name)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)):
                continue
            if not any(thing is known for known in found.values()):
                found[f"{room}.{name}" if room else name] = thing
    return found


def values() -> dict[str, list[str]]:
    """Return ``{module: names of VALUES that it defines}``.

    A name of several classes has its module in VALUES.
    """
    for name in ("planning.planner", "integrations.callback", "profilers.meter"):
        importlib.import_module(f"dispatch_flops.{name}")
    loaded = [(n, m) for n, m in sys.modules.items() if n.startswith("dispatch_flops.")]
    found: dict[str, list[str]] = {}
    for value in VALUES:
        asked, _, name = value.rpartition(".")
        (home,) = {
            module
            for module, content in loaded
            if getattr(vars(content).get(name), "__module__", "") == module
            and asked in ("", module)
        }
        found.setdefault(home, []).append(name)
    return found


def rooms_of_names() -> dict[str, Any]:
    """Return every name that examples take as imported: of the root, its rooms and renderers."""
    imported: dict[str, Any] = {}
    for room in ("distributed", "compile", "errors", "analysis", "renderers"):
        module = getattr(dispatch_flops, room)
        imported |= {name: getattr(module, name) for name in module.__all__}
    return imported | {name: getattr(dispatch_flops, name) for name in dispatch_flops.__all__}
