"""Backward passes of extensions' operators whose kernels bypass the dispatcher.

Autograd calls the backward of a ``torch::autograd::Function``, or of one in Python. If it runs no
operator that computes, its cost is unknown.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.thread_state import AMBIGUOUS, UNATTRIBUTED, ThreadState
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.tensors import tensors_in
from dispatch_flops.profile.cost import PHASES

BYPASSES = (
    "its backward ran no operator that computes: its kernels bypass the dispatcher. Return a Split "
    "with a Share of the phase backward from its formula"
)


class Recorder(Protocol):
    """Dispatch mode that counts, as far as it is used here."""

    tracker: Tracker


def watch_backward(mode: Recorder, func: OpOverload, out: Any, fqn: str) -> None:
    """Record ``func`` as unknown whenever the backward of this call computes unseen.

    out: what the call returned. fqn: of the module that called.
    """
    nodes = {t.grad_fn for t in tensors_in(out) if t.grad_fn is not None}
    for node in nodes:
        if _is_custom(node):
            watched = _OwnBackward(mode, func, fqn)
            node.register_prehook(watched.begin)
            node.register_hook(watched.end)


def _is_custom(node: Any) -> bool:
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    return is_python or "CppNode" in node.name()


class _OwnBackward:
    """Hooks on one node of the backward graph."""

    def __init__(self, mode: Recorder, func: OpOverload, fqn: str) -> None:
        self._mode = weakref.ref(mode)  # the graph may outlive the counter
        self._name = str(func)
        self._fqn = fqn
        self._known: int | None = None

    def begin(self, _gradients: Any) -> None:
        self._known = self._computing_calls()

    def end(self, _given: Any, _taken: Any) -> None:
        mode = self._mode()
        if mode is None or self._known is None or self._known != self._computing_calls():
            return
        backward = mode.tracker.join_thread().module_phase(self._fqn, "backward")
        backward.counts[CallCost(self._name, "unknown", error=BYPASSES)] += 1

    def _computing_calls(self) -> int | None:
        """Return how many calls this thread has recorded that compute; None outside the block."""
        mode: Any = self._mode()
        if mode is None or mode not in _torch.modes_in_force():
            return None
        thread: ThreadState = mode.tracker.join_thread()
        phases = thread.module_phases
        return sum(
            calls
            for fqn in (self._fqn, AMBIGUOUS, UNATTRIBUTED)
            for phase in PHASES
            if (fqn, phase) in phases
            for cost, calls in phases[fqn, phase].counts.items()
            if cost.kind != "free"
        )
