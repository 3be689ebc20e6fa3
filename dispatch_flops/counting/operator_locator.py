"""Locate operators that run in no module's forward: in backward passes and optimizer steps.

When an operator of the forward pass reaches the mode, its autograd node already has its sequence
number. A timeline of sequence numbers and modules therefore tells which module made each backward
node. Neither tensor hooks nor gradient hooks are needed, and nothing is written on the user's
modules.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.counting.call_stack import (
    drop_calls_after_hooks,
    drop_raised_steps,
    is_running_step,
    resume,
)
from dispatch_flops.counting.checkpoints import CheckpointCallers, recomputing_frame_at
from dispatch_flops.counting.communication_causes import is_in_pipeline_setup
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tree import ModuleName
from dispatch_flops.counting.node_owners import ACCUMULATES, NodeOwners
from dispatch_flops.counting.python_frames import (
    is_in_custom_function,
    is_mode_of_package,
    named_part_of_torch,
    optimizer_in_step,
)
from dispatch_flops.counting.thread_state import (
    AFTER_BACKWARD,
    NO_TASK,
    UNATTRIBUTED,
    ModulePhase,
    ThreadState,
)
from dispatch_flops.operators.tensors import storages_of, tensors_in
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

_saved_tensors_hooks = _torch.saved_tensors_hooks
_current_node = _torch.current_node
_graph_task = _torch.graph_task_id
_REENTRANT_NODE = _torch.REENTRANT_NODE
_is_grad_enabled = torch.is_grad_enabled


class OperatorLocator:
    """Tells the module and phase of operators, except where ``enter_module`` has determined them.

    owners, checkpoints: what the tracker notes of the nodes and checkpointed functions.
    """

    def __init__(
        self, names: ModuleNames, owners: NodeOwners, checkpoints: CheckpointCallers
    ) -> None:
        self._names = names
        self._owners = owners
        self._checkpoints = checkpoints

    def locate(self, thread: ThreadState, args: Any = ()) -> ModulePhase:
        """Return the module and phase of an operator, with its arguments, outside of backward."""
        call = thread.stack[-1]
        if call.caller is not None and call.module_phase is not None:
            # Most operators of a step are called by one frame: ``is_running_step``, written out.
            frame = sys._getframe(2)
            if is_mode_of_package(frame):
                frame = frame.f_back  # type: ignore[assignment]
            frame_id, code, code_above = call.caller
            if id(frame) == frame_id and frame.f_code is code:
                above = frame.f_back
                if above is not None and above.f_code is code_above:
                    return call.module_phase
        if call.is_in_hooks:
            drop_calls_after_hooks(thread)
        call = thread.stack[-1]
        if call.module_phase is not None and not call.has_closure and is_running_step(call):
            return call.module_phase
        drop_raised_steps(thread)
        call = thread.stack[-1]
        if len(thread.stack) == 1:
            thread.is_in_setup = is_in_pipeline_setup()
        resume(thread, thread.last_seq)
        if call.has_closure and _is_grad_enabled():  # steps disable gradients, closures enable them
            thread.mark(thread.last_seq, OUTSIDE)
            return thread.module_phase(OUTSIDE, "forward")
        if call.module_phase is not None:
            return call.module_phase
        if thread.is_after_backward:
            part = named_part_of_torch()
            if part is not None:
                return thread.module_phase(*part)
            optimizer = optimizer_in_step()
            if optimizer is not None and not _computes_loss(args):
                return thread.module_phase(f"{OUTSIDE}.{optimizer}", "optimizer")
            computes_loss = _is_grad_enabled() or is_in_custom_function()
            if not computes_loss or self._are_gradients(thread, args):
                return thread.module_phase(AFTER_BACKWARD, "optimizer")
        return thread.module_phase(OUTSIDE, "forward")

    def _are_gradients(self, thread: ThreadState, args: Any) -> bool:
        """Return True if an operator after backward is part of what is done to gradients.

        An engine may compute the norm of all gradients with gradients enabled. That begins with
        the first operator on a parameter's gradient, and ends with the optimizer's step.
        """
        if thread.gradients is None:
            thread.gradients = self._names.storages_of_gradients()
        if not thread.is_on_gradients and thread.gradients:
            storages = storages_of(args)
            if not thread.gradients.isdisjoint(storages):
                # Memory of a gradient that is gone may hold something else.
                thread.gradients = self._names.storages_of_gradients()
                thread.is_on_gradients = not thread.gradients.isdisjoint(storages)
        return thread.is_on_gradients

    # -- in backward --------------------------------------------------------------------------

    def locate_in_backward(self, thread: ThreadState, task: int) -> ModulePhase:
        """Return the module and phase of an operator that graph task ``task`` runs."""
        node = _current_node()
        if (
            task == thread.known_task
            and node is not None
            and len(thread.stack) == 1
            and not _is_grad_enabled()
            and not _saved_tensors_hooks(True)  # nothing is recomputed
            and node.__class__ is not _REENTRANT_NODE
        ):
            seq = node._sequence_nr()
            if thread.known_from <= seq <= thread.known_to and thread.known_phase is not None:
                return thread.known_phase
            if seq == ACCUMULATES and thread.accumulating is not None:
                return thread.accumulating
        if thread.stack[-1].is_in_hooks:
            drop_calls_after_hooks(thread)
        call = thread.stack[-1]
        if call.task == task and call.module_phase is not None:
            return call.module_phase
        if task != thread.known_task:
            self._note_task(thread, task)
        self._note_backward(thread)
        # A backward pass within a module's recomputation is part of the recomputation.
        phase: Phase = "backward"
        if call.module_phase is not None and call.named is not None and call.task != NO_TASK:
            phase = call.module_phase.phase
        if node is None:
            return thread.module_phase(call.named.fqn if call.named else OUTSIDE, phase)
        fqn = self._owners.owner_of(node, thread, task)
        is_attributed = fqn is not UNATTRIBUTED
        if not is_attributed:
            fqn = self._owners.owner_by_parameters(node)
        frame = recomputing_frame_at(node)
        if frame is not None:
            fqn, phase = self._checkpoints.caller_of(frame, fqn, task), "recompute"
        found = thread.module_phase(fqn, phase)
        if _is_grad_enabled():
            # create_graph and recomputed functions make new nodes: they belong to the module to
            # which the running node belongs.
            thread.made_graph_in_backward = thread.made_graph_in_backward or frame is None
            thread.mark(thread.last_seq, fqn)
        elif frame is None and is_attributed and len(thread.stack) == 1:
            self._note_known(thread, node._sequence_nr(), found)
        return found

    def _note_known(self, thread: ThreadState, seq: int, found: ModulePhase) -> None:
        """Note where the operators of a node are recorded; they make no graph."""
        if seq == ACCUMULATES:
            thread.accumulating = found
        else:
            thread.known_from, thread.known_to = self._owners.first_like(seq), seq
            thread.known_phase = found

    def _note_task(self, thread: ThreadState, task: int) -> None:
        """Note that a backward pass starts; autograd's threads have no frames of its caller."""
        thread.known_task, thread.known_phase, thread.accumulating = task, None, None
        home = self._owners.home
        if thread.is_entered or home is None:
            thread.is_in_setup = is_in_pipeline_setup()
        else:
            thread.is_in_setup = home.is_in_setup

    def _note_backward(self, thread: ThreadState) -> None:
        if not thread.is_entered and self._owners.home is not None:
            thread = self._owners.home
        # The closure of an optimizer's step runs a backward pass outside of modules, too.
        is_outside = len(thread.stack) == 1 or all(call.has_closure for call in thread.stack[1:])
        if thread.current is not None or (is_outside and not thread.is_after_backward):
            thread.current = None
            if is_outside:
                thread.is_after_backward = True
                thread.forget_gradients()
                thread.param_sink = thread.discarded_params

    def callers_in_backward(self, thread: ThreadState) -> list[ModuleName]:
        """Return the module that called the function which is recomputed now, in a list.

        It tells which of several parents calls a module that they share.
        """
        task, node = _graph_task(), _current_node()
        if task == NO_TASK or node is None:
            return []
        fqn = self._owners.owner_of(node, thread, task)
        frame = recomputing_frame_at(node)
        if frame is not None:
            fqn = self._checkpoints.caller_of(frame, fqn, task)
        caller = self._names.by_fqn.get(fqn)
        return [] if caller is None else [caller]


def _computes_loss(args: Any) -> bool:
    """Return True if the result requires a gradient, as in the closure of an optimizer's step."""
    return _is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args))
