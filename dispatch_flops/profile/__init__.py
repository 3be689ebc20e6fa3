"""The frozen, additive result of a profile: plain data, standard library only.

A ``Profile`` can be saved, loaded, compared and rendered without torch and without the model.
Every count is an exact int; None always means "not known" or "not measured".
"""

from dispatch_flops.profile.communication import (
    CommCost,
    CommGroup,
    CommTotal,
    merge_communication,
)
from dispatch_flops.profile.cost import add_costs
from dispatch_flops.profile.memory import (
    DeviceMemory,
    HeldBytes,
    MemoryPeak,
    MemoryPoint,
    MemoryProfile,
    MemoryUse,
    ModuleMemory,
    PeakMoment,
    PhaseBytes,
    RoleBytes,
)
from dispatch_flops.profile.merging import merge_ops, sum_nodes, sum_trees
from dispatch_flops.profile.profile import (
    OUTSIDE,
    SCHEMA,
    SCHEMA_VERSION,
    Profile,
    StepTiming,
)
from dispatch_flops.profile.run_info import MeshDim, RunInfo, TensorInput
from dispatch_flops.profile.seconds import PhaseSeconds, sum_known
from dispatch_flops.profile.tree import ModuleNode, OpTotal, flops_of

__all__ = [
    "OUTSIDE",
    "SCHEMA",
    "SCHEMA_VERSION",
    "CommCost",
    "CommGroup",
    "CommTotal",
    "DeviceMemory",
    "HeldBytes",
    "MemoryPeak",
    "MemoryPoint",
    "MemoryProfile",
    "MemoryUse",
    "MeshDim",
    "ModuleMemory",
    "ModuleNode",
    "OpTotal",
    "PeakMoment",
    "PhaseBytes",
    "PhaseSeconds",
    "Profile",
    "RoleBytes",
    "RunInfo",
    "StepTiming",
    "TensorInput",
    "add_costs",
    "flops_of",
    "merge_communication",
    "merge_ops",
    "sum_known",
    "sum_nodes",
    "sum_trees",
]
