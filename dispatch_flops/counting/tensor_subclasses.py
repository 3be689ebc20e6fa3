"""Tensor subclasses: which are plain, and which run operators of their own underneath."""

from __future__ import annotations

import sys

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import FakeTensor, FunctionalTensor

_SHARDING = "_propagate_tensor_meta_non_cached"


def is_plain(cls: type) -> bool:
    """True if an operator on this class does its work on the tensor itself."""
    return (
        cls is torch.Tensor
        or issubclass(cls, FakeTensor)
        or cls.__torch_dispatch__ is _torch.disabled_torch_dispatch  # type: ignore[attr-defined]
    )


def is_wrapper(types: tuple[type, ...]) -> bool:
    """True if one of the classes dispatches to tensors inside it."""
    return not all(is_plain(cls) for cls in types)


def is_traced(types: tuple[type, ...]) -> bool:
    """True if a class is the tracers' own: it stands for a tensor, and computes nothing.

    It works only directly below ``FunctionalTensorMode``, which takes apart what it has to.
    """
    return any(issubclass(cls, FunctionalTensor) for cls in types)


def in_sharding_propagation() -> bool:
    """True while DTensor runs an operator on fakes only to learn the shape of its result."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _SHARDING:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
