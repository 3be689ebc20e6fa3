"""What calls of torch's own layers and optimizers have in common that need not be dispatched again.

Which operators such a call runs depends on the metadata of its tensors, on a few attributes and on
modes of torch, never on values. A call that is like an earlier one runs without the dispatch mode,
as fast as outside of a counter, and what was recorded of the earlier one is recorded again.
Everything that decides which operators run and what they cost is compared. A call of which anything
cannot be compared is dispatched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dispatch_flops import _torch
from dispatch_flops.operators import registry
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule

if TYPE_CHECKING:
    from dispatch_flops.counting.thread_state import ModulePhase, OpenCall

_number_of_modes = _torch.number_of_modes
_function_modes = _torch.function_modes
_forward_mode = torch.autograd.forward_ad
_LIBRARIES = ("aten.", "prim.", "prims.")

Costs = tuple[tuple[CallCost, int], ...]  # each with the number of operators that cost so much


def runs_plainly() -> bool:
    """Return True if nothing but the counter's mode and what tensors show decides what runs.

    Tensors show autocast: where it is enabled, they are not like those of a call without it. They
    do not show what it has cast before: a call in which it may cast is not to be kept.
    """
    return not (_number_of_modes() != 1 or _function_modes() or _forward_mode._current_level >= 0)


class UndispatchedMemory(Protocol):
    """Follows the memory of calls of layers and of steps, also of those without the mode."""

    def before_layer(self) -> Any:
        """Called before a layer's call that is dispatched, and that later ones may be like."""

    def of_layer(self, before: Any, costs: Costs, output: Any) -> Any:
        """Return what ``repeat_layer`` is given of that call; None if each is to be dispatched."""

    def can_repeat_layer(self, noted: Any) -> bool:
        """Return False if a layer's call is to be dispatched that is like the one of ``noted``."""

    def repeat_layer(
        self, noted: Any, module_phase: ModulePhase, tensors: Sequence[Any], output: Any
    ) -> None:
        """Note a call that ran without the mode. ``tensors``: its input, and the layer's own."""

    def before_step(self) -> Any:
        """Called before a step that is dispatched, and that later ones may be like."""

    def of_step(self, before: Any) -> Any:
        """Return what ``repeat_step`` is given of that step; None if each is to be dispatched."""

    def repeat_step(self, noted: Any, module_phase: ModulePhase) -> bool:
        """Note a step that begins; return False, and note nothing, if it is to be dispatched."""


class KnownRuns:
    """Calls that later ones may be like; forgotten when a rule changes.

    own_rules: the counter's own. is_on: False where an operator of torch has a formula of the
    user's, which may ask for anything: then every call is dispatched. memory: None if nothing
    follows it.
    """

    def __init__(self, own_rules: Mapping[Any, Rule]) -> None:
        self.memory: UndispatchedMemory | None = None
        self._own_rules = own_rules
        registry.watch(self)
        self.rules_changed()

    def rules_changed(self) -> None:
        """Forget all calls: rules were added or removed."""
        self.forget()
        keys = registry.keys_with_formulas(self._own_rules)
        self.is_on = not any(name_of(key).startswith(_LIBRARIES) for key in keys)

    def forget(self) -> None:
        """Let no later call be like an earlier one."""
        raise NotImplementedError


def note_costs(opened: OpenCall) -> None:
    """Note what was recorded before a call, for ``costs_of``."""
    assert opened.module_phase is not None
    counts = opened.module_phase.counts
    opened.costs_before = counts, counts.copy()


def costs_of(opened: OpenCall) -> Costs:
    """Return what was recorded since a call began; nothing if it was aggregated meanwhile."""
    assert opened.costs_before is not None and opened.module_phase is not None
    counts, before = opened.costs_before
    if counts is not opened.module_phase.counts:
        return ()
    added = ((cost, count - before.get(cost, 0)) for cost, count in counts.items())
    return tuple((cost, count) for cost, count in added if count)
