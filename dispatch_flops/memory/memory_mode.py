"""Dispatch mode that also follows the memory of every operator's arguments and results."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.observers import OperatorTimer
from dispatch_flops.counting.plans import Plan
from dispatch_flops.counting.thread_state import NO_TASK, ModulePhase, OpenCall, ThreadState
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.memory.blocks import Block, Blocks, DeviceBlocks, ModulePeak
from dispatch_flops.memory.caches import cached_tensors, takes_cache
from dispatch_flops.memory.kernel_allocations import KernelAllocations
from dispatch_flops.memory.storages import Allocation, Storage, allocation_of, storages_of
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.operators.workspaces import workspace_of
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.memory import Role

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_graph_task = _torch.graph_task_id


@lru_cache(maxsize=256)
def _is_fsdp2(cls: Any) -> bool:
    """Return True for a class of modules that ``fully_shard`` made."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and issubclass(cls, fsdp.FSDPModule)


class _Running(threading.local):
    """What a thread runs. made_in: the module and phase of the operator that ran last."""

    made_in: ModulePhase | None = None


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """How memory is followed.

    rounding: bytes that each block is rounded up to a multiple of. optimizers: those whose state
    was there before the run. has_timeline: also follow memory over the operators.
    """

    rounding: int = 1
    optimizers: tuple[Any, ...] = ()
    has_timeline: bool = False


