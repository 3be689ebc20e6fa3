"""What kernels on the CPU and on CUDA allocate for themselves, as torch's allocators report it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import SettingsReader
from dispatch_flops.counting.known_calls import KnownCall
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.numbers import NUMBERS, NumberKeys
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.operators.workspaces import WorkspaceRule

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_Tensor, _Parameter = _PLAIN
_CPU = torch.device("cpu")
_STRIDED = torch.strided
_NUMBERS = frozenset((bool, int, float, str, type(None)))
_LIMIT = 8192  # workspaces of an operator that are kept before all are dropped


class LastKernel(threading.local):
    """The kernel that a thread ran last, of those whose workspace the allocator is asked for.

    workspace: the most bytes that were allocated at once while it ran, over what was allocated when
    it returned; None where no allocator can be asked, and where it was taken.
    """

    workspace: int | None = None

    def take(self) -> int | None:
        """Return the workspace, and forget it: it is not that of an operator around this one."""
        found, self.workspace = self.workspace, None
        return found


last_kernel = LastKernel()


class ComparedWorkspaces(threading.local):
    """Workspaces of a thread with which the peak was compared.

    number: how many so far; latest: the last of these.
    """

    number = 0
    latest: int | None = None

    def note(self, size: int | None) -> None:
        """Note that a kernel had a workspace of so many bytes; None if that is not known."""
        self.number += 1
        self.latest = size


class ReportedOperator:
    """Runs an operator, and asks the allocator for the workspaces that its rule may not know.

    The allocators are asked where all tensors are on the CPU or on one CUDA device. They report to
    one profiler of a thread. A profiler of the program goes first.

    func: the operator. call: runs it. rule: of its workspace.
    """

    def __init__(self, func: Any, call: Callable[..., Any], rule: WorkspaceRule) -> None:
        self._func = func
        self._call = call
        self.rule = rule
        self._of_settings = _known.setdefault((id(func), rule), {})  # torch keeps its operators

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call, and let ``last_kernel`` know what an earlier one or the allocator says."""
        if not self._may_be_reported(args):
            last_kernel.workspace = None
            return self._call(*args, **kwargs)
        if kwargs or not self.rule.is_steady:
            return self._run_asking(args, kwargs)
        settings = settings_reader(on_cuda=is_on_cuda(args))()
        signature = None if settings is None else _signature(args)
        if signature is None:
            return self._run_asking(args, kwargs)
        known = self._of_settings.setdefault(settings, {})
        if signature in known:
            out = self._call(*args)
            last_kernel.workspace = known[signature]
            return out
        out = self._run_asking(args, kwargs)
        if last_kernel.workspace is not None:
            if len(known) >= _LIMIT:
                known.clear()
            known[signature] = last_kernel.workspace
        return out

    def _may_be_reported(self, args: Any) -> bool:
        return is_on_cuda(args) or self.rule.may_be_unknown(args)

    def _run_asking(self, args: Any, kwargs: Any) -> Any:
        """Run a call while the allocators report."""
        last_kernel.workspace = None
        before = None if _torch.is_profiling() else _reporting_device((args, kwargs))
        if before is None:
            return self._call(*args, **kwargs)
        released = _torch.released_on_cuda(before) if before.type == "cuda" else None
        on_cpu, on_cuda = [0], [0]
        try:
            _torch.start_reporting_allocations()
            out = self._call(*args, **kwargs)
        finally:
            on_cpu, on_cuda = _torch.stop_reporting_allocations()
        after = _reporting_device((args, kwargs, out))
        if after is not None:
            size = _most_over_the_last(on_cuda if after.type == "cuda" else on_cpu)
            if released is not None:  # blocks are larger than what was asked for
                released = _torch.released_on_cuda(before) - released
                size = min(size, released or size)
            last_kernel.workspace = size
        return out

    def prepare(self, known: KnownCall, numbers: NumberKeys) -> None:
        """Let calls like ``known`` run in the least time, once it is known what they allocate.

        numbers: those that calls like it have in common. A workspace may depend on others.
        """
        untold = NUMBERS - numbers.by_value

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._may_be_reported(args):
                known.to_be_run(self._func)
            elif kwargs or not self.rule.is_steady or not untold.isdisjoint(map(type, args)):
                known.run = self.run
            else:
                known.run = self._remembering(known.cost, settings_reader(on_cuda=is_on_cuda(args)))
            assert known.run is not None
            return known.run(*args, **kwargs)

        known.run = run

    def _remembering(self, cost: CallCost, read_settings: SettingsReader) -> Callable[..., Any]:
        """Return what runs calls that are all alike, and remembers their workspace by settings."""
        fastest = KnownCall(cost=cost)
        fastest.to_be_run(self._func)
        sizes: dict[Any, int | None] = {}

        def run(*args: Any) -> Any:
            settings = read_settings()
            size = sizes.get(settings)
            if size is None:
                out = self.run(*args)
                if settings is not None:
                    sizes[settings] = last_kernel.workspace
                return out
            out = fastest.run(*args)  # type: ignore[misc]
            last_kernel.workspace = size
            return out

        return run


# By operator and rule, then by settings and signature. Of steady rules, and of all counters: a
# report takes longer than most kernels.
_known: dict[Any, dict[Any, dict[Any, int]]] = {}


def _signature(args: Any) -> Any:
    """Return a hashable key of what a kernel may allocate by; None if there is none."""
    key: list[Any] = []
    try:
        for arg in args:
            for part in arg if arg.__class__ is list else (arg,):
                cls = part.__class__
                if cls is _Tensor or cls is _Parameter:
                    if part.layout is not _STRIDED:  # a sparse one's size is data
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


def settings_reader(*, on_cuda: bool) -> SettingsReader:
    """Return what reads the settings by which a device's kernels are chosen."""
    return _torch.cuda_kernel_settings if on_cuda else _torch.cpu_kernel_settings


def is_on_cuda(args: Iterable[Any]) -> bool:
    """Return True if the first tensor of a call has data on a CUDA device."""
    for arg in args:
        first = arg[0] if arg.__class__ is list and arg else arg
        cls = first.__class__
        if cls is _Tensor or cls is _Parameter:
            is_cuda: bool = first.is_cuda
            return is_cuda
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
