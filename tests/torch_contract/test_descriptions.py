"""What ``extra_repr`` of torch's most common layers reads.

dispatch_flops reads it once for layers that are alike (counting/module_facts.py).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from dispatch_flops.counting.module_facts import _DESCRIBED_BY

_READ_ALL = {"format", "__dict__"}  # the attributes that the text names


class _Attributes(dict[str, Any]):
    """Attributes of a module that notes which are read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(vars(module))
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


LAYERS = nn.Linear(2, 3), nn.LayerNorm(2), nn.Conv2d(2, 3, 5), nn.BatchNorm2d(2)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_description_of_a_layer_reads_the_known_attributes(layer: nn.Module) -> None:
    extra_repr = type(layer).extra_repr
    attributes = _Attributes(layer)
    _DESCRIBED_BY[extra_repr](attributes)
    code = extra_repr.__code__  # type: ignore[attr-defined]
    named = {name for text in code.co_consts for name in re.findall(r"{(\w+)}", str(text))}
    named |= set(code.co_names) - _READ_ALL - {"len"}
    assert named - {"use_bias", "bias"} == attributes.read
