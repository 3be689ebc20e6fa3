"""What kernels on the CPU allocate for themselves, as the CPU's allocator reports it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.operators.workspaces import WorkspaceRule

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensor, _Parameter = _PLAIN
_NUMBERS = frozenset((bool, int, float, str, type(None)))
_LIMIT = 8192  # workspaces that are kept before all are dropped
# Workspaces of steady rules by signature, of all counters: a report takes longer than most kernels.
_known: dict[Any, int] = {}


class KernelAllocations(threading.local):
    """Workspace of the kernel that a thread ran last.

    workspace: the most bytes that were allocated at once while the kernel ran, over what was
    allocated when it returned; None where the allocator was not asked.
    """

    workspace: int | None = None

    def reported(self, func: Any, call: Callable[..., Any], rule: WorkspaceRule) -> Any:
        """Return ``call``, which notes the workspace of each call that the rule may not know.

        func: the operator that ``call`` runs. The allocator is asked where all tensors are on the
        CPU. It reports to one profiler of a thread. A profiler of the program goes first.
        """
        may_be_unknown = rule.may_be_unknown

        def run(*args: Any, **kwargs: Any) -> Any:
            if not may_be_unknown(args):
                return call(*args, **kwargs)
            signature = None
            if rule.is_steady and not kwargs:
                signature = _signature(func, rule, args)
                known = _known.get(signature)
                if known is not None:
                    out = call(*args)
                    self.workspace = known if _are_on_cpu(out) else None
                    return out
            self.workspace = None
            if _torch.is_profiling() or not _are_on_cpu((args, kwargs)):
                return call(*args, **kwargs)
            sizes: list[int] | None = None
            try:
                _torch.start_reporting_allocations()
                out = call(*args, **kwargs)
            finally:
                sizes = _torch.stop_reporting_allocations()
            if _are_on_cpu(out):
                self.workspace = _most_over_the_last(sizes)
                if signature is not None:
                    _remember(signature, self.workspace)
            return out

        return run

    def take(self) -> int | None:
        """Return the workspace, and forget it."""
        found, self.workspace = self.workspace, None
        return found


def _signature(func: Any, rule: WorkspaceRule, args: Any) -> Any:
    """Return a hashable key of what a kernel of the CPU may allocate by; None if there is none."""
    key: list[Any] = [id(func), rule, _torch.kernel_settings()]  # torch keeps its operators
    try:
        for arg in args:
            for part in arg if arg.__class__ is list else (arg,):
                cls = part.__class__
                if cls is _Tensor or cls is _Parameter:
                    if not part.is_cpu:
                        return None
                    key += (part.shape, part.stride(), part.dtype)
                elif cls in _NUMBERS:
                    key.append(part)
                else:
                    return None
            key.append(len(arg) if arg.__class__ is list else None)
        signature = tuple(key)
        hash(signature)
    except (TypeError, RuntimeError):  # a size that is a symbol, or a tensor without strides
        return None
    return signature


def _remember(signature: Any, workspace: int) -> None:
    if len(_known) >= _LIMIT:
        _known.clear()
    _known[signature] = workspace


def _are_on_cpu(values: Any) -> bool:
    """Return True if all tensors have data on the CPU; subclasses may hold theirs anywhere."""
    if values.__class__ is _Tensor:
        return bool(values.is_cpu)
    return all(t.__class__ in _PLAIN and t.is_cpu for t in tensors_in(values))


def _most_over_the_last(sizes: Iterable[int]) -> int:
    """Return the largest sum of the first sizes, less the sum of all."""
    levels = list(accumulate(sizes, initial=0))
    return max(levels) - levels[-1]
