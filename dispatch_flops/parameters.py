"""What a profile says of parameters, without the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn


class ParameterFacts(NamedTuple):
    """key: the parameter's id, the same wherever it is held. elements: see ``elements_of``.

    stands_in: operators do not see it itself, but its gathered or its local part: it is a tensor
        subclass, as a sharded parameter is.
    """

    key: int
    elements: int
    trainable: bool
    stands_in: bool


def facts_of(module: nn.Module) -> Iterator[ParameterFacts]:
    """Of the parameters that the module holds itself."""
    for parameter in module._parameters.values():
        if parameter is not None:
            yield ParameterFacts(
                key=id(parameter),
                elements=elements_of(parameter),
                trainable=parameter.requires_grad,
                stands_in=type(parameter) is not nn.Parameter,
            )


def elements_of(parameter: Any) -> int:
    """Logical elements: of the whole parameter where an engine has split it, 0 while lazy."""
    whole = getattr(parameter, "ds_numel", None)  # ZeRO-3 leaves an empty tensor in its place
    if whole is not None:
        return int(whole)
    if torch.nn.parameter.is_lazy(parameter):
        return 0
    return int(parameter.numel())
