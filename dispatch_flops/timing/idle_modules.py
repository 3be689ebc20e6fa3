"""Modules that do almost nothing, to measure on them what the profiler takes itself.

They run in a thread of its own, where none of the program's modes is on (autocast, inference), and
call given hooks in place of the program's global ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from dispatch_flops import _torch

Hook = Callable[..., Any]
_T = TypeVar("_T")
_NO_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_pre_hooks_with_kwargs",
    "_global_forward_hooks_with_kwargs",
)


def run_in_fresh_thread(run: Callable[[], _T]) -> _T:
    """What ``run`` returns, or raises, in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


class IdleModules:
    """Modules of one operator, on one element; called with none but the hooks that are given."""

    def __init__(self, count: int, forward: Callable[[torch.Tensor], Any]) -> None:
        self.modules = [_Idle(forward) for _ in range(count)]
        self.input = torch.ones(1, 1, dtype=torch.float32, device="cpu")

    def run(self) -> None:
        """Call each once."""
        for module in self.modules:
            module(self.input)

    def call_by(self, call: Any) -> None:
        """How they are called from now on: one of ``calling``."""
        for module in self.modules:
            object.__setattr__(module, "_call_impl", MethodType(call, module))


class _Idle(nn.Module):
    def __init__(self, forward: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "forward", forward)


def calling(before: Sequence[Hook] = (), after: Sequence[Hook] = ()) -> Any:
    """A copy of ``nn.Module``'s way of calling a module that sees these global hooks alone."""
    usual = _torch.module_call()
    if not isinstance(usual, FunctionType):
        return usual
    world = {
        **vars(_torch.module_globals),
        **{name: {} for name in _NO_HOOKS},
        "_global_forward_pre_hooks": dict(enumerate(before)),
        "_global_forward_hooks": dict(enumerate(after)),
        "_global_forward_hooks_always_called": dict.fromkeys(range(len(after)), True),
    }
    # Code of its own: the interpreter adapts it to this world, and not the program's to it.
    return FunctionType(usual.__code__.replace(), world, usual.__name__, usual.__defaults__)
