"""Stack of a thread's open calls: drop those that ended unseen, resume the caller of one."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.python_frames import (
    FrameKey,
    first_ended,
    has_returned,
    operator_caller,
    running_modules,
)
from dispatch_flops.counting.thread_state import OpenCall, ThreadState
from dispatch_flops.profile import OUTSIDE

_sequence_nr = _torch.sequence_nr


def drop_ended_calls(thread: ThreadState, entering: nn.Module | None = None) -> None:
    """Drop calls that ended while the hooks were off, or in an exception that skips hooks."""
    calls = [call for call in thread.stack if call.named is not None]
    ended = first_ended((call.owner for call in calls), entering) if calls else None
    if ended is not None:
        del thread.stack[thread.stack.index(calls[ended]) :]
        resume(thread, _sequence_nr())


def drop_calls_after_hooks(thread: ThreadState, entering: nn.Module | None = None) -> None:
    """Drop calls whose modules' own forward hooks have run.

    Global forward hooks run before a module's own, so that a call outlasts ``leave_module``.
    entering: a module whose call has just started and that is not on the stack.
    """
    while (call := thread.stack[-1]).is_in_hooks:
        open_calls = sum(other.owner is call.owner for other in thread.stack)
        running = running_modules()[id(call.owner)] - (call.owner is entering)
        if running >= open_calls:
            return
        thread.stack.pop()
        resume(thread, thread.last_seq)  # the caller may have made nodes since


def drop_raised_steps(thread: ThreadState, entering: FrameKey | None = None) -> None:
    """Drop optimizer steps that raised: their post hooks did not run.

    entering: the frame whose step starts now. An open step with the same key has ended.
    """
    while (step := thread.stack[-1].step) and (step == entering or has_returned(step)):
        thread.stack.pop()


def is_running_step(call: OpenCall) -> bool:
    """Return True if the optimizer step of that call runs the operator that is dispatched.

    The step runs as long as the frame that called its last operator does. That is found out anew
    only for another caller, because the step's own frame is further up.
    """
    if call.step is None:
        return False
    caller = operator_caller()
    if caller is None or call.caller != caller:
        if has_returned(call.step):
            return False
        call.caller = caller
    return True


def resume(thread: ThreadState, seq: int) -> None:
    """Attribute what follows, from sequence number ``seq`` on, to the top of the stack."""
    call = thread.stack[-1]
    is_outside = call.module_phase is None
    if call.module_phase is None:
        thread.mark(seq, OUTSIDE)
        # Between the modules of a pipeline its setup may run.
        may_be_other = thread.is_after_backward or _torch.PIPELINES in sys.modules
        thread.current = None if may_be_other else thread.module_phase(OUTSIDE, "forward")
    else:
        thread.mark(seq, call.module_phase.fqn)
        is_unsure = call.step or call.has_closure or call.is_in_hooks
        thread.current = None if is_unsure else call.module_phase
    is_discarded = call.step or (is_outside and thread.is_after_backward)
    thread.param_sink = thread.discarded_params if is_discarded else thread.used_params


def pop_call(stack: list[OpenCall], owner: Any) -> OpenCall:
    """Pop the innermost call of ``owner``, and all calls within it; return it."""
    while (call := stack.pop()).owner is not owner:
        pass
    return call
