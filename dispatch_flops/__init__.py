"""Exact FLOP, MAC, byte and parameter counts for PyTorch programs, per module and operator."""

from __future__ import annotations

from dispatch_flops.cost import OpCost, Share, Split
from dispatch_flops.counter import FlopCounterMode
from dispatch_flops.profiler import FlopsProfiler, get_model_profile, profile_model
from dispatch_flops.registry import overridden, register_flops, unregister_flops
from dispatch_flops.training import StepProfiler
from dispatch_flops.tree import Profile

__version__ = "0.1.0"

__all__ = [
    "FlopCounterMode",
    "FlopsProfiler",
    "OpCost",
    "Profile",
    "Share",
    "Split",
    "StepProfiler",
    "get_model_profile",
    "overridden",
    "profile_model",
    "register_flops",
    "unregister_flops",
]
