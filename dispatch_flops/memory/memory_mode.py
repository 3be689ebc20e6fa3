"""Dispatch mode that also follows the memory of every operator's arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import SettingsReader
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.observers import OperatorTimer
from dispatch_flops.counting.plans import Plan
from dispatch_flops.counting.strategies import decompose
from dispatch_flops.counting.tensor_subclasses import in_sharding_propagation
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.counting.undispatched import Costs
from dispatch_flops.memory.blocks import Block, ModulePeak
from dispatch_flops.memory.found_workspaces import (
    OF_EACH_CALL,
    found_workspace_of,
    is_to_be_found,
    note_workspace,
)
from dispatch_flops.memory.kernel_allocations import (
    ComparedWorkspaces,
    ReportedOperator,
    is_on_cuda,
    last_kernel,
    settings_reader,
)
from dispatch_flops.memory.replaced_operators import may_replace, node_replacing
from dispatch_flops.memory.reused_arguments import (
    ACCUMULATION,
    reused_storage,
    storage_of_product,
)
from dispatch_flops.memory.run_memory import Memory
from dispatch_flops.memory.storages import (
    allocation_of,
    storages_in,
    storages_of,
    tensors_taken,
)
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.interrupts import is_of_signal_handler
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.operators.workspaces import always, workspace_of
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.memory import Role

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_WITHOUT_TENSORS = frozenset(
    (bool, int, float, str, type(None), torch.device, torch.dtype, torch.layout)
) | {torch.memory_format}
_STRIDED = torch.strided
_IS_CUDA_BUILT = torch.backends.cuda.is_built()
_NOWHERE = ModulePhase("", "forward")
# Their backward has a kernel on the CPU and on CUDA, and is several operators on meta.
_MISH = frozenset((id(torch.ops.aten.mish.default), id(torch.ops.aten.mish_.default)))
_count = CountingMode.__torch_dispatch__  # super() takes longer to find it


class _Operator:
    """What an overload takes and allocates, as its schema tells.

    func: the overload, whose id must not be given to another. takes: its tensors; see
    ``tensors_taken``. is_annotation: it only names a range. allocates: results may be new storages.
    is_plain: that is all that it allocates. may_reuse: in a backward pass, a result may take the
    place of an argument. is_sum: in ``linear`` as well. may_differ: that, or it may run in place of
    another operator. is_in_place: it changes an argument. Only sparse ones get other storages then,
    or in a view. is_reported: the allocator is asked for the workspace of its calls.
    """

    __slots__ = (
        "allocates", "allocation", "func", "is_annotation", "is_in_place", "is_plain",
        "is_reported", "is_sum", "may_differ", "may_reuse", "takes", "workspace",
    )  # fmt: skip

    def __init__(self, func: Any, *, is_exact: bool, as_on_cuda: bool) -> None:
        self.func = func
        self.allocation = allocation_of(func)
        rule = workspace_of(func, as_on_cuda=as_on_cuda)
        self.workspace: Any = rule or found_workspace_of(func)
        self.is_reported = False
        self.takes = "none" if self.allocation == "arrival" else tensors_taken(func)
        self.is_annotation = self.allocation == "annotation"
        self.is_in_place = self.allocation == "in place"
        self.allocates = self.allocation not in ("none", "in place")
        self.is_plain = is_exact and self.allocation in ("result", "reuse")
        self.may_reuse = self.allocation == "reuse"
        self.is_sum = self.may_reuse and func.name() == ACCUMULATION
        self.may_differ = self.may_reuse or may_replace(func)


@dataclass(frozen=True, slots=True)
class _LayerMemory:
    """The operator that made a layer's output, or changed its input, and nothing else.

    workspace: bytes. settings: by which its kernel was chosen; None if no kernel that may be chosen
    has a workspace. read_settings: returns those of the moment.
    """

    operator: _Operator
    workspace: int = 0
    settings: tuple[Any, ...] | None = None
    read_settings: SettingsReader = _torch.cpu_kernel_settings


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
        tracker.follow_memory(self)
        self._live = memory.blocks.live
        self._on_release = memory.blocks.on_release
        self._workspaces = ComparedWorkspaces()
        self._operators: dict[int, _Operator] = {}
        self._peak = ModulePeak(memory.device, _NOWHERE)  # of the last operator's module and device
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
            operator = self._operators[id(func)]  # an overload's own hash runs in Python
        except KeyError:
            operator = self._operators[id(func)] = self._operator(func)
        live = self._live
        if self._phase == "forward":
            # Later phases use what forward used, and what optimizers are known to hold.
            takes = operator.takes
            try:
                if takes == "one":
                    if id(args[0].untyped_storage()) not in live:
                        self._meet(args)
                elif takes == "two":
                    if (
                        id(args[0].untyped_storage()) not in live
                        or id(args[1].untyped_storage()) not in live
                    ):
                        self._meet(args)
                elif takes == "three":
                    if (
                        id(args[0].untyped_storage()) not in live
                        or id(args[1].untyped_storage()) not in live
                        or id(args[2].untyped_storage()) not in live
                    ):
                        self._meet(args)
                elif takes == "any":
                    self._meet_unknown((*args, *kwargs.values()) if kwargs else args)
            except (AttributeError, IndexError, RuntimeError) as error:
                if is_of_signal_handler(error):
                    raise
                # A number in place of a tensor, no storage, or one that is named or omitted.
                operator.takes = "any"
                self._meet_unknown((*args, *kwargs.values()) if kwargs else args)
        workspace = operator.workspace
        size = 0 if workspace is None else self._workspace_before(operator, args, kwargs)
        out = _count(self, func, types, args, kwargs)
        if types and self._subclass.ran_parts:
            self._subclass.ran_parts = False
            if operator.allocates:  # the subclass may have done so with modes disabled
                self._allocated_all(operator, (args, kwargs), out)
            return out
        is_tensor = out.__class__ is _Tensor
        if not is_tensor and (out is NotImplemented or operator.is_annotation):
            return out
        try:
            made_in: ModulePhase | None = self._local.thread.recorded_in
        except AttributeError:
            made_in = None
        peak = self._peak
        if made_in is not peak.made_in:
            peak = self._moved_to(made_in, () if operator.takes == "none" else (args, kwargs))
        if operator.may_differ and (operator.is_sum or self._phase == "backward"):
            self._note_difference(operator, args, kwargs, out)
        if operator.is_plain and (is_tensor or out.__class__ is tuple):
            try:
                for tensor in (out,) if is_tensor else out:
                    cls = tensor.__class__
                    if cls is not _Tensor:
                        if cls in _WITHOUT_TENSORS:
                            continue
                        raise TypeError
                    storage = tensor.untyped_storage()
                    if tensor.device != peak.device.device:
                        peak = self._allocating_on(tensor.device)
                    key = id(storage)
                    if key not in live:  # a call of ``Blocks.allocated``, written out
                        nbytes = storage.nbytes()
                        if type(nbytes) is int and nbytes:
                            block = Block(storage, self._on_release)
                            block.key = key
                            block.size = nbytes
                            block.peak = peak
                            block.role = None
                            blocks = self._blocks
                            block.step = blocks.kept.now
                            blocks.allocations = block.born = blocks.allocations + 1
                            live[key] = block  # an interrupt leaves no part of one
                            peak.device.now += nbytes
            except (RuntimeError, TypeError) as error:  # a subclass, or without a storage
                if is_of_signal_handler(error):
                    raise
                peak = self._allocated_all(operator, (args, kwargs), out)
        elif operator.allocates or (is_tensor and out.layout is not _STRIDED):
            # A view of a sparse tensor may have other indices: a transpose does.
            peak = self._allocated_all(operator, (args, kwargs), out)
        if size is None or operator.workspace is not workspace:  # found in this call
            size = self._workspace(operator, args, kwargs, out)
        now = peak.device.now + size
        if now > peak.threshold:
            peak.note(now, func, self._blocks.allocations)
        return out

    def _operator(self, func: Any) -> _Operator:
        is_exact, as_on_cuda = self._blocks.rounding == 1, self.conventions.target == "cuda"
        return _Operator(func, is_exact=is_exact, as_on_cuda=as_on_cuda)

    def _note_difference(
        self, operator: _Operator, args: Any, kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Note where a run without the mode would take less memory, or another operator."""
        storage, is_latest = None, self._blocks.is_latest
        if operator.is_sum:
            storage = storage_of_product(args, kwargs, out, is_latest)
        if storage is None and self._phase == "backward":
            if operator.may_reuse:
                storage = reused_storage(operator.func, args, kwargs, out, is_latest)
            elif node := node_replacing(operator.func):
                self._memory.unseen.add(node)
        if storage is not None:
            self._blocks.reused(storage)

    def _meet_unknown(self, arguments: Any) -> None:
        """Note the storages among the arguments that no operator returned."""
        live = self._live
        for arg in arguments:
            cls = arg.__class__
            if cls is _Tensor or cls is _Parameter:
                try:
                    if id(arg.untyped_storage()) not in live:
                        self._meet(arg)
                except RuntimeError as error:  # sparse and opaque tensors have no own storage
                    if is_of_signal_handler(error):
                        raise
                    self._meet(arg)
            elif cls is list:
                if arg and arg[0].__class__ is not int:  # not a shape, nor dimensions
                    self._meet(arg)
            elif cls not in _WITHOUT_TENSORS:
                self._meet(arg)

    def _moved_to(self, made_in: ModulePhase | None, arguments: Any = ()) -> ModulePeak:
        """Return the peak of another module or phase, in which an operator was recorded.

        That another forward begins is known only now, when its first operator has run.
        """
        if made_in is None:  # the thread has recorded no operator yet, nor this one
            made_in = self.tracker.join_thread().recorded_in = self.tracker.here()
        if made_in.phase != self._phase:
            before, self._phase = self._phase, made_in.phase
            self._memory.changed_phase(before, self._phase)
            if self._phase == "forward":
                self._meet(arguments)
            is_on_meta = self._memory.device.device.type == "meta"
            if self._phase == "backward" and is_on_meta and not _MISH.isdisjoint(self._operators):
                self._memory.decomposed.add("aten.mish_backward.default")
        self._peak = peak = self._peak.device.module_peak(made_in)
        return peak

    def _dispatch_on_subclass(
        self, plan: Plan, types: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        self._has_subclasses = True
        return super()._dispatch_on_subclass(plan, types, args, kwargs)

    def _adapt(self, plan: Plan) -> Plan:
        plan = super()._adapt(plan)
        operator = self._operators.get(id(plan.func))
        if operator is None or not operator.is_reported:
            return plan
        reported = ReportedOperator(plan.func, plan.call, operator.workspace)
        runner = plan.calls.runner
        is_known = isinstance(runner, ReportedOperator) and runner.rule is reported.rule
        if not (plan.is_adapted or is_known):
            plan.calls.run_by(reported)
        return replace(plan, call=reported.run)

    def run_and_record(self, plan: Plan, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run and record a call that is not known, and find out whether its kernel allocates."""
        func, operator = plan.func, self._operators.get(id(plan.func))
        if (
            operator is None
            or not (operator.allocates or operator.is_in_place)
            or not is_to_be_found(func, operator.workspace, args)
        ):
            return super().run_and_record(plan, args, kwargs)
        reported = ReportedOperator(func, plan.call, OF_EACH_CALL)
        out = super().run_and_record(replace(plan, call=reported.run), args, kwargs)
        if note_workspace(func, args, last_kernel.workspace):
            operator.workspace, operator.is_reported = found_workspace_of(func), False
        elif last_kernel.take() is None and _torch.is_profiling():
            plan.calls.clear()  # a later call is to be new: the profiler may be off by then
        return out

    # -- calls of layers, and steps, that run without the mode; see ``UndispatchedMemory`` ---------

    def before_layer(self) -> tuple[int, int]:
        """Return the number of allocations, and of this thread's workspaces, so far."""
        return self._blocks.allocations, self._workspaces.number

    def of_layer(self, before: tuple[int, int], costs: Costs, output: Any) -> _LayerMemory | None:
        """Return what one operator allocated; None if there was more than that, or it may vary."""
        storages = storages_in(output)  # a sparse tensor has several, that of oneDNN none
        born, workspaces = (
            now - then for now, then in zip(self.before_layer(), before, strict=True)
        )
        block = self._live.get(id(storages[0][0])) if len(storages) == 1 else None
        if block is None or max(born, workspaces) > 1:
            return None
        names = {cost.op for cost, _ in costs}
        operators = list(self._operators.values())  # other threads may add some meanwhile
        changes = attrgetter("allocates" if born else "is_in_place")
        # One that takes no tensor makes an empty one, as batch norm's does.
        found = [known for known in operators if changes(known) and known.takes != "none"]
        found = [known for known in found if str(known.func) in names]
        if len(found) != 1:
            return None
        rule = found[0].workspace
        # Settings choose among these kernels, and others of them may have a workspace. On CUDA the
        # allocator is asked of all.
        is_chosen = found[0].is_reported and not (
            output.is_cuda and rule.may_be_unknown is not always
        )
        if not (workspaces or is_chosen):
            return _LayerMemory(found[0])
        size = self._workspaces.latest if workspaces else 0
        read_settings = settings_reader(on_cuda=output.is_cuda)
        settings = read_settings()
        if size is None or not rule.is_steady or settings is None:
            return None
        return _LayerMemory(found[0], size, settings, read_settings)

    def can_repeat_layer(self, noted: _LayerMemory) -> bool:
        """Return True if the kernel has the workspace that it had."""
        return noted.settings is None or noted.settings == noted.read_settings()

    def repeat_layer(
        self,
        noted: _LayerMemory,
        module_phase: ModulePhase,
        tensors: Sequence[Any],
        output: torch.Tensor,
    ) -> None:
        """Note that the operator has run once more, and returned this output."""
        if self._phase == "forward":
            self._meet_unknown(tensors)
        if module_phase is not self._peak.made_in:
            self._moved_to(module_phase, tensors)
        peak = self._allocating_on(output.device)
        self._blocks.allocated(output.untyped_storage(), peak)
        now = peak.device.now + noted.workspace
        if now > peak.threshold:
            peak.note(now, noted.operator.func, self._blocks.allocations)

    def before_step(self) -> tuple[tuple[int, int], dict[torch.device, int]]:
        """Return what ``before_layer`` does, and the bytes on each device."""
        devices = list(self._blocks.devices.items())
        return self.before_layer(), {device: found.now for device, found in devices}

    def of_step(self, before: tuple[tuple[int, int], dict[torch.device, int]]) -> Any:
        """Return the bytes before it; None if it had a workspace, or left what it allocated."""
        (allocations, workspaces), now = before
        blocks = list(self._live.values())  # other threads may add some meanwhile
        is_left = any(block.born > allocations for block in blocks)
        return None if is_left or self._workspaces.number != workspaces else now

    def repeat_step(self, noted: dict[torch.device, int], module_phase: ModulePhase) -> bool:
        """Begin a step that cannot reach a higher peak than the one that is noted did.

        It allocates as much, and releases it again. So it must not begin with more.
        """
        devices = list(self._blocks.devices.items())
        if any(device not in noted or found.now > noted[device] for device, found in devices):
            return False
        if module_phase is not self._peak.made_in:
            self._moved_to(module_phase)
        return True

    def _meet(self, arguments: Any) -> None:
        for tensor in tensors_in(arguments):
            # That of a module, perhaps: accelerate brings offloaded ones for each call.
            role: Role = "parameters" if isinstance(tensor, _Parameter) else "inputs"
            for storage, device in storages_of(tensor):
                self._memory.meet(storage, device, role)
            cls = tensor.__class__
            if (cls is _Tensor or cls is _Parameter) and tensor.requires_grad and tensor.is_leaf:
                self._memory.meet_gradient(tensor)

    def _allocated_all(self, operator: _Operator, arguments: Any, out: Any) -> ModulePeak:
        blocks, allocation = self._blocks, operator.allocation
        for storage, device in storages_in(out):
            blocks.allocated(storage, self._allocating_on(device))
            if allocation == "gathering":
                blocks.give_role(storage, "unsharded parameters")
        if allocation == "argument":
            for storage, device in storages_in((arguments, out)):
                blocks.resized(storage, self._allocating_on(device), operator.func)
        return self._peak

    def _allocating_on(self, device: torch.device) -> ModulePeak:
        """Return the peak of the running module on the device that results are allocated on now."""
        peak = self._peak
        if peak.device.device != device:
            self._memory.device = blocks = self._blocks.on(device)
            assert peak.made_in is not None
            self._peak = peak = blocks.module_peak(peak.made_in)
        return peak

    def _workspace_before(self, operator: _Operator, args: Any, kwargs: Any) -> int | None:
        """Return what the kernel of a call will allocate for itself; None if that is not known.

        Then the allocator is asked, where it reports: from the first such call on. On CUDA it goes
        before the formulas.
        """
        size: int | None = None
        rule = operator.workspace
        if not (rule.reads_result or (_IS_CUDA_BUILT and is_on_cuda(args))):
            try:
                size = rule.formula(*args, **kwargs) if kwargs else rule.formula(*args)
            except Exception as error:  # a tensor without strides
                if is_of_signal_handler(error):
                    raise
                size = None
        if size:
            size = self._blocks.rounded_up(size)
            self._workspaces.note(size)
        if size is not None:
            return size
        if not operator.is_reported:
            operator.is_reported = True
            self._plans.pop(id(operator.func), None)  # to be adapted again
        return None

    def _workspace(self, operator: _Operator, args: Any, kwargs: Any, out: Any) -> int:
        """Return the bytes that the kernel allocated for itself while it ran."""
        rule = operator.workspace
        # What ``take`` does: it is not the workspace of an operator around this one.
        size, last_kernel.workspace = last_kernel.workspace, None
        reported = size
        if size == 0 and rule.is_steady:
            return 0
        if rule.reads_result:
            try:
                size = rule.after_call(operator.func, args, kwargs, out)
            except Exception as error:  # a workspace of the user's own
                if is_of_signal_handler(error):
                    raise
                self._memory.workspace_failed(operator.func, error)
                size = None
            size = reported if size is None else size
        rounded = None if size is None else self._blocks.rounded_up(size)
        self._workspaces.note(rounded)
        if rounded is None and not self._is_decomposed(operator):
            self._memory.unseen.add(str(operator.func))
        return rounded or 0

    def _is_decomposed(self, operator: _Operator) -> bool:
        """Return True for a composite operator whose parts are followed in its place."""
        plan = self._plans.get(id(operator.func))
        return plan is not None and plan.strategy is decompose
