"""Memory of a run: what its operators allocate, and what modules, optimizers and caches hold."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.checkpoints import is_checkpointing
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tree import ModuleName
from dispatch_flops.counting.thread_state import NO_TASK, OpenCall, ThreadState, last_recorded_in
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.memory.blocks import Block, Blocks
from dispatch_flops.memory.caches import cached_tensors, takes_cache
from dispatch_flops.memory.storages import Storage, dense_parts_of, storages_of
from dispatch_flops.operators.tensors import has_no_data, tensors_in
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.memory import MemoryOptions, Role

_graph_task = _torch.graph_task_id


def _is_fsdp2(module: object) -> bool:
    """Return True for a module that ``fully_shard`` was called for."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _is_tensor(key: object) -> bool:
    """Return True for a tensor. Most keys are parameters, and ``isinstance`` takes longer."""
    return key.__class__ is nn.Parameter or isinstance(key, torch.Tensor)


def _is_outermost(thread: ThreadState, call: OpenCall) -> bool:
    """Return True for a module call that is in no other, nor in a backward pass."""
    if call.task != NO_TASK:
        return False
    for running in thread.stack:
        if running.named is not None:
            return running is call
    return True


def _takes_single_tensors(optimizer: Any) -> bool:
    """Return True if a step without data takes one parameter at a time by torch's default.

    On CUDA, the default is lists of tensors, whose intermediate results are there all at once
    (_default_to_fused_or_foreach, torch/optim/optimizer.py).
    """
    return any(
        "foreach" in group
        and group["foreach"] is None
        and not (group.get("fused") or group.get("differentiable"))
        and len(group["params"]) > 1
        and any(map(has_no_data, group["params"]))
        and _torch.are_taken_in_lists(group["params"])
        and not _is_in_place(optimizer, group)
        for group in optimizer.param_groups
    )


def _is_in_place(optimizer: Any, group: Any) -> bool:
    """Return True if a step has no intermediate results, as SGD's with nothing but momentum."""
    is_sgd = type(optimizer) is torch.optim.SGD
    return is_sgd and not (group["weight_decay"] or group["maximize"] or group["nesterov"])


