"""Dispatch mode that also follows the memory of every operator's arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.observers import OperatorTimer
from dispatch_flops.counting.plans import Plan
from dispatch_flops.counting.tensor_subclasses import in_sharding_propagation
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.memory.blocks import Block, DeviceBlocks, ModulePeak
from dispatch_flops.memory.kernel_allocations import KernelAllocations
from dispatch_flops.memory.reused_arguments import reused_storage
from dispatch_flops.memory.run_memory import Memory
from dispatch_flops.memory.storages import Allocation, allocation_of, storages_of
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.formulas.copying_workspaces import report_condition
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.operators.workspaces import workspace_of
from dispatch_flops.profile.cost import Phase

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_WITHOUT_TENSORS = frozenset(
    (bool, int, float, str, type(None), torch.device, torch.dtype, torch.layout)
) | {torch.memory_format}
_count = CountingMode.__torch_dispatch__  # super() takes longer to find it


class MemoryMode(CountingMode):
    """Counting mode that follows the storages of every operator in ``memory``."""

    def __init__(
        self,
        tracker: Tracker,
        conventions: Conventions,
        own_rules: Mapping[Any, Rule],
        on_full: Callable[[], None],
        timer: OperatorTimer | None,
        memory: Memory,
    ) -> None:
        super().__init__(tracker, conventions, own_rules, on_full, timer)
        self._has_subclasses = False
        self._memory = memory
        self._blocks = memory.blocks
        memory.blocks.threads = tracker.local
        self._live = memory.blocks.live
        self._is_exact = memory.rounding == 1
        self._kernel = KernelAllocations()
        self._allocations: dict[int, tuple[Allocation, Any, Any]] = {}
        self._device: DeviceBlocks = memory.device
        self._phase: Phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        timer = self._timer
        if timer is not None and timer.begin():
            try:
                return self.__torch_dispatch__(func, types, args, kwargs)
            finally:
                timer.end()
        if self._has_subclasses and self._subclass.depth and in_sharding_propagation():
            return _count(self, func, types, args, kwargs)
        try:
            known = self._allocations[id(func)]  # an overload's own hash runs in Python
        except KeyError:
            known = self._allocations[id(func)] = (allocation_of(func), workspace_of(func), func)
        allocation, workspace, _ = known
        if self._phase == "forward" and allocation != "arrival":
            # Later phases use what forward used, and what optimizers are known to hold.
            for arg in (*args, *kwargs.values()) if kwargs else args:
                cls = arg.__class__
                if cls is _Tensor or cls is _Parameter:
                    try:
                        if id(arg.untyped_storage()) not in self._live:
                            self._meet(arg)
                    except RuntimeError:  # sparse and opaque tensors have no storage of their own
                        self._meet(arg)
                elif cls is list:
                    if arg and arg[0].__class__ is not int:  # not a shape, nor dimensions
                        self._meet(arg)
                elif cls not in _WITHOUT_TENSORS:
                    self._meet(arg)
        out = _count(self, func, types, args, kwargs)
        if out is NotImplemented or allocation == "annotation":
            return out
        try:
            made_in: ModulePhase | None = self._local.thread.recorded_in
        except AttributeError:
            made_in = None
        if made_in is None:  # the thread has recorded no operator yet, nor this one
            made_in = self.tracker.join_thread().recorded_in = self.tracker.here()
        if made_in.phase != self._phase:
            before, self._phase = self._phase, made_in.phase
            self._memory.changed_phase(before, self._phase)
        device = self._device
        if allocation == "reuse" and made_in.phase == "backward":
            storage = reused_storage(args, kwargs, out)
            if storage is not None:
                self._blocks.reused(storage)
        if allocation != "none":
            if out.__class__ is not _Tensor or allocation == "argument":
                device = self._allocated_all((args, kwargs), out, allocation, made_in)
            else:
                try:
                    storage = out.untyped_storage()
                    if out.device != device.device:
                        device = self._allocating_on(out.device)
                    key = id(storage)
                    if key not in self._live:  # a call of ``Blocks.allocated``, written out
                        blocks = self._blocks
                        size = storage.nbytes() if self._is_exact else blocks.size_of(storage)
                        if type(size) is int and size:
                            self._live[key] = block = Block(storage, blocks.on_release)
                            block.key = key
                            block.size = size
                            block.device = device
                            block.made_in = made_in
                            block.role = None
                            block.step = blocks.step
                            blocks.allocations = block.born = blocks.allocations + 1
                            device.now += size
                except RuntimeError:
                    device = self._allocated_all((args, kwargs), out, allocation, made_in)
        found = device.modules.get(made_in) or device.module_peak(made_in)
        now = device.now
        if workspace is not None:
            now += self._workspace(func, workspace, args, kwargs, out)
        if now > found.bytes:
            found.bytes = now
            if now > found.of_phase.bytes:
                self._raise_peak(found, device, made_in, func, now)
        if device.timeline is not None:
            born = self._blocks.allocations
            device.timeline.note(now, now - device.now, born, made_in, func)
        return out

    def _dispatch_on_subclass(
        self, plan: Plan, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        self._has_subclasses = True
        return super()._dispatch_on_subclass(plan, types, args, kwargs)

    def _adapt(self, plan: Plan) -> Plan:
        plan = super()._adapt(plan)
        if workspace_of(plan.func) is None:
            return plan
        return replace(plan, call=self._kernel.reported(plan.call, report_condition(plan.func)))

    def _raise_peak(
        self, found: ModulePeak, device: DeviceBlocks, made_in: ModulePhase, func: Any, now: int
    ) -> None:
        peak = found.of_phase
        peak.bytes, peak.born = now, self._blocks.allocations
        peak.made_in, peak.operator = made_in, func
        peak.workspace = now - device.now
        peak.released = []
        device.born_at_peaks = peak.born

    def _meet(self, arguments: Any) -> None:
        for tensor in tensors_in(arguments):
            for storage, device in storages_of(tensor):
                self._memory.meet(storage, device)

    def _allocated_all(
        self, arguments: Any, out: Any, allocation: Allocation, made_in: ModulePhase
    ) -> DeviceBlocks:
        blocks = self._blocks
        for tensor in tensors_in(out):
            for storage, device in storages_of(tensor):
                self._allocating_on(device)
                blocks.allocated(storage, self._device, made_in)
                if allocation == "gathering":
                    blocks.give_role(storage, "unsharded parameters")
        if allocation == "argument":
            for tensor in tensors_in((arguments, out)):
                for storage, device in storages_of(tensor):
                    self._allocating_on(device)
                    blocks.resized(storage, self._device, made_in)
        return self._device

    def _allocating_on(self, device: torch.device) -> DeviceBlocks:
        """Return the memory of the device that results are allocated on now."""
        self._device = self._memory.device = self._blocks.on(device)
        return self._device

    def _workspace(self, func: Any, workspace: Any, args: Any, kwargs: Any, out: Any) -> int:
        """Return the bytes that the kernel allocated for itself while it ran."""
        size: int | None
        try:
            size = workspace(*args, out=out, **kwargs) if kwargs else workspace(*args, out=out)
        except Exception:  # a workspace of the user's own, or a tensor without strides
            size = None
        if size is None:
            size = self._kernel.take()
        if size is None:
            self._memory.unseen.add(str(func))
            return 0
        return size
