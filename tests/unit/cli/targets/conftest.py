"""A folder with models to name as targets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.a = nn.Linear(width, 7)
    def forward(self, x, mask=None):
        return self.a(x)

def pair(width=5, batch=3):
    return Net(width), torch.ones(batch, width)

def anything(**options):
    return Net(**options)

def huge():
    return nn.Linear(10**7, 10**7), torch.ones(10**6, 10**7)

def by_value():
    rates = [rate.item() for rate in torch.linspace(0, 4, 3)]
    return nn.Linear(5, int(rates[-1]) + 3)

def needs(width):
    return Net(width)

def broken():
    raise ValueError("first line\\nsecond line")

def mismatched():
    return torch.ones(2, 3) @ torch.ones(2, 3)

def number():
    return 3

def batch(batch=2):
    return {"x": torch.ones(batch, 5)}

class Holder:
    make = staticmethod(lambda: Net())

model = Net()
constant = 3
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in a folder of its own with net.py in it, and forget the modules imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "net.py").write_text(NET)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "net" in name.split("_") or name.startswith(("net", "dispatch_flops_target", "pack")):
            del sys.modules[name]
