"""Modules that wrap another one, whose name they share.

``torch.compile``, ``DistributedDataParallel``, ``FullyShardedDataParallel`` and
``checkpoint_wrapper`` each put a module around the user's.
"""

from __future__ import annotations

from typing import Final

from torch import nn

WRAPPED: Final = "<wrapped>"  # stands for the attribute in which a wrapper holds its module
_ATTRIBUTES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def wrapping_attribute(module: nn.Module) -> str | None:
    """Return the attribute in which a wrapper holds its module; None for any other module."""
    children = module._modules
    if not children:
        return None
    for name in _ATTRIBUTES:
        if name in children:
            return name
    if "module" in children and isinstance(module, nn.parallel.DistributedDataParallel):
        return "module"
    return None


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``module`` wraps; None if it is not a wrapper."""
    name = wrapping_attribute(module)
    return None if name is None else module._modules[name]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers around it."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def find_submodule(model: nn.Module, fqn: str) -> nn.Module | None:
    """Return the module of that name, which has no wrapper in it; None without one."""
    module = unwrap(model)
    for name in fqn.split(".") if fqn else ():
        children = module._modules
        child = children[name] if name in children else None  # noqa: SIM401 (TorchScript)
        if child is None:
            return None
        module = unwrap(child)
    return module
