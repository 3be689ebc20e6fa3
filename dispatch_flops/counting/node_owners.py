"""Find the module whose forward made a node of the backward graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.python_frames import ACCUMULATION, owner_by_parameters
from dispatch_flops.counting.thread_state import (
    AMBIGUOUS,
    NO_TASK,
    UNATTRIBUTED,
    ThreadState,
)

ACCUMULATES = 2**64 - 1  # stands for the sequence number that AccumulateGrad does not have


class NodeOwners:
    """Finds the owners of backward nodes by the sequence numbers of all followed threads.

    threads: their states; the tracker adds to them.
    home: the state of the thread that started the tracker; None before.
    """

    def __init__(self, names: ModuleNames, threads: Sequence[ThreadState]) -> None:
        self.home: ThreadState | None = None
        self._names = names
        self._threads = threads
        self._parameter_owners: dict[int, str] | None = None

    def owner_of(self, node: Any, thread: ThreadState, task: int) -> str:
        """Return the fqn of the module whose forward made a node.

        On CPU, backward runs in the thread that asked for it. On other devices it runs in a
        thread of autograd, on nodes that another thread made in forward. Autograd's thread makes
        nodes itself only with create_graph and in recomputation; the backward pass nested in the
        latter, a later graph task, works on those nodes.
        """
        seq = node._sequence_nr()
        if seq == ACCUMULATES:
            return ACCUMULATION
        if len(self._threads) == 1:
            return thread.owner_of(seq)
        if thread.made(seq) and (thread.is_entered or NO_TASK < thread.recompute_task < task):
            return thread.owner_of(seq)
        others = [other for other in self._threads if other is not thread and other.made(seq)]
        if not others or (thread.made(seq) and thread.made_graph_in_backward):
            return AMBIGUOUS if others else thread.owner_of(seq)
        home = self.home
        return (home if home in others else others[0]).owner_of(seq)

    def first_like(self, seq: int) -> int:
        """Return the first sequence number from which on all nodes up to ``seq`` have one owner."""
        makers = [thread for thread in self._threads if thread.last_seq != thread.start]
        is_single = len(makers) == 1 and makers[0].made(seq)
        return makers[0].first_like(seq) if is_single else seq

    def owner_by_parameters(self, node: Any) -> str:
        """Return the fqn of the module whose parameters a node of an earlier forward works on."""
        if self._parameter_owners is None:
            self._parameter_owners = self._names.owners_of_parameters()
        fqn = owner_by_parameters(node, self._parameter_owners)
        return fqn if fqn is not None and fqn in self._names.by_fqn else UNATTRIBUTED
