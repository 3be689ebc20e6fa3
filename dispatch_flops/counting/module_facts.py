"""Facts of a module that a profile shows besides its calls, read before the module changes."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from torch import nn

from dispatch_flops.counting.packed_weights import packed_values
from dispatch_flops.counting.parameters import ParameterFacts, parameter_facts
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


UNREAD = ModuleFacts("")
_facts = partial(tuple.__new__, ModuleFacts)  # takes half of the constructor's time
_NO_EXTRA_REPR = nn.Module.extra_repr


def facts_of(module: nn.Module, flat: FlatParameters) -> ModuleFacts:
    """Return the facts of a module as it is now; ``flat`` are the run's flat parameters."""
    cls = type(module)
    parameters = parameter_facts(module)
    children = module._modules
    return _facts(
        (
            cls.__name__,
            "" if cls.extra_repr is _NO_EXTRA_REPR else _extra_repr(module),
            flat.with_parts(module, parameters) if flat.ids else parameters,
            tuple(children.keys()) if children else (),  # TorchScript's table is not a dict
            () if parameters else packed_values(module),
        )
    )


def _extra_repr(module: nn.Module) -> str:
    """Return the module's ``extra_repr()``; "" if it raises."""
    try:
        return str(module.extra_repr())
    except Exception:
        return ""
