"""Facts of modules that a profile shows besides their calls, read before the modules change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

from dispatch_flops.counting.held_tensors import HeldTensors
from dispatch_flops.counting.packed_weights import packed_values
from dispatch_flops.counting.parameters import ParameterFacts, ParameterTable
from dispatch_flops.counting.sharded_parameters import FlatParameters


class ModuleFacts(NamedTuple):
    """Facts of a module that keep neither it nor its parameters alive.

    class_name, extra_repr: as the module prints itself; "" where not known.
    parameters: of the module itself, without those of its children.
    children: attribute names of its children, in order.
    packed: number of values of each packed weight of the module itself; see ``packed_values``.
    """

    class_name: str
    extra_repr: str = ""
    parameters: tuple[ParameterFacts, ...] = ()
    children: tuple[str, ...] = ()
    packed: tuple[int, ...] = ()


_facts = partial(tuple.__new__, ModuleFacts)  # takes half of the constructor's time
_NO_EXTRA_REPR = nn.Module.extra_repr
# What these follow from, besides whether there is a bias: models have many layers that are alike,
# and to ask one takes as long as everything else that is read of it.
_DESCRIBED_BY: dict[Callable[[Any], str], Callable[[Any], Any]] = {
    nn.Linear.extra_repr: itemgetter("in_features", "out_features"),
    nn.LayerNorm.extra_repr: itemgetter("normalized_shape", "eps", "elementwise_affine"),
    nn.Conv2d.extra_repr: itemgetter(
        "in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation",
        "output_padding", "groups", "padding_mode",
    ),
    nn.BatchNorm2d.extra_repr: itemgetter(
        "num_features", "eps", "momentum", "affine", "track_running_stats"
    ),
}  # fmt: skip


class FactsTable:
    """Facts of modules as they were when it was made, put together when they are asked for.

    held: what the modules hold. flat: the run's flat parameters. is_whole: no module of the run is
        missing, as those that are gone.
    has_packed: some of the modules have packed weights.
    """

    def __init__(self, held: HeldTensors, flat: FlatParameters, *, is_whole: bool) -> None:
        modules = held.modules
        self._is_whole = is_whole
        self._class_names = [type(module).__name__ for module in modules]
        known: dict[Any, str] = {}
        self._extra_reprs = [_extra_repr(module, known) for module in modules]
        # TorchScript's table is not a dict.
        self._children = [tuple(m._modules.keys()) if m._modules else () for m in modules]
        self._parameters = ParameterTable(held)
        self._packed = [*map(packed_values, modules)]
        self.has_packed = any(self._packed)
        self._flat, self._ids = flat, [*map(id, modules)] if flat.ids else []

    def are_all_in(self, used_params: set[int]) -> bool:
        """Return True if these are the ids of all parameters of all modules, and perhaps more."""
        keys = self._parameters.keys
        return self._is_whole and keys is not None and used_params.issuperset(keys)

    def row(self, position: int) -> ModuleFacts:
        """Return the facts of the module at that position."""
        parameters = self._parameters.of(position)
        if self._flat.ids:
            parameters = self._flat.with_parts(self._ids[position], parameters)
        return _facts(
            (
                self._class_names[position],
                self._extra_reprs[position],
                parameters,
                self._children[position],
                self._packed[position],
            )
        )


def _extra_repr(module: nn.Module, known: dict[Any, str]) -> str:
    """Return the module's ``extra_repr()``; "" if it raises. ``known``: those of others."""
    extra_repr = type(module).extra_repr
    if extra_repr is _NO_EXTRA_REPR:
        return ""
    attributes = _DESCRIBED_BY.get(extra_repr)
    if attributes is None:
        return _ask_extra_repr(module)
    own, parameters = module.__dict__, module._parameters
    try:
        if "extra_repr" not in own:
            values = attributes(own)
            kinds = tuple(map(type, values))  # 1 and 1.0 are equal, and do not print alike
            key = extra_repr, values, kinds, parameters["bias"] is None
            found = known.get(key)
            if found is None:
                found = known[key] = _ask_extra_repr(module)
            return found
    except (KeyError, TypeError):  # without a bias of its own, or with an option that has no hash
        pass
    return _ask_extra_repr(module)


def _ask_extra_repr(module: nn.Module) -> str:
    try:
        return str(module.extra_repr())
    except Exception:
        return ""
