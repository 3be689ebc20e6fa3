"""Modules that do almost nothing, for measuring the profiler's overhead on them.

They run in a fresh thread, where the program's modes (autocast, inference) are off. They call
given hooks instead of the program's global hooks.
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
_OTHER_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks_with_kwargs",
)


def run_in_fresh_thread(run: Callable[[], _T]) -> _T:
    """Return what ``run`` returns in a thread started for it; raise what it raises."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


class IdleModules:
    """Modules that call ``forward`` on one element, with the hooks that ``set_call`` gives them."""

    def __init__(self, count: int, forward: Callable[[torch.Tensor], Any]) -> None:
        self.modules = [_Idle(forward) for _ in range(count)]
        self.input = torch.ones(1, 1, dtype=torch.float32, device="cpu")

    def run(self) -> None:
        """Call each module once."""
        for module in self.modules:
            module(self.input)

    def set_call(self, call: Any) -> None:
        """Call the modules by ``call`` from now on, as ``make_call`` returns it."""
        for module in self.modules:
            object.__setattr__(module, "_call_impl", MethodType(call, module))


class _Idle(nn.Module):
    def __init__(self, forward: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        object.__setattr__(self, "forward", forward)


def make_call(before: Sequence[Hook] = (), after: Sequence[Hook] = ()) -> Any:
    """Return a copy of the method that calls an ``nn.Module``, with these global hooks only.

    before, after: forward pre-hooks and forward hooks.
    """
    method = _torch.module_call()
    if not isinstance(method, FunctionType):
        return method
    global_names = {
        **vars(_torch.module_globals),
        **{name: {} for name in _OTHER_HOOKS},
        "_global_forward_pre_hooks": dict(enumerate(before)),
        "_global_forward_hooks": dict(enumerate(after)),
        "_global_forward_hooks_always_called": dict.fromkeys(range(len(after)), True),
    }
    # Changing the real tables would affect other threads. The code object is copied because CPython
    # specializes it for one dict of globals (PEP 659): sharing it would slow both down.
    code = method.__code__.replace()
    return FunctionType(code, global_names, method.__name__, method.__defaults__)
