"""The frozen result of a profile: plain data, standard library only.

A ``Profile`` can be saved, loaded, compared and rendered where neither torch nor the model
is. Every count is an exact int; ``None`` always means "not known" or "not measured".
"""

from dispatch_flops.tree.node import ModuleNode, OpTotal, add_costs, flops_of, merge
from dispatch_flops.tree.profile import (
    OUTSIDE,
    SCHEMA,
    SCHEMA_VERSION,
    Profile,
    Scope,
    StepTiming,
)

__all__ = [
    "OUTSIDE",
    "SCHEMA",
    "SCHEMA_VERSION",
    "ModuleNode",
    "OpTotal",
    "Profile",
    "Scope",
    "StepTiming",
    "add_costs",
    "flops_of",
    "merge",
]
