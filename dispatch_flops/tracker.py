"""Whose work is it: the module and the phase of the operator that runs now.

Owns every hook of the package. Forward: a stack of modules per thread, kept by global forward
hooks. Backward: when an operator of the forward pass reaches the mode, its autograd node has
its sequence number already, so a timeline "from sequence number s on, module m was at work"
says for every backward node which module made it. No tensor or gradient hook is needed, and
nothing is written on the user's modules.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
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

from dispatch_flops.cost import Phase
from dispatch_flops.names import ModuleNames, Named
from dispatch_flops.tree import OUTSIDE

_sequence_nr = torch._C._autograd._get_sequence_nr
_current_node = torch._C._current_autograd_node
_graph_task = torch._C._current_graph_task_id
_grad_enabled = torch.is_grad_enabled
_NO_TASK = -1

ACCUMULATION = f"{OUTSIDE}.gradient accumulation"
AFTER_BACKWARD = f"{OUTSIDE}.after backward"
UNATTRIBUTED = f"{OUTSIDE}.backward of a forward outside the block"


class Place:
    """A module (or a named part of the outside) in a phase, and what ran there.

    counts: calls by the collector's own keys; the tracker never looks inside.
    seconds: time by the same keys, where it is measured.
    """

    __slots__ = ("counts", "fqn", "phase", "seconds")

    def __init__(self, fqn: str, phase: Phase) -> None:
        self.fqn = fqn
        self.phase = phase
        self.counts: defaultdict[Any, int] = defaultdict(int)
        self.seconds: defaultdict[Any, float] = defaultdict(float)


class Frame:
    """One entry of the module stack.

    task: the graph task (backward pass) in which the module was entered; -1 for none.
    """

    __slots__ = ("named", "owner", "place", "task")

    def __init__(self, named: Named | None, owner: Any, place: Place | None, task: int) -> None:
        self.named = named
        self.owner = owner
        self.place = place
        self.task = task


class _Thread:
    """What is known of one thread: sequence numbers and stacks are per thread."""

    def __init__(self, start: int) -> None:
        self.stack: list[Frame] = [Frame(None, None, None, _NO_TASK)]
        self.places: dict[tuple[str, Phase], Place] = {}
        self.seqs: list[int] = [-1, start]
        self.fqns: list[str] = [UNATTRIBUTED, OUTSIDE]
        self.last_seq = start
        self.after_backward = False
        self.recompute_task = _NO_TASK
        # The place of the innermost module; None where an operator has to be located first.
        self.current: Place | None = self.place(OUTSIDE, "forward")

    def place(self, fqn: str, phase: Phase) -> Place:
        place = self.places.get((fqn, phase))
        if place is None:
            place = self.places[fqn, phase] = Place(fqn, phase)
        return place

    def mark(self, seq: int, fqn: str) -> None:
        """From sequence number ``seq`` on, autograd nodes are of ``fqn``."""
        if self.fqns[-1] == fqn:
            return
        if self.seqs[-1] >= seq:
            self.fqns[-1] = fqn
        else:
            self.seqs.append(seq)
            self.fqns.append(fqn)

    def owner_of(self, seq: int) -> str:
        return self.fqns[bisect_right(self.seqs, seq) - 1]


class Tracker:
    """Follows modules, backward passes and optimizers from ``start`` to ``stop``.

    on_enter, on_leave: called with the module's place as it starts and ends (the clock).
    """

    def __init__(
        self,
        names: ModuleNames,
        *,
        is_mode_on: Callable[[], bool] = lambda: True,
        on_enter: Callable[[Place, nn.Module, Any], None] | None = None,
        on_leave: Callable[[Place, nn.Module], None] | None = None,
    ) -> None:
        self.names = names
        self.calls: defaultdict[str, int] = defaultdict(int)
        self.in_bodies = 0  # higher-order operators' functions at work: their graphs are no modules
        self.is_mode_on = is_mode_on
        self._on_enter = on_enter
        self._on_leave = on_leave
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._home: _Thread | None = None
        self._hooks = ExitStack()

    def start(self) -> None:
        """Install the hooks; this thread becomes the one whose backward passes are followed."""
        self._home = self.join_thread()
        for handle in (
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ):
            self._hooks.callback(handle.remove)

    def stop(self) -> None:
        """Remove the hooks; what was collected stays."""
        self._hooks.close()

    def join_thread(self) -> _Thread:
        """This thread's state; from now on its modules are followed."""
        thread = getattr(self._local, "thread", None)
        if thread is None:
            thread = self._local.thread = _Thread(_sequence_nr())
            self._threads.append(thread)
        return thread

    def places(self) -> list[Place]:
        """Everything collected, of all threads."""
        return [place for thread in self._threads for place in thread.places.values()]

    # -- where an operator belongs ------------------------------------------------------------

    def locate(self, thread: _Thread, task: int) -> Place:
        """The place of the operator that runs now, in graph task ``task`` (-1: none)."""
        if task == _NO_TASK:
            return self._locate_outside(thread)
        frame = thread.stack[-1]
        if frame.task == task and frame.place is not None:
            return frame.place
        self._note_backward(self._home or thread)
        node = _current_node()
        if node is None:
            return thread.place(frame.named.fqn if frame.named else OUTSIDE, "backward")
        seq = node._sequence_nr()
        if seq >> 63:  # AccumulateGrad has no sequence number of its own
            return thread.place(ACCUMULATION, "backward")
        fqn = self._timeline(thread, task).owner_of(seq)
        if not _grad_enabled():
            return thread.place(fqn, "backward")
        # With create_graph, and in a function that is run again, new nodes come into being:
        # they belong where the node at work belongs.
        thread.mark(thread.last_seq, fqn)
        return thread.place(fqn, "recompute" if _is_recomputing(node) else "backward")

    @staticmethod
    def _note_backward(thread: _Thread) -> None:
        if not thread.after_backward:
            thread.after_backward = True
            if len(thread.stack) == 1:
                thread.current = None

    def _locate_outside(self, thread: _Thread) -> Place:
        """An operator in no module and no backward pass, after a backward pass."""
        if thread.after_backward and not _grad_enabled():
            return thread.place(AFTER_BACKWARD, "optimizer")
        return thread.place(OUTSIDE, "forward")

    def _timeline(self, thread: _Thread, task: int) -> _Thread:
        """Whose sequence numbers the backward nodes of ``task`` have.

        On CPU, backward runs in the thread that asked for it. On other devices it runs in a
        thread of its own, on nodes of the thread that ran forward; only where a reentrant
        checkpoint ran forward again in that very thread, the backward nested in it (a later
        graph task) has the thread's own numbers.
        """
        home = self._home
        if home is None or thread is home:
            return thread
        return thread if _NO_TASK < thread.recompute_task < task else home

    # -- hooks --------------------------------------------------------------------------------

    def _thread(self) -> _Thread | None:
        """This thread's state, or None where the mode does not see this thread's operators."""
        thread: _Thread | None = getattr(self._local, "thread", None)
        if thread is None and self.is_mode_on():  # autograd's device threads inherit the mode
            return self.join_thread()
        return thread

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        thread = self._thread()
        if thread is None:
            return
        stack = thread.stack
        if stack[-1].named is None and stack[-1].owner is not None and _step_is_over(stack[-1]):
            stack.pop()
        named = self.names.known(module)
        if named is None:
            if self.in_bodies and isinstance(module, torch.fx.GraphModule):
                return
            named = self.names.find(module, [frame.named for frame in stack if frame.named])
        task = _graph_task()
        if task == _NO_TASK:
            place = thread.place(named.fqn, "forward")
            if thread.after_backward:
                self._note_forward(thread)
            if not named.wrapper:
                self.calls[named.fqn] += 1
        else:
            place = thread.place(named.fqn, "recompute")
            thread.recompute_task = task
        stack.append(Frame(named, module, place, task))
        thread.current = place
        thread.mark(_sequence_nr(), named.fqn)
        if self._on_enter is not None:
            self._on_enter(place, module, args)

    def _note_forward(self, thread: _Thread) -> None:
        thread.after_backward = False
        for other in self._threads:
            other.recompute_task = _NO_TASK

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        thread = self._thread()
        if thread is None:
            return
        stack = thread.stack
        if stack[-1].owner is module:
            frame = stack.pop()
        elif any(frame.owner is module for frame in stack):
            while (frame := stack.pop()).owner is not module:
                pass
        else:
            return  # entered before the block
        if self._on_leave is not None and frame.place is not None:
            self._on_leave(frame.place, module)
        self._resume(thread)

    def _resume(self, thread: _Thread) -> None:
        frame = thread.stack[-1]
        fqn = OUTSIDE
        if frame.place is not None:
            thread.current = frame.place
            fqn = frame.place.fqn
        else:
            thread.current = None if thread.after_backward else thread.place(OUTSIDE, "forward")
        thread.mark(_sequence_nr(), fqn)

    def _enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        thread = self._thread()
        if thread is not None:
            place = thread.place(f"{OUTSIDE}.{type(optimizer).__name__}", "optimizer")
            thread.stack.append(Frame(None, optimizer, place, _graph_task()))
            thread.current = place

    def _leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        thread = self._thread()
        if thread is not None and any(frame.owner is optimizer for frame in thread.stack):
            while thread.stack.pop().owner is not optimizer:
                pass
            self._resume(thread)


def _is_recomputing(node: Any) -> bool:
    """True while ``torch.utils.checkpoint`` runs a function again."""
    if node.name() == "CheckpointFunctionBackward":
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "recomputation_hook" in getattr(hooks[0], "__qualname__", "")


def _step_is_over(frame: Frame) -> bool:
    """True if the optimizer's step was left by an exception: its post hook never came."""
    caller = sys._getframe(1).f_back
    while caller is not None:
        if caller.f_locals.get("self") is frame.owner:
            return False
        caller = caller.f_back
    return True
