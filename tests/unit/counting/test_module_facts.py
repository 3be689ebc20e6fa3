"""Facts of modules, read together and put together later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from dispatch_flops.counting.held_tensors import HeldTensors
from dispatch_flops.counting.module_facts import FactsTable, ModuleFacts
from dispatch_flops.counting.parameters import ParameterTable
from dispatch_flops.counting.sharded_parameters import FlatParameters


def table_of(*modules: nn.Module, is_whole: bool = True) -> FactsTable:
    return FactsTable(HeldTensors(modules), FlatParameters(), is_whole=is_whole)


def test_row_has_the_facts_as_they_were_when_the_table_was_made() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    parameters = ParameterTable(HeldTensors([model[0]])).of(0)
    table = table_of(model, model[0])
    model[0].in_features = 1234
    del model[1]
    assert table.row(0) == ModuleFacts("Sequential", "", (), ("0", "1"))
    description = "in_features=3, out_features=5, bias=True"
    assert table.row(1) == ModuleFacts("Linear", description, parameters)


class _Louder(nn.Linear):
    def extra_repr(self) -> str:
        return super().extra_repr().upper()


class _Unable(nn.Linear):
    def extra_repr(self) -> str:
        raise ValueError


def _changed(module: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _linear() -> nn.Linear:
    return nn.Linear(3, 5)


# Each pair differs in what its description shows, and in as little else as can be.
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "in_features": (_linear, lambda: nn.Linear(2, 5)),
    "out_features": (_linear, lambda: nn.Linear(3, 7)),
    "bias": (_linear, lambda: nn.Linear(3, 5, bias=False)),
    "changed attribute": (_linear, lambda: _changed(_linear(), in_features=1234)),
    "subclass": (_linear, lambda: _Louder(3, 5)),
    "own method": (_linear, lambda: _changed(_linear(), extra_repr=lambda: "mine")),
    "eps": (lambda: nn.LayerNorm(3), lambda: nn.LayerNorm(3, eps=1e-3)),
    "affine": (
        lambda: nn.LayerNorm(3, bias=False), lambda: nn.LayerNorm(3, elementwise_affine=False),
    ),
    "normalized_shape": (lambda: nn.LayerNorm((3, 5)), lambda: nn.LayerNorm((5, 3))),
    "no hash": (
        lambda: nn.LayerNorm(3), lambda: _changed(nn.LayerNorm(3), normalized_shape=[3]),
    ),
    "in_channels": (lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(4, 6, 3)),
    "out_channels": (lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 8, 3)),
    "kernel_size": (lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 6, 5)),
    "stride": (lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 6, 3, 2)),
    "padding": (lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 6, 3, padding=1)),
    "dilation": (lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 6, 3, dilation=2)),
    "groups": (lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 6, 3, groups=2)),
    "bias of a convolution": (
        lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 6, 3, bias=False),
    ),
    "padding_mode": (
        lambda: nn.Conv2d(2, 6, 3), lambda: nn.Conv2d(2, 6, 3, padding_mode="circular"),
    ),
    "output_padding": (
        lambda: nn.Conv2d(2, 6, 3), lambda: _changed(nn.Conv2d(2, 6, 3), output_padding=(1, 1)),
    ),
    "num_features": (lambda: nn.BatchNorm2d(2), lambda: nn.BatchNorm2d(3)),
    "eps of a batch norm": (lambda: nn.BatchNorm2d(2), lambda: nn.BatchNorm2d(2, eps=1e-3)),
    "momentum": (lambda: nn.BatchNorm2d(2), lambda: nn.BatchNorm2d(2, momentum=None)),
    "kind of a number": (
        lambda: nn.BatchNorm2d(2, momentum=1), lambda: nn.BatchNorm2d(2, momentum=1.0),
    ),
    "affine batch norm": (lambda: nn.BatchNorm2d(2), lambda: nn.BatchNorm2d(2, affine=False)),
    "track_running_stats": (
        lambda: nn.BatchNorm2d(2), lambda: nn.BatchNorm2d(2, track_running_stats=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
def test_layers_that_are_almost_alike_are_described_as_they_are(pair: str) -> None:
    modules = [make() for make in (*PAIRS[pair], *PAIRS[pair])]
    table = table_of(*modules)
    described = [table.row(i).extra_repr for i in range(4)]
    assert described == [module.extra_repr() for module in modules]
    assert described[0] != described[1]


def test_layer_that_cannot_describe_itself_has_no_description() -> None:
    assert table_of(_Unable(3, 5)).row(0).extra_repr == ""


def test_layer_without_an_attribute_that_describes_it_has_no_description() -> None:
    module = nn.Linear(3, 5)
    del module.in_features
    assert table_of(module, nn.Linear(3, 5)).row(0).extra_repr == ""


def test_table_tells_whether_all_parameters_are_among_some() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    keys = {id(parameter) for parameter in model.parameters()}
    table = table_of(*model.modules())
    assert table.are_all_in(keys)
    assert table.are_all_in({*keys, 1})
    assert not table.are_all_in(keys - {id(model[1].bias)})
    assert not table_of(*model.modules(), is_whole=False).are_all_in(keys)
    model.append(nn.LazyLinear(11))  # what operators see of it is not known
    keys |= {id(parameter) for parameter in model.parameters()}
    assert not table_of(*model.modules()).are_all_in(keys)
