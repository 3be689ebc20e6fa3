"""The frozen result of a profile: plain data, standard library only.

A ``Profile`` can be saved, loaded, compared and rendered where neither torch nor the model
is. Every count is an exact int; ``None`` always means "not known" or "not measured".
"""

from dispatch_flops.profile.profile import (
    OUTSIDE,
    SCHEMA,
    SCHEMA_VERSION,
    Profile,
    RunInfo,
    StepTiming,
)
from dispatch_flops.profile.tree import ModuleNode, OpTotal, add_costs, flops_of, merge

__all__ = [
    "OUTSIDE",
    "SCHEMA",
    "SCHEMA_VERSION",
    "ModuleNode",
    "OpTotal",
    "Profile",
    "RunInfo",
    "StepTiming",
    "add_costs",
    "flops_of",
    "merge",
]
