"""What kernels on the CPU and on CUDA allocate for themselves, as torch's allocators report it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.counting.known_calls import KnownCall, KnownCalls
from dispatch_flops.operators.interrupts import is_of_signal_handler
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.operators.workspaces import WorkspaceRule

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensor, _Parameter = _PLAIN
_CPU = torch.device("cpu")
_NUMBERS = frozenset((bool, int, float, str, type(None)))
_LIMIT = 8192  # workspaces of an operator that are kept before all are dropped


class KernelAllocations(threading.local):
    """Workspace of the kernel that a thread ran last.

    workspace: the most bytes that were allocated at once while the kernel ran, over what was
    allocated when it returned; None where the allocator was not asked.
    number: of workspaces that the thread's kernels had so far; latest: the last of these, with
    which the peak was compared.
    """

    workspace: int | None = None
    number = 0
    latest: int | None = None

    def reported(self, func: Any, call: Callable[..., Any], rule: WorkspaceRule) -> Any:
        """Return ``call``, which notes the workspace of each call that the rule may not know.

        func: the operator that ``call`` runs. The allocators are asked where all tensors are on the
        CPU or on one CUDA device. They report to one profiler of a thread. A profiler of the
        program goes first.
        """
        may_be_unknown = rule.may_be_unknown
        of_settings = _known.setdefault((id(func), rule), {})  # torch keeps its operators

        def run(*args: Any, **kwargs: Any) -> Any:
            if not (is_on_cuda(args) or may_be_unknown(args)):
                return call(*args, **kwargs)
            calls = signature = None
            if rule.is_steady and not kwargs:
                settings = _torch.tries_kernels(), _torch.kernel_settings()
                calls = of_settings.get(settings)
                if calls is None:
                    calls = of_settings.setdefault(settings, _KnownWorkspaces(func))
                known = calls.workspace(args)
                if known is not None:
                    out = call(*args)
                    self.workspace = known if _reporting_device(out) else None
                    return out
                signature = _signature(args)
            self.workspace = None
            before = None if _torch.is_profiling() else _reporting_device((args, kwargs))
            if before is None:
                return call(*args, **kwargs)
            released = _torch.released_on_cuda(before) if before.type == "cuda" else None
            on_cpu, on_cuda = [0], [0]
            try:
                _torch.start_reporting_allocations()
                out = call(*args, **kwargs)
            finally:
                on_cpu, on_cuda = _torch.stop_reporting_allocations()
            after = _reporting_device((args, kwargs, out))
            if after is not None:
                self.workspace = _most_over_the_last(on_cuda if after.type == "cuda" else on_cpu)
                if released is not None:  # blocks are larger than what was asked for
                    released = _torch.released_on_cuda(before) - released
                    self.workspace = min(self.workspace, released or self.workspace)
                if calls is not None and signature is not None:
                    calls.remember(signature, self.workspace)
            return out

        return run

    def note(self, size: int | None) -> None:
        """Note that the kernel had a workspace of so many bytes; None if that is not known."""
        self.number += 1
        self.latest = size

    def take(self) -> int | None:
        """Return the workspace, and forget it."""
        found, self.workspace = self.workspace, None
        return found


class _KnownWorkspaces(KnownCalls):
    """Workspaces of the calls of one operator under the same settings."""

    def workspace(self, args: Any) -> int | None:
        """Return the workspace of an earlier call that this one is like; None if it is new."""
        try:
            found: int = self.find(args, None, set()).cost
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:
            if is_of_signal_handler(error):
                raise
            return None
        return found

    def signature(self, args: Any, kwargs: Any, used_params: set[int]) -> Any:
        """Return what the kernel may allocate by; raises TypeError if that is not known."""
        signature = _signature(args)
        if signature is None:
            raise TypeError
        return signature

    def remember(self, signature: Any, workspace: int) -> None:
        """Note the workspace of calls of that signature."""
        if len(self.by_signature) >= _LIMIT:
            self.clear()
        self.by_signature[signature] = KnownCall(cost=workspace)


# By operator and rule, then by settings. Of steady rules, and of all counters: a report takes
# longer than most kernels.
_known: dict[Any, dict[Any, _KnownWorkspaces]] = {}


def _signature(args: Any) -> Any:
    """Return a hashable key of what a kernel may allocate by; None if there is none."""
    key: list[Any] = []
    try:
        for arg in args:
            for part in arg if arg.__class__ is list else (arg,):
                cls = part.__class__
                if cls is _Tensor or cls is _Parameter:
                    if not part.is_cpu and (not part.is_cuda or _torch.tries_kernels()):
                        return None
                    key += (part.shape, part.stride(), part.dtype, part.device)
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


def is_on_cuda(args: Iterable[Any]) -> bool:
    """Return True if the first tensor of a call has data on a CUDA device."""
    for arg in args:
        first = arg[0] if arg.__class__ is list and arg else arg
        if first.__class__ is _Tensor or first.__class__ is _Parameter:
            return bool(first.is_cuda)
    return False


def _reporting_device(values: Any) -> torch.device | None:
    """Return the device of all tensors whose allocator reports; None if they have several.

    Tensors on the CPU may be beside those on a CUDA device. Subclasses may hold theirs anywhere.
    """
    device = _CPU
    for tensor in (values,) if values.__class__ is _Tensor else tensors_in(values):
        if tensor.__class__ not in _PLAIN:
            return None
        if not tensor.is_cpu:
            if not tensor.is_cuda or device not in (_CPU, tensor.device):
                return None
            device = tensor.device
    return device if device is _CPU or _torch.reports_on_cuda() else None


def _most_over_the_last(sizes: Iterable[int]) -> int:
    """Return the largest sum of the first sizes, less the sum of all."""
    levels = list(accumulate(sizes, initial=0))
    return max(levels) - levels[-1]
