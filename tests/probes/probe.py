"""One operator, called in one way, with its truth beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

Inputs = Callable[[], tuple[Any, ...]]


class Called(nn.Module):
    """A function as a module; some counters want a parameter in it."""

    def __init__(self, call: Callable[..., Any], device: str = "cpu") -> None:
        super().__init__()
        self.call = call
        self.unused = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """products: the truth in MACs, a sum of products. backward: gradients are part of it, of every
    parameter and every input that requires one. note: who is right where counters differ.
    own_macs: ``{operator: MACs of its arguments}``, for counters that take formulas.
    needs: whether this torch has what the probe calls.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Inputs
    products: tuple[tuple[int, ...], ...]
    backward: bool = False
    note: str = ""
    own_macs: Callable[[], Mapping[Any, Callable[..., int]]] = dict
    needs: Callable[[], bool] = field(default=lambda: True)

    @property
    def macs(self) -> int:
        return sum(prod(factors) for factors in self.products)

    @property
    def truth(self) -> str:
        """The products as they are written."""
        return " + ".join("·".join(map(str, factors)) for factors in self.products) or "0"

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """The module, as its maker leaves it, and its inputs."""
        torch.manual_seed(0)
        return self.make(), self.inputs()


def op(
    name: str,
    call: Callable[..., Any],
    inputs: Inputs,
    *products: tuple[int, ...],
    device: str = "cpu",
    **more: Any,
) -> Probe:
    """A probe of a function. Write ``lambda a: torch.f(a)``, so that it is looked up when called;
    ``torch.f`` alone is what ``from torch import f`` gives."""

    def make() -> nn.Module:
        return Called(call, device)

    return Probe(name=name, make=make, inputs=inputs, products=products, **more)


def layer(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Inputs,
    *products: tuple[int, ...],
    **more: Any,
) -> Probe:
    """A probe of a module."""
    return Probe(name=name, make=make, inputs=inputs, products=products, **more)


def of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = False) -> Inputs:
    """A maker of tensors of ones."""
    return lambda: tuple(torch.ones(s, dtype=dtype, requires_grad=grad) for s in shapes)


def without_gradients(module: nn.Module) -> nn.Module:
    """In evaluation mode and frozen: what torch's fast paths ask for."""
    return module.eval().requires_grad_(False)


def total_of(result: Any) -> torch.Tensor:
    """The sum of every element of the first tensor in ``result``: something to go back from."""
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result.sum()
