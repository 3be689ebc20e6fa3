"""A program with its truth in MACs, and the commonest reasons why counters differ."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

# Those who import this find the tests' models, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ADDED = "biases and norms are no MACs: ptflops adds the first, fvcore norms and adaptive pooling"
SDPA = (
    "sdpa costs 2·S²·width a layer: torch has no formula for its CPU kernel, fvcore, ptflops and "
    "calflops none for any"
)
THREE = "calflops assumes three times the forward; not every operand needs a gradient"


@dataclass(frozen=True, kw_only=True)
class Program:
    """macs: forward, with backward where ``backward``. note: who is right where counters differ."""

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
