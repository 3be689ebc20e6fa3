"""Whose work is it: the module and the phase of the operator that runs now.

Forward: a stack of modules per thread, kept by global forward
hooks. Backward: when an operator of the forward pass reaches the mode, its autograd node has
its sequence number already, so a timeline "from sequence number s on, module m was at work"
says for every backward node which module made it. No tensor or gradient hook is needed, and
nothing is written on the user's modules.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FrameType
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
from dispatch_flops.counting.checkpoints import held_by_checkpoint, rerun_by_checkpoint
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.python_frames import (
    caller_of,
    first_over,
    is_over,
    maker_by_parameters,
    part_of_torch,
)
from dispatch_flops.counting.thread_state import (
    ACCUMULATION,
    AFTER_BACKWARD,
    AMBIGUOUS,
    NO_TASK,
    UNATTRIBUTED,
    Frame,
    ModulePhase,
    Thread,
)
from dispatch_flops.operators.tensors import tensors_in, untraced
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

_sequence_nr = _torch.sequence_nr
_saved_tensors_hooks = _torch.saved_tensors_hooks
_current_node = _torch.current_node
_graph_task = _torch.graph_task_id
_grad_enabled = torch.is_grad_enabled
_is_tracing = torch.compiler.is_dynamo_compiling


class Tracker:
    """Follows modules, backward passes and optimizers from ``start`` to ``stop``.

    is_mode_on: set by who owns the mode; says whether it sees the calling thread's operators.
    """

    def __init__(self, names: ModuleNames) -> None:
        self.names = names
        self.in_bodies = 0  # higher-order operators' functions at work: their graphs are no modules
        self.is_mode_on: Callable[[], bool] = lambda: True
        self.local = threading.local()
        self._threads: list[Thread] = []
        self._home: Thread | None = None
        # For each checkpointed function that calls modules: who called it.
        self._checkpoints: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._owners: dict[int, str] | None = None
        self._hooks = ExitStack()

    def start(self) -> None:
        """Install the hooks; this thread becomes the one whose backward passes are followed."""
        self._home = self.join_thread(entered=True)
        self._drop_calls_over(self._home)
        for handle in (
            register_module_forward_pre_hook(self.enter_module),
            register_module_forward_hook(self.leave_module, always_call=True),
            register_optimizer_step_pre_hook(self.enter_optimizer),
            register_optimizer_step_post_hook(self.leave_optimizer),
        ):
            self._hooks.callback(handle.remove)

    def stop(self) -> None:
        """Remove the hooks; what was collected stays."""
        self._hooks.close()

    def join_thread(self, *, entered: bool = False) -> Thread:
        """This thread's state; from now on its modules are followed."""
        thread: Thread | None = getattr(self.local, "thread", None)
        if thread is None:
            thread = getattr(self.local, "left", None)
            if thread is None:
                thread = Thread(_sequence_nr(), entered=entered)
                self._threads.append(thread)
            self.local.thread = thread
        return thread

    def leave_thread(self) -> None:
        """This thread's modules are followed no more, unless it joins again."""
        self.local.left = self.local.__dict__.pop("thread", None)

    # -- what was collected, of all threads ---------------------------------------------------

    def places(self) -> list[ModulePhase]:
        return [place for thread in self._threads for place in list(thread.places.values())]

    def calls(self) -> Counter[str]:
        """``{fqn: times its forward ran}``."""
        return sum((Counter(thread.calls.copy()) for thread in self._threads), start=Counter())

    def tokens(self) -> dict[str, int]:
        """``{fqn: rows that entered}`` of a mixture's experts; 0 for those not called."""
        rows: Counter[str] = Counter()
        for thread in self._threads:
            rows.update(thread.tokens.copy())
        calls = self.calls()
        return {fqn: rows[fqn] for fqn in self.names.experts() if fqn in rows or not calls[fqn]}

    def used_params(self) -> set[int]:
        """Ids of the parameters that took part in an operator, optimizers' work aside."""
        return set().union(*(thread.used_params for thread in self._threads))

    # -- where an operator belongs ------------------------------------------------------------

    def here(self) -> ModulePhase:
        """The place of what this thread runs now."""
        thread, task = self.join_thread(), _graph_task()
        if task == NO_TASK and thread.current is not None:
            return thread.current
        return self.locate(thread, task)

    def locate(self, thread: Thread, task: int) -> ModulePhase:
        """The place, and with it the phase, of the operator that runs now, in graph task ``task``
        (-1: none). In a module's forward ``enter_module`` has said it already.
        """
        if task == NO_TASK:
            return self._locate_outside_backward(thread)
        frame = thread.stack[-1]
        if frame.task == task and frame.place is not None:
            return frame.place
        self._note_backward(thread)
        # A backward pass that a module runs while it is itself run again is run again, too.
        phase: Phase = "backward"
        if frame.place is not None and frame.named is not None and frame.task != NO_TASK:
            phase = frame.place.phase
        node = _current_node()
        if node is None:
            return thread.place(frame.named.fqn if frame.named else OUTSIDE, phase)
        fqn = self._maker_of(node, thread, task)
        if fqn is UNATTRIBUTED:
            fqn = self._maker_by_parameters(node)
        rerun = self._rerun(node)
        if rerun is not None:
            fqn, phase = self._caller_of(rerun, fqn, task), "recompute"
        if _grad_enabled():
            # With create_graph, and in a function that is run again, new nodes come into being:
            # they belong where the node at work belongs.
            thread.made_graph_in_backward = thread.made_graph_in_backward or rerun is None
            thread.mark(thread.last_seq, fqn)
        return thread.place(fqn, phase)

    def _maker_of(self, node: Any, thread: Thread, task: int) -> str:
        """The module in whose forward a backward node was made.

        On CPU, backward runs in the thread that asked for it. On other devices it runs in a
        thread of autograd's own, on nodes of the thread that ran forward; that thread makes
        nodes itself only where it runs a checkpointed function again (then the backward nested
        in it, a later graph task, works on those) or with create_graph.
        """
        seq = node._sequence_nr()
        if seq >> 63:  # AccumulateGrad has no sequence number of its own
            return ACCUMULATION
        if len(self._threads) == 1:
            return thread.owner_of(seq)
        if thread.made(seq) and (thread.entered or NO_TASK < thread.recompute_task < task):
            return thread.owner_of(seq)
        others = [other for other in self._threads if other is not thread and other.made(seq)]
        if not others or (thread.made(seq) and thread.made_graph_in_backward):
            return AMBIGUOUS if others else thread.owner_of(seq)
        home = self._home
        return (home if home in others else others[0]).owner_of(seq)

    def _maker_by_parameters(self, node: Any) -> str:
        if self._owners is None:
            self._owners = self.names.owners_of_parameters()
        fqn = maker_by_parameters(node, self._owners)
        return fqn if fqn is not None and fqn in self.names.nodes else UNATTRIBUTED

    def _note_backward(self, thread: Thread) -> None:
        if not thread.entered and self._home is not None:
            thread = self._home
        if thread.current is not None:
            thread.current = None
            if len(thread.stack) == 1:
                thread.after_backward = True
                thread.param_sink = thread.discarded_params

    def _locate_outside_backward(self, thread: Thread) -> ModulePhase:
        """An operator in no backward pass: the first after one, or one of an optimizer."""
        self._drop_steps_over(thread)
        frame = thread.stack[-1]
        self._resume(thread, thread.last_seq)
        if frame.closure and _grad_enabled():  # steps run without gradients, their closures with
            thread.mark(thread.last_seq, OUTSIDE)
            return thread.place(OUTSIDE, "forward")
        if frame.place is not None:
            return frame.place
        if thread.after_backward:
            part = part_of_torch()
            if part is not None or not _grad_enabled():
                return thread.place(part or AFTER_BACKWARD, "optimizer")
        return thread.place(OUTSIDE, "forward")

    def _drop_calls_over(self, thread: Thread, entering: nn.Module | None = None) -> None:
        """Calls that ended while nobody followed them, or in an exception that skips hooks."""
        calls = [frame for frame in thread.stack if frame.named is not None]
        over = first_over((frame.owner for frame in calls), entering) if calls else None
        if over is not None:
            del thread.stack[thread.stack.index(calls[over]) :]
            self._resume(thread, _sequence_nr())

    def _drop_steps_over(self, thread: Thread, entering: int = 0) -> None:
        """Steps that have raised told nobody that they are over.

        entering: the step that now begins; an older one has the same id only if it is over.
        """
        while (step := thread.stack[-1].step) and (step == entering or is_over(step)):
            thread.stack.pop()

    def _resume(self, thread: Thread, seq: int) -> None:
        """What is on top of the stack is at work from sequence number ``seq`` on."""
        frame = thread.stack[-1]
        if frame.place is None:
            thread.mark(seq, OUTSIDE)
            thread.current = None if thread.after_backward else thread.place(OUTSIDE, "forward")
        else:
            thread.mark(seq, frame.place.fqn)
            thread.current = None if frame.step else frame.place
        quiet = frame.step or (frame.place is None and thread.after_backward)
        thread.param_sink = thread.discarded_params if quiet else thread.used_params

    def _rerun(self, node: Any) -> FrameType | None:
        """As ``rerun_by_checkpoint``; its walk is spared where nothing can be run again.

        While a function is, torch.utils.checkpoint has hooks on saved tensors, or its own node is
        at work.
        """
        if node.__class__.__name__ == "CheckpointFunctionBackward" or _saved_tensors_hooks(True):
            return rerun_by_checkpoint()
        return None

    def _caller_of(self, rerun: FrameType, maker: str, task: int) -> str:
        """Who called the function that ``torch.utils.checkpoint`` runs again in that frame.

        maker: who made the node at work; it is the answer for a backward pass that is part of
        that function.
        """
        function, group = rerun.f_locals.get("frame"), rerun.f_locals.get("gid")
        if function is None or (isinstance(group, int) and group != task):
            return maker
        return self._checkpoints.get(function, maker)

    # -- hooks --------------------------------------------------------------------------------

    def thread(self) -> Thread | None:
        """This thread's state, or None where the mode does not see this thread's operators."""
        thread: Thread | None = getattr(self.local, "thread", None)
        if thread is None and self.is_mode_on():  # autograd's device threads inherit the mode
            return self.join_thread()
        return thread

    def enter_module(self, module: nn.Module, args: Any) -> None:
        if _is_tracing():  # torch.cond traces modules, and the hooks with them
            return
        thread = self.thread()
        if thread is None:
            return
        stack = thread.stack
        if stack[-1].step:
            thread.param_sink = thread.used_params
        named = self.names.known(module)
        if named is None:
            if isinstance(module, torch.fx.GraphModule) and (
                self.in_bodies or not self.is_mode_on()
            ):
                return
            named = self.names.find(module, [frame.named for frame in stack if frame.named])
        if named.parent is None and len(stack) > 1:
            self._drop_calls_over(thread, module)
        task = _graph_task()
        if task == NO_TASK:
            place = thread.place(named.fqn, "forward")
            if thread.after_backward:
                self._note_forward(thread)
        else:
            place = thread.place(named.fqn, self._phase_in_backward(named.fqn))
            thread.recompute_task = task
        if place.phase != "recompute" and not named.wrapper:
            thread.calls[named.fqn] += 1
        hooks = _saved_tensors_hooks(True)
        if hooks is not None:
            self._note_checkpoint(hooks, stack[-1])
        stack.append(Frame(named, module, place, task))
        thread.current = place
        thread.mark(_sequence_nr(), named.fqn)

    def _phase_in_backward(self, fqn: str) -> Phase:
        """Of a module whose forward runs in a backward pass: again, or (in a hook) for the first
        time.
        """
        ran = any((fqn, "forward") in thread.places for thread in self._threads)
        return "recompute" if ran or rerun_by_checkpoint() is not None else "backward"

    def _note_forward(self, thread: Thread) -> None:
        thread.after_backward = False
        thread.param_sink = thread.used_params
        for other in self._threads:
            if not other.entered:
                other.recompute_task = NO_TASK

    def _note_checkpoint(self, hooks: Any, caller: Frame) -> None:
        held = held_by_checkpoint(hooks, "_checkpoint_hook")
        if held is not None and "frame" in held:
            fqn = caller.place.fqn if caller.place is not None else OUTSIDE
            self._checkpoints.setdefault(held["frame"], fqn)

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if _is_tracing():
            return
        thread = self.thread()
        if thread is None:
            return
        stack = thread.stack
        if stack[-1].owner is module:
            left = stack.pop()
            if left.named is not None and left.named.expert:
                _note_tokens(thread, left, args, output)
            frame = stack[-1]
            if frame.named is not None and frame.place is not None:  # most calls, so at once
                thread.current = frame.place
                thread.mark(_sequence_nr(), frame.place.fqn)
                return
        elif any(frame.owner is module for frame in stack):
            while stack.pop().owner is not module:
                pass
        else:
            return  # entered before the block
        self._resume(thread, _sequence_nr())

    def enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        thread = self.thread()
        if thread is not None:
            place = thread.place(f"{OUTSIDE}.{type(optimizer).__name__}", "optimizer")
            step = id(caller_of("enter_optimizer"))
            self._drop_steps_over(thread, step)
            closure = any(callable(arg) for arg in (*args[1:], *kwargs.values()))
            thread.stack.append(Frame(None, optimizer, place, _graph_task(), step, closure))
            self._resume(thread, _sequence_nr())

    def in_closure_step(self) -> bool:
        """True if this thread is in a step whose optimizer was given a function to call."""
        thread = self.thread()
        return thread is not None and thread.stack[-1].closure

    def steps_open(self) -> int:
        """How many optimizer steps this thread is in, one within another."""
        thread = self.thread()
        return 0 if thread is None else sum(frame.step != 0 for frame in thread.stack)

    def leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        thread = self.thread()
        if thread is not None and any(frame.owner is optimizer for frame in thread.stack):
            while thread.stack.pop().owner is not optimizer:
                pass
            self._resume(thread, _sequence_nr())


def _note_tokens(thread: Thread, expert: Frame, args: Any, output: Any) -> None:
    """Count the rows that entered an expert: of what it was called with or, as hooks are not told
    of keyword arguments, of what came out.
    """
    if expert.named is None or expert.named.wrapper:
        return
    if expert.place is not None and expert.place.phase != "recompute":
        with untraced():
            rows = _rows((*args, *tensors_in(output)))
        if type(rows) is int:  # under torch.export a symbol
            thread.tokens[expert.named.fqn] += rows


def _rows(values: Iterable[Any]) -> int | None:
    """Rows of the first tensor among these: all its dimensions but the last; None without one."""
    for value in values:
        if isinstance(value, torch.Tensor) and not value.is_nested:
            return math.prod(value.shape[:-1])
    return None