class Memory:
    """Memory of a run: what its operators allocate, and what its optimizers hold.

    A ``ModuleObserver``. unseen: operators whose kernels allocated memory that is not known.
    gradient_bytes, state_bytes: by the id of the parameter.
    device: where an operator allocated last.
    """

    def __init__(self, names: ModuleNames, options: MemoryOptions) -> None:
        self.rounding = options.rounding
        self._names = names
        self.running = _Running()
        self.blocks = Blocks(options.rounding, self._phase_now, has_timeline=options.has_timeline)
        self.device = self.blocks.on(torch.device("cpu"))
        self.unseen: set[str] = set()
        self.gradient_bytes: dict[int, int] = {}
        self.state_bytes: dict[int, int] = {}
        self._largest_caches: dict[str, Counter[str]] = {}  # by the model that was given it
        self._optimizers = options.optimizers
        self._is_first_call = True

    def _phase_now(self) -> Phase:
        made_in = self.running.made_in
        return "forward" if made_in is None else made_in.phase

    def start(self, undo: UndoStack) -> None:
        """Note what the modules and optimizers hold, and follow sizes until ``undo`` runs."""
        undo.add(lambda: _torch.unfollow_storage_sizes(self._note_size))
        _torch.follow_storage_sizes(self._note_size)
        self.note_held()

    def note_held(self) -> None:
        """Note parameters, buffers, gradients and optimizer state as they are now."""
        with _torch.modes_disabled():
            for module in self._names.modules():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        self._note(parameter, "parameters")
                for buffer in module._buffers.values():
                    if buffer is not None:
                        self._note(buffer, "buffers")
            self.note_gradients()
            for optimizer in self._optimizers:
                self._note_optimizer(optimizer)

    def note_gradients(self) -> None:
        """Note the gradients that the parameters have now, unless a backward pass is running."""
        if _graph_task() == NO_TASK:
            with _torch.modes_disabled():
                for module in self._names.modules():
                    self._note_gradients_of(module._parameters.values())

    def _note_gradients_of(self, parameters: Iterable[nn.Parameter | None]) -> None:
        for parameter in parameters:
            if parameter is not None and (gradient := parameter.grad) is not None:
                self._keep_most(self.gradient_bytes, parameter, self._note(gradient, "gradients"))

    def _note_optimizer(self, optimizer: Any) -> None:
        with _torch.modes_disabled():
            for group in optimizer.param_groups:
                self._note_gradients_of(group["params"])
            for parameter, state in list(optimizer.state.items()):
                size = sum(self._note(tensor, "optimizer state") for tensor in tensors_in(state))
                self._keep_most(self.state_bytes, parameter, size)

    @staticmethod
    def _keep_most(sizes: dict[int, int], parameter: Any, size: int) -> None:
        sizes[id(parameter)] = max(size, sizes.get(id(parameter), 0))

    def _note(self, tensor: torch.Tensor, role: Role) -> int:
        """Give the storages of a tensor their role; return the bytes of the tensor in them."""
        for storage, device in storages_of(tensor):
            self.blocks.was_there(storage, self.blocks.on(device), role)
        return self.blocks.bytes_of(tensor)

    def _note_size(self, storage: Storage) -> None:
        """Note that the program gave a storage another size, without an operator."""
        made_in = self.running.made_in
        if made_in is None:
            return
        block = self.blocks.live.get(id(storage))
        if block is not None:
            self.blocks.resized(storage, block.device, made_in)
        elif storage.nbytes():
            # It had no size when the run began: an earlier step made it. FSDP keeps the storages
            # of gathered parameters so. The storage of a fake tensor does not know its device.
            self.blocks.allocated(storage, self.device, made_in)
            self.blocks.give_role(storage, "unsharded parameters")

    # -- module calls and optimizer steps -------------------------------------------------------

    def entering(self) -> None:
        """Do nothing: memory needs no stamp."""

    def enter(self, thread: ThreadState, stamp: Any) -> None:
        """Note what an optimizer holds before its step, and a cache that a module is given."""
        call = thread.stack[-1]
        if call.named is None:
            self._note_optimizer(call.owner)
        else:
            self._note_cache(thread, call)

    def leaving(self) -> None:
        """Do nothing: memory needs no stamp."""

    def leave(self, thread: ThreadState, call: OpenCall, stamp: Any) -> None:
        """Note what an optimizer, a cache and a sharded module hold after the call.

        Also note where the outermost module call ends.
        """
        if call.named is None:
            self._note_optimizer(call.owner)
            return
        self._note_cache(thread, call)
        cls: Any = type(call.owner)
        if _is_fsdp2(cls):
            self._note_unsharded(call.owner)
        if call.task == NO_TASK and all(
            other.named is None or other is call for other in thread.stack
        ):
            self._is_first_call = False
            self.blocks.born_in_calls = self.blocks.allocations

    def _note_cache(self, thread: ThreadState, call: OpenCall) -> None:
        """Give the cache of a module its role, unless a calling module was given one, too.

        With gradients, keys and values are activations. Also note the bytes that each module made
        of the cache, where it is the largest so far.
        """
        if not takes_cache(call.owner) or torch.is_grad_enabled():
            return
        if any(c is not call and takes_cache(c.owner) for c in thread.stack):
            return
        assert call.named is not None
        model = call.named.fqn
        parts: dict[int, Block] = {}
        with _torch.modes_disabled():
            for tensor in cached_tensors(call.owner):
                for storage, device in storages_of(tensor):
                    self.meet(storage, device)
                    self.blocks.give_role(storage, "KV cache")
                    if (block := self.blocks.live.get(id(storage))) is not None:
                        parts[id(storage)] = block
        sizes: Counter[str] = Counter()
        for block in parts.values():
            sizes[model if block.made_in is None else block.made_in.fqn] += block.size
        largest = self._largest_caches.get(model)
        if largest is None or sizes.total() > largest.total():
            self._largest_caches[model] = sizes

    def cache_bytes(self) -> Counter[str]:
        """Return ``{fqn: bytes}`` that each module made of the largest cache of each model."""
        return sum(self._largest_caches.values(), start=Counter())

    def _note_unsharded(self, module: nn.Module) -> None:
        """Give the gathered parameters of an FSDP2 module their role.

        It has released them again before the next look at what modules hold.
        """
        with _torch.modes_disabled():
            for parameter in module.parameters():
                for storage, _ in storages_of(parameter):
                    block = self.blocks.live.get(id(storage))
                    if block is not None and block.role is None:
                        block.role = "unsharded parameters"

    # -- operators ------------------------------------------------------------------------------

    def meet(self, storage: Storage, device: torch.device) -> None:
        """Note a storage that no operator of the run returned; does nothing if it is known.

        Until the first call of the model ends it counts as there before; later from now on, for
        a loader of data may have just allocated it in another thread.
        """
        if id(storage) in self.blocks.live:
            return
        found = self.blocks.on(device)
        if self._is_first_call:
            self.blocks.was_there(storage, found, "inputs")
        else:
            self.blocks.arrived(storage, found, "inputs")

    def changed_phase(self, before: Phase, after: Phase) -> None:
        """Note that operators of another phase follow."""
        if before == "backward":
            self.note_gradients()
        if after == "forward":
            self.blocks.next_step()


