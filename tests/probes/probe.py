"""One operator, called in one way, with its true MACs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

Inputs = Callable[[], tuple[Any, ...]]


class Called(nn.Module):
    """A function as a module, with a parameter, which some counters need."""

    def __init__(self, call: Callable[..., Any], device: str = "cpu") -> None:
        super().__init__()
        self.call = call
        self.unused = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, *args: Any) -> Any:
        return self.call(*args)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A call and its true MACs.

    products: the MACs, as a sum of products.
    backward: include the gradients of every parameter and of every input that requires one.
    note: who is right where counters differ.
    own_macs: ``{operator: MACs of its arguments}``, for counters that take formulas.
    needs: returns True if this torch has what the probe calls.
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
        """Return the products as text."""
        return " + ".join("·".join(map(str, factors)) for factors in self.products) or "0"

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Return the new module and its inputs."""
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
    """Return the probe of a function.

    Pass ``lambda a: torch.f(a)`` for a function that is looked up when called, and ``torch.f`` for
    one bound by ``from torch import f``.
    """

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
    """Return the probe of a module."""
    return Probe(name=name, make=make, inputs=inputs, products=products, **more)


def of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = False) -> Inputs:
    """Return a maker of tensors of ones."""
    return lambda: tuple(torch.ones(s, dtype=dtype, requires_grad=grad) for s in shapes)


def without_gradients(module: nn.Module) -> nn.Module:
    """Put the module in evaluation mode and freeze it, as torch's fast paths need."""
    return module.eval().requires_grad_(False)


def total_of(result: Any) -> torch.Tensor:
    """Return the sum of the first tensor in ``result``, to differentiate."""
    while not isinstance(result, torch.Tensor):
        result = result[0]
    return result.sum()
