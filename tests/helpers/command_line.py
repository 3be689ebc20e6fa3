"""What the tests of the command line share: a model in a file, results of calls, profiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from dispatch_flops import OpCost, Profile
from dispatch_flops.profile import ModuleNode, OpTotal
from tests.helpers.trees import timed

B, W, OUT = 3, 5, 7

NET = f"""
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width={W}):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, {OUT})
    def forward(self, x, mask=None):
        print("what the model prints")
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
    def twice(self, x):
        return self(x), self(x)

def make(width={W}, batch={B}):
    print("what the factory prints")
    return Net(width), torch.ones(batch, width)

def broken():
    raise ValueError("a wrong\\nworld")

def odd(batch={B}):
    return nn.Sequential(Odd()), torch.ones(batch, {W})

class Odd(nn.Module):
    def forward(self, x):
        return torch.ops.cli_test.odd(x) + 1
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """Exit code, stdout and stderr of a call of the command line."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]
Save = Callable[..., Profile]


def macs(width: int = W, batch: int = B) -> int:
    """Return the MACs of ``Net``'s forward."""
    return batch * (2 * width * width + width * OUT)


def params(width: int = W) -> int:
    """Return the number of ``Net``'s parameters."""
    return 2 * (width * width + width) + width * OUT + OUT


def error_line(result: Result) -> str:
    """Return the error of a failed call, without the program's name.

    Asserts exit code 2, nothing on stdout, and a single line of error at the end of stderr.
    """
    assert (result.code, result.out) == (2, "")
    assert "Traceback" not in result.err
    lines = result.err.splitlines()
    (line,) = (line for line in lines if line.startswith("dispatch-flops: "))
    assert line == lines[-1]
    return line.removeprefix("dispatch-flops: ")


def tree(counts: dict[str, int], *, latency: float | None = None) -> Profile:
    """Return the profile of a model of Linears without parameters, by name and MACs."""

    def node(name: str, count: int) -> ModuleNode:
        cost = OpCost(macs=count, flops=2 * count)
        op = OpTotal(op="aten.mm.default", phase="forward", calls=1, cost=cost)
        return ModuleNode(fqn=name, name=name, class_name="Linear", calls=1, ops=(op,))

    children = tuple(node(name, count) for name, count in counts.items())
    root = ModuleNode(
        fqn="",
        class_name="Net",
        calls=1,
        children=children,
        seconds=timed(forward=latency),
    )
    return Profile(root=root).check()