class PlaceTimer:
    """An ``OperatorTimer`` that notes where an operator is recorded, and hands on to another."""

    def __init__(self, running: _Running, timer: OperatorTimer | None) -> None:
        self._running = running
        self._timer = timer
        if timer is None:
            self.begin = bool  # type: ignore[method-assign]  # returns False, without Python code

    def begin(self) -> bool:
        """Start a dispatch, as the other timer does."""
        assert self._timer is not None
        return self._timer.begin()

    def end(self) -> None:
        """End the dispatch that ``begin`` started."""
        if self._timer is not None:
            self._timer.end()

    def timed(self, call: Callable[..., Any], *, is_free: bool) -> Callable[..., Any]:
        """Return ``call``, timed by the other timer."""
        return call if self._timer is None else self._timer.timed(call, is_free=is_free)

    def disregard_reach(self) -> None:
        """Hand on to the other timer."""
        if self._timer is not None:
            self._timer.disregard_reach()

    def record(self, module_phase: ModulePhase, cost: CallCost) -> None:
        """Note the module and phase of the operator that just ran."""
        self._running.made_in = module_phase
        if self._timer is not None:
            self._timer.record(module_phase, cost)


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
        self._places = PlaceTimer(memory.running, timer)
        super().__init__(tracker, conventions, own_rules, on_full, self._places)
        self._is_timed = timer is not None
        self._memory = memory
        self._blocks = memory.blocks
        self._running = memory.running
        self._live = memory.blocks.live
        self._kernel = KernelAllocations()
        self._allocations: dict[int, tuple[Allocation, Any, Any]] = {}
        self._device: DeviceBlocks = memory.device
        self._phase: Phase = "forward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_timed and self._places.begin():
            try:
                return self.__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._places.end()
        known = self._allocations.get(id(func))  # an overload's own hash runs in Python
        if known is None:
            known = self._allocations[id(func)] = (allocation_of(func), workspace_of(func), func)
        allocation, workspace, _ = known
        if self._phase == "forward" and allocation != "arrival":
            # Later phases use what forward used, and what optimizers are known to hold.
            self._meet(args)
            if kwargs:
                self._meet(kwargs.values())
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        made_in = self._running.made_in
        if made_in is None:
            made_in = self._running.made_in = self.tracker.here()
        if made_in.phase != self._phase:
            before, self._phase = self._phase, made_in.phase
            self._memory.changed_phase(before, self._phase)
        device = self._device
        if allocation != "none":
            if out.__class__ is not _Tensor or allocation == "argument":
                device = self._allocated_all((args, kwargs), out, allocation, made_in)
            else:
                try:
                    storage = out.untyped_storage()
                    if id(storage) not in self._live:
                        if out.device != device.device:
                            device = self._allocating_on(out.device)
                        self._blocks.allocated(storage, device, made_in)
                except RuntimeError:  # sparse and opaque tensors have no storage of their own
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

    def _adapt(self, plan: Plan) -> Plan:
        plan = super()._adapt(plan)
        if workspace_of(plan.func) is None:
            return plan
        return replace(plan, call=self._kernel.reported(plan.call))

    def _raise_peak(
        self, found: ModulePeak, device: DeviceBlocks, made_in: ModulePhase, func: Any, now: int
    ) -> None:
        peak = found.of_phase
        peak.bytes, peak.born = now, self._blocks.allocations
        peak.made_in, peak.operator = made_in, func
        peak.workspace = now - device.now
        peak.released = []
        device.born_at_peaks = peak.born

    def _meet(self, args: Any) -> None:
        live = self._live
        for arg in args:
            cls = arg.__class__
            if cls is _Tensor or cls is _Parameter:
                try:
                    if id(arg.untyped_storage()) not in live:
                        self._meet_tensor(arg)
                except RuntimeError:
                    self._meet_tensor(arg)
            elif cls is list or cls is tuple or isinstance(arg, _Tensor):
                for tensor in tensors_in(arg):
                    self._meet_tensor(tensor)

    def _meet_tensor(self, tensor: torch.Tensor) -> None:
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
        try:
            size: int | None = workspace(args, kwargs or {}, out)
        except Exception:  # a workspace of the user's own
            size = None
        reported = self._kernel.take()
        if size is None:
            size = reported
        if size is None:
            self._memory.unseen.add(str(func))
            return 0
        return size