class _MostBytes:
    """The most bytes of something that was noted for each parameter."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], int]] = {}

    def note(self, parameter: Any, size: int) -> None:
        """Note a size. A parameter that is gone may have had the same id."""
        found = self._found.get(id(parameter))
        if found is None or found[1] < size or found[0]() is not parameter:
            self._found[id(parameter)] = weakref.ref(parameter), size

    def by_id(self) -> dict[int, int]:
        """Return the most bytes by the id of each parameter that is still there."""
        found = list(self._found.items())
        return {key: size for key, (reference, size) in found if reference() is not None}


class Memory:
    """Memory of a run: what its operators allocate, and what its optimizers hold.

    A ``ModuleObserver``. unseen: operators and nodes that allocated memory that is not known.
    decomposed: operators that ran on the meta device as others than a device's kernel.
    gradient_bytes, state_bytes: of each parameter.
    device: where an operator allocated last.
    """

    def __init__(self, names: ModuleNames, options: MemoryOptions) -> None:
        self._names = names
        self.blocks = Blocks(options.rounding, has_timeline=options.has_timeline)
        self.device = self.blocks.on(torch.device("cpu"))
        self.unseen: set[str] = set()
        self.decomposed: set[str] = set()
        self._failed_workspaces: dict[str, str] = {}  # why, by the operator
        self.gradient_bytes, self.state_bytes = _MostBytes(), _MostBytes()
        self._largest_caches: dict[str, Counter[str]] = {}  # by the model that was given it
        self._optimizers = options.optimizers
        self._is_on_cuda = options.on_cuda
        self._met_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._met_modules: set[ModuleName] = set()  # those of outermost calls
        self._is_first_call = True
        self._ordinary: set[type] = set()  # classes of modules that have nothing to be noted

    def start(self, undo: UndoStack) -> None:
        """Note what the modules and optimizers hold, and follow sizes until ``undo`` runs."""
        undo.add(lambda: _torch.storage_sizes.unfollow(self._note_size))
        _torch.storage_sizes.follow(self._note_size)
        self.note_held()

    def end(self) -> None:
        """Let go of the storages and the optimizers: nothing is noted from now on."""
        self.blocks.forget()
        self._optimizers = ()
        self._met_optimizers.clear()

    def workspace_failed(self, func: Any, error: Exception) -> None:
        """Keep why the workspace that the user registered for an operator cannot be used."""
        self._failed_workspaces[str(func)] = f"{type(error).__name__}: {error}"

    def notes(self) -> list[str]:
        """Return what the profile says besides the peaks."""
        return [
            f"the workspace registered for {op} was not used ({error}); mend its formula"
            for op, error in self._failed_workspaces.items()
        ]

    def note_held(self) -> None:
        """Note parameters, buffers, gradients and optimizer state as they are now."""
        self._note_modules(self._names.modules())
        self._note_gradients(self._names.modules())
        self._met_modules.update(self._names.roots)
        for optimizer in self._optimizers:
            self._note_optimizer(optimizer)

    def _note_modules(self, modules: Iterable[nn.Module]) -> None:
        """Note parameters and buffers, which a program may give new storages at any time."""
        held = list(modules)
        for module in held:
            for buffer in module._buffers.values():
                if buffer is not None and not self._bytes_if_noted(buffer, "buffers"):
                    self._give_role(buffer, "buffers")
        for module in held:  # last: a buffer may show the memory of a parameter
            for parameter in module._parameters.values():
                # functional_call puts what it is given there: an inner step's results, say.
                if not isinstance(parameter, nn.Parameter):
                    continue
                if not self._bytes_if_noted(parameter, "parameters"):
                    self._give_role(parameter, "parameters")

    def _bytes_if_noted(self, tensor: torch.Tensor, role: Role) -> int:
        """Return the bytes of a tensor that has its role already; 0 if that is not known.

        Most have, and this takes a tenth of the time of ``_note``.
        """
        try:
            block = self.blocks.live.get(id(tensor.untyped_storage()))
        except (RuntimeError, ValueError):  # sparse and the like; lazy
            return 0
        if block is not None and block.role == role and block.size == tensor.nbytes:
            return block.size
        return 0

    def _note_gradients(self, modules: Iterable[nn.Module]) -> None:
        """Note the gradients that parameters have now, unless a backward pass is running."""
        if _graph_task() == NO_TASK:
            for module in modules:
                held = module._parameters.values()  # functional_call puts others there, too
                self._note_gradients_of(p for p in held if isinstance(p, nn.Parameter))

    def _note_gradients_from_before(self, named: ModuleName, module: nn.Module) -> None:
        """Note gradients of earlier steps where the run meets a module, before FSDP2 gathers them.

        Those of later steps are noted after their backward passes.
        """
        if named not in self._met_modules:
            self._met_modules.add(named)
            self._note_gradients(module.modules())

    def _note_gradients_of(self, parameters: Iterable[nn.Parameter | None]) -> None:
        for parameter in parameters:
            if parameter is not None and (gradient := parameter.grad) is not None:
                noted = self._bytes_if_noted(gradient, "gradients")
                size = noted or self._note(gradient, "gradients")
                self.gradient_bytes.note(parameter, size)

    def _note_optimizer(self, optimizer: Any) -> None:
        """Note what an optimizer holds; what is unknown was there when the optimizer is first met.

        Its first step is the first look at an optimizer that the counter was not given. Parameters
        that no module holds, such as masters in float32 of a model's weights, are its own.
        """
        was_there = optimizer not in self._met_optimizers
        self._met_optimizers.add(optimizer)
        # One may wrap another: that of SAM keeps weights, and the one that it steps keeps moments.
        others = []
        if len(self._met_optimizers) > 1:
            others = [o.state for o in self._met_optimizers if o.state is not optimizer.state]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not self._bytes_if_noted(parameter, "parameters"):
                    self._give_role(parameter, "parameters", was_there=was_there)
            self._note_gradients_of(group["params"])
        for parameter, state in list(optimizer.state.items()):
            size = 0
            for tensor in tensors_in(state):
                size += self._bytes_if_noted(tensor, "optimizer state") or self._note(
                    tensor, "optimizer state", was_there=was_there
                )
            if _is_tensor(parameter):  # some keep more state, by a name
                if others:
                    elsewhere = tensors_in([state.get(parameter) for state in others])
                    size += sum(map(self.blocks.bytes_of, elsewhere))
                self.state_bytes.note(parameter, size)

    def _note(self, tensor: torch.Tensor, role: Role, *, was_there: bool = False) -> int:
        """Give the storages of a tensor their role; return its bytes, as ``bytes_of`` does."""
        self._give_role(tensor, role, was_there=was_there)
        return self.blocks.bytes_of(tensor)

    def _give_role(self, tensor: torch.Tensor, role: Role, *, was_there: bool = False) -> None:
        """Give the storages of a tensor their role; see ``meet`` for those that are not known."""
        was_there = was_there or self._is_first_call
        for part in dense_parts_of(tensor):
            device = self.blocks.on(part.device)
            self.blocks.note(part.untyped_storage(), device, role, was_there=was_there)

    def _note_size(self, storage: Storage) -> None:
        """Note that the program gave a storage another size, without an operator."""
        made_in = last_recorded_in(self.blocks.threads)
        if made_in is None:
            return
        block = self.blocks.live.get(id(storage))
        if block is not None:
            peak = block.device.module_peak(made_in)
            self.blocks.resized(storage, peak, "UntypedStorage.resize_")
        else:
            # It had no size when the run began: an earlier step made it. FSDP keeps the storages
            # of gathered parameters. The storage of a fake tensor does not know its device.
            self.blocks.allocated(storage, self.device.module_peak(made_in))
            self.blocks.give_role(storage, "unsharded parameters")

    # -- module calls and optimizer steps -------------------------------------------------------

    def entering(self) -> None:
        """Do nothing: memory needs no stamp."""

    def enter(self, thread: ThreadState, stamp: Any) -> None:
        """Note what an optimizer holds before its step, and a cache that a module is given.

        Also note what gradients there are where an outermost module call begins, and whether it
        keeps anything.
        """
        call = thread.stack[-1]
        if call.named is None:
            self._note_optimizer(call.owner)
            if self._is_on_cuda and _takes_single_tensors(call.owner):
                self.decomposed.add(f"{type(call.owner).__name__}.step")
            return
        if call.owner.__class__ not in self._ordinary and takes_cache(call.owner):
            self._note_cache(thread, call)
        if _is_outermost(thread, call):
            self._note_gradients_from_before(call.named, call.owner)
            # What is checkpointed will be run with gradients.
            if torch.is_grad_enabled() or is_checkpointing():
                self.blocks.kept.begin_call()
            else:
                self.blocks.kept.begin_step_apart()

    def leaving(self) -> None:
        """Do nothing: memory needs no stamp."""

    def leave(self, thread: ThreadState, call: OpenCall, stamp: Any) -> None:
        """Note what an optimizer, a cache and a sharded module hold after the call.

        Also note where the outermost module call ends.
        """
        owner = call.owner
        if call.named is None:
            if call.known_step is None:  # a step like an earlier one makes nothing new
                self._note_optimizer(owner)
            return
        if owner.__class__ not in self._ordinary:
            self._note_extraordinary(thread, call)
        if not _is_outermost(thread, call):
            return
        self._note_modules(owner.modules())
        self._is_first_call = False
        self.blocks.end_of_calls()

    def _note_extraordinary(self, thread: ThreadState, call: OpenCall) -> None:
        """Note what a module holds after its call by its class."""
        owner = call.owner
        has_cache, is_fsdp2 = takes_cache(owner), _is_fsdp2(owner)
        is_recurrent = isinstance(owner, nn.RNNBase)
        if has_cache:
            self._note_cache(thread, call)
        if is_fsdp2:
            self._note_unsharded(owner)
        if is_recurrent:
            self._note_recurrent(owner)
        if not (has_cache or is_fsdp2 or is_recurrent):
            self._ordinary.add(owner.__class__)

    def _note_cache(self, thread: ThreadState, call: OpenCall) -> None:
        """Give the cache that a module takes its role, unless a calling module was given one, too.

        With gradients, keys and values are activations. Also note the bytes that each module made
        of the cache, where it is the largest so far.
        """
        if torch.is_grad_enabled():
            return
        if any(c is not call and takes_cache(c.owner) for c in thread.stack):
            return
        assert call.named is not None
        model = call.named.fqn
        parts: dict[int, Block] = {}
        for tensor in cached_tensors(call.owner):
            for storage, device in storages_of(tensor):
                self.meet(storage, device, "KV cache")
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
        for parameter in module.parameters():
            for storage, _ in storages_of(parameter):
                block = self.blocks.live.get(id(storage))
                if block is not None and block.role is None:
                    block.role = "unsharded parameters"

    def _note_recurrent(self, module: nn.RNNBase) -> None:
        """Note a recurrent layer on the meta device.

        oneDNN and cuDNN run it by one kernel. The meta device has none, and torch projects the
        inputs of all steps at once on the CPU alone (FullLayer, aten/src/ATen/native/RNN.cpp).
        """
        if any(parameter.is_meta for parameter in module._flat_weights if parameter is not None):
            self.decomposed.add(f"aten.{module.mode.lower()}.input")

    # -- operators ------------------------------------------------------------------------------

    def meet(self, storage: Storage, device: torch.device, role: Role) -> None:
        """Note a storage that no operator of the run returned; does nothing if it is known.

        Until the first call of the model or the first backward pass ends, it counts as there
        before; later from now on, for a loader of data may have just allocated it in another
        thread.
        """
        if id(storage) in self.blocks.live:
            return
        found = self.blocks.on(device)
        self.blocks.note(storage, found, role, was_there=self._is_first_call)
        if found is not self.device and found.peaks:
            # The operator that reads it may allocate elsewhere alone, as a copy to a device does.
            made_in = last_recorded_in(self.blocks.threads)
            peak = None if made_in is None else found.module_peak(made_in)
            if peak is not None and found.now > peak.threshold:
                peak.note(found.now, None, self.blocks.allocations)

    def meet_gradient(self, leaf: torch.Tensor) -> None:
        """Note the gradient of an earlier step that a leaf has, which no module may hold."""
        gradient = leaf.grad
        if gradient is not None and not self._bytes_if_noted(gradient, "gradients"):
            self._give_role(gradient, "gradients")

    def changed_phase(self, before: Phase, after: Phase) -> None:
        """Note that operators of another phase follow."""
        self.blocks.note_event()
        if before == "backward" and _graph_task() == NO_TASK:  # a recomputation is within one
            self.blocks.end_of_backward()
            self._note_modules(self._names.modules())
            self._note_gradients(self._names.modules())
        if after == "forward":
            self._is_first_call = False
            self.blocks.kept.next_step()
