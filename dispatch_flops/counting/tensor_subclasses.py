"""Tell plain tensor classes from those that dispatch to inner tensors."""

from __future__ import annotations

import sys

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor, FunctionalTensor

_SHARDING = "_propagate_tensor_meta_non_cached"


def is_plain(cls: type) -> bool:
    """Return True if an operator on this class works on the tensor itself."""
    return (
        cls is torch.Tensor
        or issubclass(cls, FakeTensor)
        or cls.__torch_dispatch__ is _torch.disabled_torch_dispatch  # type: ignore[attr-defined]
    )


def is_wrapper(types: tuple[type, ...]) -> bool:
    """Return True if one of the classes dispatches to inner tensors."""
    return not all(is_plain(cls) for cls in types)


def is_traced(types: tuple[type, ...]) -> bool:
    """Return True if a class belongs to torch's tracers: it stands for a tensor, without a value.

    It works only directly below ``FunctionalTensorMode``, which decomposes what it needs to.
    """
    return any(issubclass(cls, FunctionalTensor) for cls in types)


def in_sharding_propagation() -> bool:
    """Return True while DTensor runs an operator on fake tensors to infer a shape."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _SHARDING:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
