"""What kernels on the CPU allocate for themselves, as the CPU's allocator reports it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.operators.tensors import tensors_in

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class KernelAllocations(threading.local):
    """Workspace of the kernel that a thread ran last.

    workspace: the most bytes that were allocated at once while the kernel ran, over what was
    allocated when it returned; None where the allocator was not asked.
    """

    workspace: int | None = None

    def reported(
        self, call: Callable[..., Any], condition: Callable[[Any], bool] | None = None
    ) -> Callable[..., Any]:
        """Return ``call``, which notes the workspace of each call with tensors on the CPU.

        condition: what is true of the arguments of the calls that are noted; None: all are.
        The allocator reports to one profiler of a thread. A profiler of the program goes first.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            self.workspace = None
            if condition is not None and not condition(args):
                return call(*args, **kwargs)
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
            return out

        return run

    def take(self) -> int | None:
        """Return the workspace, and forget it."""
        found, self.workspace = self.workspace, None
        return found


def _are_on_cpu(values: Any) -> bool:
    """Return True if all tensors have data on the CPU; subclasses may hold theirs anywhere."""
    return all(t.__class__ in _PLAIN and t.device.type == "cpu" for t in tensors_in(values))


def _most_over_the_last(sizes: Iterable[int]) -> int:
    """Return the largest sum of the first sizes, less the sum of all."""
    levels = list(accumulate(sizes, initial=0))
    return max(levels) - levels[-1]
