"""A program with its true MACs, and the most common reasons why counters differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Makes the tests' models importable wherever this module is imported.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ADDED = "biases and norms are not MACs: ptflops adds biases, fvcore norms and adaptive pooling"
SDPA = (
    "sdpa costs 2·S²·width per layer: torch has no formula for its CPU kernel; fvcore, ptflops and "
    "calflops have none"
)
THREE = "calflops assumes three times the forward; not every operand needs a gradient"


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program and its truth.

    macs: forward, and backward if ``backward``. note: who is right where counters differ.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    macs: int
    backward: bool = False
    own_macs: Callable[[], Mapping[Any, Callable[..., int]]] = dict
    note: str = ""
    needs: str = ""

    @property
    def truth(self) -> str:
        return f"{self.macs:,}"

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        torch.manual_seed(0)
        return self.make(), self.inputs()
