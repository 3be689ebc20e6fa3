"""The model and the inputs that a planned program builds, and what is known of their sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.errors import TargetError


def model_and_inputs(made: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Return the model with its positional and named inputs; TargetError for another result."""
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise TargetError(
            f"build returned an object of type {type(made).__name__}; return a pair of the model "
            "and its inputs"
        )
    model, inputs = made
    check_on_meta(model)
    if isinstance(inputs, Mapping):
        return model, (), dict(inputs)
    return model, tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,), {}


def check_on_meta(model: nn.Module) -> None:
    """Raise TargetError if a parameter has data: a planned step would change a model in use."""
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            raise TargetError(
                f"build returned a model whose parameter {name!r} is on {parameter.device}; make "
                "the model in build, where the meta device is the default"
            )


def converted(value: Any, dtype: torch.dtype) -> Any:
    """Return nested inputs with floating-point tensors in a dtype."""

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return _torch.tree_map_only(torch.Tensor, convert, value)


def samples_and_tokens(inputs: Sequence[torch.Tensor]) -> tuple[int | None, int | None]:
    """Return the rows of the first input, and its elements if it is token ids [batch, sequence]."""
    first = next((tensor for tensor in inputs if tensor.dim()), None)
    if first is None:
        return None, None
    is_ids = first.dim() == 2 and not first.is_floating_point()
    return first.shape[0], math.prod(first.shape) if is_ids else None
