"""``torch.compile``'s wrapper of a module, and modules that are compiled in place."""

from __future__ import annotations

from typing import Final

from torch import nn

WRAPPED: Final = "_orig_mod"  # the attribute in which the wrapper holds the module


def wrapped_module(module: nn.Module) -> nn.Module | None:
    """Return the module that ``module`` is ``torch.compile``'s wrapper of, else None."""
    return _child(module, WRAPPED)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside all of ``torch.compile``'s wrappers around it."""
    while (inner := wrapped_module(module)) is not None:
        module = inner
    return module


def is_compiled(model: nn.Module) -> bool:
    """Check if the model or a module in it is compiled, by a wrapper or in place."""
    return any(
        wrapped_module(module) is not None or module._compiled_call_impl is not None
        for module in model.modules()
    )


def find_submodule(model: nn.Module, fqn: str) -> nn.Module | None:
    """Return the module of that name, which has no ``_orig_mod`` in it; None without one."""
    module = unwrap(model)
    for name in fqn.split(".") if fqn else ():
        child = _child(module, name)
        if child is None:
            return None
        module = unwrap(child)
    return module


def _child(module: nn.Module, name: str) -> nn.Module | None:
    children = module._modules
    return children[name] if name in children else None  # noqa: SIM401 (TorchScript has no get)
