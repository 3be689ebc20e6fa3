"""Attribute operators to a module and a phase.

In forward, global forward hooks keep a stack of module calls per thread. ``OperatorLocator``
attributes what runs elsewhere.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dispatch_flops import _torch
from dispatch_flops.counting.call_stack import (
    drop_calls_after_hooks,
    drop_ended_calls,
    drop_raised_steps,
    pop_call,
    resume,
)
from dispatch_flops.counting.checkpoints import (
    CheckpointCallers,
    recomputing_frame,
)
from dispatch_flops.counting.communication_causes import is_in_pipeline_setup
from dispatch_flops.counting.expert_tokens import count_tokens
from dispatch_flops.counting.first_call import autocast_of, call_facts
from dispatch_flops.counting.known_layers import (
    LAYERS,
    KnownLayers,
    begin_layer,
    end_layer,
)
from dispatch_flops.counting.known_steps import KnownSteps, end_step
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tree import ModuleName
from dispatch_flops.counting.node_owners import NodeOwners
from dispatch_flops.counting.observers import ModuleObserver, together
from dispatch_flops.counting.operator_locator import OperatorLocator
from dispatch_flops.counting.optimizer_names import OptimizerNames
from dispatch_flops.counting.output_shapes import Shapes, shapes_of
from dispatch_flops.counting.python_frames import (
    call_arguments,
    calling_frame,
)
from dispatch_flops.counting.thread_state import (
    NO_TASK,
    KnownModule,
    ModulePhase,
    OpenCall,
    ThreadState,
)
from dispatch_flops.counting.undispatched import UndispatchedMemory, note_costs
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.counting.wrappers import wrapping_attribute
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

_sequence_nr = _torch.sequence_nr
_saved_tensors_hooks = _torch.saved_tensors_hooks
_current_node = _torch.current_node
_graph_task = _torch.graph_task_id
_is_grad_enabled = torch.is_grad_enabled
_is_tracing = torch.compiler.is_dynamo_compiling


class Tracker:
    """Follows modules, backward passes and optimizers from ``start`` on.

    observers: are told of each module call and optimizer step.
    is_mode_on: says whether a dispatch mode sees the operators of the calling thread. Without a
        mode only threads that joined are followed.
    layers, steps: tell which calls of layers, and steps of optimizers, need not be dispatched;
        None: all are.
    home_thread: ident of the thread that called ``start``.
    has_missed: operators may have passed unseen, as what runs without the mode was broken off.
    first_call: the facts of the first call of a root, as ``call_facts`` returns them.
    """

    def __init__(
        self,
        names: ModuleNames,
        observers: Sequence[ModuleObserver] = (),
        is_mode_on: Callable[[], bool] = lambda: False,
        layers: KnownLayers | None = None,
        steps: KnownSteps | None = None,
    ) -> None:
        self.names = names
        self._layers, self._steps = layers, steps
        self.has_missed = False
        self.home_thread = threading.get_ident()
        self.first_call: dict[str, Any] | None = None
        # The model of that call, until its first submodule is called.
        self._first_model: weakref.ref[nn.Module] | None = None
        self.subgraph_depth = 0  # functions of higher-order operators that are running
        self.local = threading.local()
        self._observer = together(observers)
        self._is_mode_on = is_mode_on
        self._threads: list[ThreadState] = []
        self._owners = NodeOwners(names, self._threads)
        self._checkpoints = CheckpointCallers()
        self.locator = OperatorLocator(names, self._owners, self._checkpoints)
        self._optimizers = OptimizerNames(names)

    def start(self, undo: UndoStack) -> None:
        """Install the hooks until ``undo`` runs; follow the backward passes of this thread."""
        home = self._owners.home = self.join_thread(is_entered=True)
        if _torch.PIPELINES in sys.modules:
            home.current = None
        self.home_thread = threading.get_ident()
        drop_ended_calls(home)
        undo.add(partial(self._end_undispatched, is_closing=True))
        hooks = (
            self.enter_module, self.leave_module, self.enter_optimizer, self.leave_optimizer
        )  # fmt: skip
        undo.add(lambda: _torch.remove_global_hooks(*hooks))
        register_module_forward_pre_hook(self.enter_module)
        register_module_forward_hook(self.leave_module, always_call=True)
        register_optimizer_step_pre_hook(self.enter_optimizer)
        register_optimizer_step_post_hook(self.leave_optimizer)

    def follow_memory(self, memory: UndispatchedMemory) -> None:
        """Have ``memory`` told of calls of layers, and of steps, that run without the mode."""
        for runs in (self._layers, self._steps):
            if runs is not None:
                runs.memory = memory

    def join_thread(self, *, is_entered: bool = False) -> ThreadState:
        """Return the state of this thread, whose modules are followed from now on."""
        thread: ThreadState | None = getattr(self.local, "thread", None)
        if thread is None:
            thread = getattr(self.local, "left", None)
            if thread is None:
                thread = ThreadState(_sequence_nr(), is_entered=is_entered)
                self._threads.append(thread)
                self.names.remembered_in.append(thread.known_modules)
            self.local.thread = thread
        return thread

    def leave_thread(self) -> None:
        """Stop following this thread's modules, unless it joins again."""
        self._end_undispatched(is_closing=True)
        self.local.left = self.local.__dict__.pop("thread", None)

    def end(self) -> None:
        """Let go of the optimizers: nothing is told of their release from now on."""
        self._optimizers.forget()
        if self._steps is not None:
            self._steps.forget()

    # -- what was collected in all threads ----------------------------------------------------

    def module_phases(self) -> list[ModulePhase]:
        """Return every module and phase in which an operator may have been recorded."""
        return [found for thread in self._threads for found in list(thread.module_phases.values())]

    def tokens(self) -> Counter[str]:
        """Return ``{fqn: rows that entered}`` of a mixture's experts that were called."""
        rows: Counter[str] = Counter()
        for thread in self._threads:
            rows.update(thread.tokens.copy())
        return rows

    def output_shapes(self) -> dict[str, Shapes]:
        """Return ``{fqn: shapes of what its first call returned}``."""
        found: dict[str, Shapes] = {}
        for thread in reversed(self._threads):
            found.update(thread.output_shapes.copy())
        return found

    def used_params(self) -> set[int]:
        """Return the ids of parameters that took part in an operator other than an optimizer's."""
        return set().union(*(thread.used_params for thread in self._threads))

    # -- where an operator belongs ------------------------------------------------------------

    def here(self, args: Any = ()) -> ModulePhase:
        """Return the module and phase of what this thread runs now, on the arguments ``args``."""
        thread, task = self.join_thread(), _graph_task()
        if task != NO_TASK:
            return self.locator.locate_in_backward(thread, task)
        return thread.current or self.locator.locate(thread, args)

    # -- hooks --------------------------------------------------------------------------------

    def thread(self) -> ThreadState | None:
        """Return this thread's state, or None where the thread is not followed."""
        thread: ThreadState | None = getattr(self.local, "thread", None)
        if thread is None and self._is_mode_on():  # autograd's device threads inherit the mode
            return self.join_thread()
        return thread

    def enter_module(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook: the call of ``module`` starts."""
        if _is_tracing():  # torch.cond traces modules, and the hooks with them
            return
        try:  # ``self.thread()`` takes longer
            thread: ThreadState | None = self.local.thread
        except AttributeError:
            thread = self.thread()
        if thread is None:
            return
        observer = self._observer
        stamp = None if observer is None else observer.entering()
        if thread.undispatched is not None:
            self._end_undispatched()
        known = thread.known_modules.get(id(module))
        if (
            known is None
            or known.module() is not module
            or thread.current is None
            or _graph_task() != NO_TASK
            or _saved_tensors_hooks(True) is not None
        ):
            if not self._enter(thread, module, args):
                return
        else:
            known.module_phase.entered += 1
            if known.is_layer:
                if self._enter_layer(thread, known, module, args):
                    return
            else:
                module_phase = known.module_phase
                thread.stack.append(OpenCall(known.named, module, module_phase, NO_TASK, True))
                thread.current = module_phase
                thread.mark(_sequence_nr(), module_phase.fqn)
        if observer is not None:
            observer.enter(thread, stamp)

    def _enter(self, thread: ThreadState, module: nn.Module, args: Any) -> bool:
        """Begin a call of a module; return True if observers are to be told of it."""
        stack = thread.stack
        if stack[-1].is_in_hooks:
            drop_calls_after_hooks(thread, module)
        thread.param_sink = thread.used_params
        named = self.names.find_unshared(module)
        if named is None:
            if isinstance(module, torch.fx.GraphModule) and (
                self.subgraph_depth or not self._is_mode_on()
            ):
                return False
            callers = [call.named for call in stack if call.named]
            named = self.names.find(module, callers or self.locator.callers_in_backward(thread))
        if named.parent is None:
            if self.first_call is None:
                self._note_first_call(module, named)
            if len(stack) > 1:
                drop_ended_calls(thread, module)
        elif self._first_model is not None:
            self._note_autocast_of_forward(self._first_model(), stack)
        if len(stack) == 1:
            thread.is_in_setup = is_in_pipeline_setup()
            if thread.is_in_setup:
                thread.known_modules.clear()
        task = _graph_task()
        if task == NO_TASK:
            module_phase = thread.module_phase(named.fqn, "forward")
            if thread.is_after_backward:
                self._note_forward(thread)
        else:
            module_phase = thread.module_phase(named.fqn, self._phase_in_backward(named.fqn))
            thread.recompute_task = task
        if wrapping_attribute(module) is None:
            module_phase.entered += 1
        hooks = _saved_tensors_hooks(True)
        if hooks is not None:
            caller = stack[-1].module_phase
            self._checkpoints.note(hooks, caller.fqn if caller is not None else OUTSIDE)
        elif (
            module.__class__ in LAYERS
            and task == NO_TASK
            and thread.current is not None
            and self._layers is not None
            and _is_ordinary(thread, named)
        ):
            known = KnownModule(
                _reference_to(module, named), named, module_phase, is_layer=True, is_new=True
            )
            return not self._enter_layer(thread, known, module, args)
        stack.append(OpenCall(named, module, module_phase, task))
        thread.current = module_phase
        thread.mark(_sequence_nr(), named.fqn)
        return True

    def _enter_layer(
        self, thread: ThreadState, known: KnownModule, module: nn.Module, args: Any
    ) -> bool:
        """Begin a call of a layer; return True if it runs without the mode."""
        assert self._layers is not None
        call = self._layers.find(thread, known, module, args)
        if call is not None and call.costs:
            begin_layer(thread, known, call)
            return True
        module_phase = known.module_phase
        opened = OpenCall(known.named, module, module_phase, NO_TASK, not known.is_new)
        if call is not None:
            opened.new_call = call
            note_costs(opened)
            if self._layers.memory is not None:
                opened.memory_before = self._layers.memory.before_layer()
        thread.stack.append(opened)
        thread.current = module_phase
        thread.mark(_sequence_nr(), module_phase.fqn)
        return False

    def _note_memory(self, known: KnownModule, module: nn.Module, args: Any, output: Any) -> None:
        """Note the memory of a call of a layer that ran without the mode."""
        assert self._layers is not None and self._layers.memory is not None
        assert known.layer_call is not None
        self._layers.memory.repeat_layer(
            known.layer_call.memory,
            known.module_phase,
            (*args, *module._parameters.values(), *module._buffers.values()),
            output,
        )

    def _end_undispatched(self, *, is_closing: bool = False) -> None:
        """Let the mode in again where an error ended what ran without it in this thread.

        What has run since was not seen, unless the error is on its way out of the block.
        """
        thread: ThreadState | None = getattr(self.local, "thread", None)
        if thread is not None and thread.undispatched is not None:
            thread.undispatched = None
            if not (is_closing and sys.exc_info()[0]):
                self.has_missed = True

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook: the call of ``module`` has returned or raised."""
        if _is_tracing():
            return
        try:  # ``self.thread()`` takes longer
            thread: ThreadState | None = self.local.thread
        except AttributeError:
            thread = self.thread()
        if thread is None:
            return
        observer = self._observer
        stamp = None if observer is None else observer.leaving()
        if thread.undispatched is not None:
            known, start, keeping_out = thread.undispatched
            if known.__class__ is KnownModule and known.module() is module:
                thread.undispatched = None
                del keeping_out  # the mode sees what runs from now on
                end_layer(thread, known, start, returned=output is not None)
                if observer is not None and output is not None:
                    self._note_memory(known, module, args, output)
                return
            del keeping_out
            self._end_undispatched()
        stack = thread.stack
        if stack[-1].is_in_hooks:
            drop_calls_after_hooks(thread)
        call = stack[-1]
        if call.owner is module and not call.is_in_hooks:
            if self._layers is not None and call.new_call is not None and output is not None:
                self._layers.keep(call, output)
            if not call.is_known:
                self._note_return(thread, call, args, output)
            if getattr(module, "_forward_hooks", None):  # they run next, and belong to the module
                call.is_in_hooks = True
                thread.current = None
            else:
                stack.pop()
                above = stack[-1]
                if above.named is None or above.module_phase is None or above.is_in_hooks:
                    resume(thread, _sequence_nr())
                else:  # the common case of ``resume``, written out
                    thread.current = above.module_phase
                    thread.mark(_sequence_nr(), above.module_phase.fqn)
        elif any(call.owner is module for call in stack):
            call = pop_call(stack, module)
            resume(thread, _sequence_nr())
        else:
            return  # entered before the block
        if observer is not None:
            observer.leave(thread, call, stamp)

    def _note_return(self, thread: ThreadState, call: OpenCall, args: Any, output: Any) -> None:
        """Note what a module returned; if a later call need not, note that the module is known."""
        named = call.named
        if named is None:
            return
        fqn = named.fqn
        if output is not None and fqn not in thread.output_shapes:
            thread.output_shapes[fqn] = shapes_of(output)
        if named.is_expert:
            count_tokens(thread, call, args, output)
        elif fqn in thread.output_shapes and call.task == NO_TASK and _is_ordinary(thread, named):
            # Not that of the call, which a formula of the module's class replaces.
            module_phase = thread.module_phase(fqn, "forward")
            is_layer = self._layers is not None and call.owner.__class__ in LAYERS
            thread.known_modules[id(call.owner)] = KnownModule(
                _reference_to(call.owner, named), named, module_phase, is_layer
            )

    def enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer step pre-hook."""
        thread = self.thread()
        if thread is None:
            return
        observer = self._observer
        stamp = None if observer is None else observer.entering()
        self._end_undispatched()
        drop_calls_after_hooks(thread)
        fqn = self._optimizers.fqn_of(optimizer)
        # A step that raises runs no post-hook: it is over once its frame has returned.
        step = calling_frame("enter_optimizer")
        drop_raised_steps(thread, step)
        has_closure = any(callable(arg) for arg in (*args[1:], *kwargs.values()))
        module_phase = thread.module_phase(fqn, "optimizer")
        call = OpenCall(
            None, optimizer, module_phase, _graph_task(), step=step, has_closure=has_closure
        )
        thread.stack.append(call)
        resume(thread, _sequence_nr())
        if observer is not None:
            observer.enter(thread, stamp)
        if self._steps is not None:
            known = self._steps.find(optimizer, args, kwargs)
            if known is not None:
                self._steps.begin(thread, call, known)

    def leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer step post-hook; it does not run for a step that raised."""
        thread = self.thread()
        if thread is None or not any(call.owner is optimizer for call in thread.stack):
            return
        observer = self._observer
        stamp = None if observer is None else observer.leaving()
        call = pop_call(thread.stack, optimizer)
        if call.known_step is not None:
            if thread.undispatched is not None and thread.undispatched[0] is call:
                end_step(thread, call)
        elif self._steps is not None and call.new_call is not None:
            self._steps.keep(call)
        thread.gradients, thread.is_on_gradients = frozenset(), False
        resume(thread, _sequence_nr())
        if observer is not None:
            observer.leave(thread, call, stamp)

    def enter_operator(
        self, operator: Any, parts: ModulePhase, *, has_closure: bool = False
    ) -> None:
        """Record what this thread runs in ``parts`` until ``leave_operator``.

        has_closure: it is an optimizer's step, whose closure runs the model.
        """
        thread = self.join_thread()
        call = OpenCall(None, operator, parts, _graph_task(), has_closure=has_closure)
        thread.stack.append(call)
        thread.current = None if has_closure else parts

    def leave_operator(self, operator: Any) -> None:
        """End what ``enter_operator`` began."""
        thread = self.join_thread()
        if any(call.owner is operator for call in thread.stack):
            pop_call(thread.stack, operator)
        resume(thread, _sequence_nr())

    def _note_first_call(self, module: nn.Module, named: ModuleName) -> None:
        if not named.is_wrapper and not named.fqn.startswith(OUTSIDE):
            arguments = call_arguments(module)
            self.first_call = call_facts(module, module.forward, arguments)
            self._first_model = weakref.ref(module)

    def _note_autocast_of_forward(self, model: nn.Module | None, stack: Sequence[OpenCall]) -> None:
        """Note the autocast that the model's forward has entered, as accelerate's has."""
        self._first_model = None
        if model is None or self.first_call is None:
            return
        if any(call.owner is model for call in stack):
            self.first_call["autocast"] = autocast_of(model, self.first_call["inputs"])

    def _phase_in_backward(self, fqn: str) -> Phase:
        """Return the phase of a module whose forward runs in a backward pass.

        A module that ran before is recomputed; a hook may run one for the first time.
        """
        ran = any((fqn, "forward") in thread.module_phases for thread in self._threads)
        return "recompute" if ran or recomputing_frame() is not None else "backward"

    def _note_forward(self, thread: ThreadState) -> None:
        thread.is_after_backward = False
        thread.param_sink = thread.used_params
        for other in self._threads:
            if not other.is_entered:
                other.recompute_task = NO_TASK


def _reference_to(module: nn.Module, named: ModuleName) -> weakref.ref[nn.Module]:
    """Return a reference to a module, whose name may by now be that of one that took its place."""
    return named.module if named.module() is module else weakref.ref(module)


def _is_ordinary(thread: ThreadState, named: ModuleName) -> bool:
    """Return True for a module of which each call is recorded in the same place, and that alone."""
    return named.parent is not None and not (
        named.is_shared or named.is_wrapper or named.is_expert or thread.is_in_setup
    )
