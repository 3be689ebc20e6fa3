"""Record communication calls by the module that causes them and the phase that they serve."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dispatch_flops import _torch
from dispatch_flops.counting.communication_causes import find_cause, is_in_pipeline_setup
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.python_frames import ACCUMULATION, frame_of_operator
from dispatch_flops.counting.thread_state import NO_TASK, ModulePhase
from dispatch_flops.operators.communication import CommCall, communication_of, is_communication
from dispatch_flops.profile import OUTSIDE, CommTotal, merge_communication
from dispatch_flops.profile.cost import Phase

CountedCalls = Mapping[tuple[str, Phase, CommCall], int]
_SHARED = ("recompute", "setup")  # phases that FSDP's gathers in a forward pass may be part of


class CommunicationRecorder:
    """Counts communication calls by module, phase and what is sent.

    notes: why a call could not be described, for the profile.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._calls: Counter[tuple[str, Phase, CommCall]] = Counter()
        self._lock = threading.Lock()
        self._data_parallel: dict[int, str] = {}  # see ``owners_under_data_parallel``
        self._modules = 0  # that had names then
        self.notes: dict[str, None] = {}

    def record(self, op: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> ModulePhase:
        """Record a call that has just returned ``out``; return where its cost belongs.

        For the operators with which FSDP2 packs what it sends, only that is found.
        """
        module_phase = self._tracker.here()
        try:
            calls = communication_of(op, args, kwargs, out) if is_communication(op) else []
            if not calls:
                return self._attribute(module_phase, "")
            for call in calls:
                module_phase = self._attribute(module_phase, call.kind)
                with self._lock:
                    self._calls[module_phase.fqn, module_phase.phase, call] += 1
        except Exception as error:  # the program goes on
            text = f"communication of {op} was not recorded: {type(error).__name__}: {error}"
            self.notes[text] = None
        return module_phase

    def calls(self) -> CountedCalls:
        """Return the number of calls so far."""
        with self._lock:
            return dict(self._calls)

    # -- attribution --------------------------------------------------------------------------

    def _attribute(self, running: ModulePhase, kind: str) -> ModulePhase:
        """Return the module that causes the call and the phase that it serves.

        running: what the thread runs now. kind: of the communication; "" for FSDP's packing.
        """
        cause = find_cause(kind)
        fqn, phase = running.fqn, running.phase
        is_in_backward = _torch.graph_task_id() != NO_TASK
        if cause is not None:
            known = self._tracker.names.fqn_of(cause.module)
            fqn = fqn if known is None else known
            if cause.phase is not None:
                phase = cause.phase
            elif phase not in _SHARED:
                phase = "backward" if is_in_backward else "forward"
        elif is_in_backward and fqn in (ACCUMULATION, OUTSIDE):
            owner = self._owner_of_gradient()
            fqn = fqn if owner is None else owner
        if is_in_pipeline_setup():
            phase = "setup"
        return self._tracker.join_thread().module_phase(fqn, phase)

    def _owner_of_gradient(self) -> str | None:
        """Return the fqn of the DistributedDataParallel model whose gradient arrives now.

        Its reducer runs when a gradient is accumulated. A collective that another hook runs then
        belongs to the module that holds the parameter. In the first pass of a static graph, the
        reducer runs when the engine has run all nodes: it is known where there is one such model.
        """
        names = self._tracker.names
        if len(names.by_fqn) != self._modules:  # a model that is met later may be such a one
            self._modules = len(names.by_fqn)
            self._data_parallel = names.owners_under_data_parallel()
        node = _torch.current_node()
        if node is None and frame_of_operator().f_code is _torch.ENGINE_CODE:
            models = set(self._data_parallel.values())
            return models.pop() if len(models) == 1 else None
        parameter = getattr(node, "variable", None)
        fqn = self._data_parallel.get(id(parameter))
        if fqn is None:
            fqn = names.owners_of_parameters().get(id(parameter))
        return fqn


def communication_totals(
    calls: CountedCalls, shown: Callable[[str], str], mesh_dims: Mapping[tuple[int, ...], str]
) -> tuple[CommTotal, ...]:
    """Return the totals of these calls, sorted by module and phase.

    shown: returns the fqn of a module as the profile has it.
    mesh_dims: ``{ranks of a group: name of the mesh dimension}``, for groups that do not name
        theirs: a mesh of one dimension over all ranks uses the default group.
    """
    totals = merge_communication(
        _total(shown(fqn), phase, _with_mesh_dim(call, mesh_dims), n)
        for (fqn, phase, call), n in calls.items()
    )
    return tuple(sorted(totals, key=_order))


def _with_mesh_dim(call: CommCall, mesh_dims: Mapping[tuple[int, ...], str]) -> CommCall:
    name = mesh_dims.get(call.group.ranks)
    if name is None or call.group.mesh_dim is not None:
        return call
    return replace(call, group=replace(call.group, mesh_dim=name))


def _total(fqn: str, phase: Phase, call: CommCall, calls: int) -> CommTotal:
    def times(shares: tuple[int, ...] | None) -> tuple[int, ...] | None:
        return None if shares is None else tuple(calls * share for share in shares)

    return CommTotal(
        fqn=fqn,
        phase=phase,
        kind=call.kind,
        op=call.op,
        dtype=call.dtype,
        group=call.group,
        calls=calls,
        payload_bytes=calls * call.payload_bytes,
        sent_bytes=times(call.sent_bytes),
        received_bytes=times(call.received_bytes),
    )


def _order(total: CommTotal) -> tuple[str, ...]:
    return (total.fqn, total.phase, total.kind, total.op, total.group.name)
