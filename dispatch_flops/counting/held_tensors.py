"""The tensors that modules hold themselves, read once for all that is asked of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter

import torch
from torch import nn

_CPU = torch.device("cpu")
_ORDINARY = frozenset((nn.Parameter,))
_IS_ON_CPU = attrgetter("is_cpu")


class HeldTensors:
    """The parameters and buffers of some modules, without those of modules below.

    All modules of a model are read when a counter's block ends: the loops run in C.

    by_module: the parameters of each module. parameters: all of them, in that order.
    are_ordinary: no parameter is of a subclass. are_on_cpu: nor is one on another device.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = [*modules]
        self.by_module = [
            [p for p in module._parameters.values() if p is not None] for module in self.modules
        ]
        self.parameters = [*chain.from_iterable(self.by_module)]
        self.are_ordinary = _ORDINARY.issuperset(map(type, self.parameters))
        self.are_on_cpu = self.are_ordinary and all(map(_IS_ON_CPU, self.parameters))
        self.buffers = [
            buffer
            for module in self.modules
            if module._buffers
            for buffer in module._buffers.values()
            if buffer is not None
        ]

    def types(self) -> set[type]:
        """Return the classes of the tensors."""
        return {*map(type, self.parameters), *map(type, self.buffers)}

    def devices(self) -> dict[torch.device, None]:
        """Return the devices of the tensors, each once."""
        others = self.buffers if self.are_on_cpu else [*self.parameters, *self.buffers]
        found = {_CPU: None} if self.are_on_cpu and self.parameters else {}
        return found | {tensor.device: None for tensor in others}
