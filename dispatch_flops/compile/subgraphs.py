"""Count what the functions of a higher-order operator run, on fake tensors.

A graph has such an operator as one node: ``torch.cond`` and ``scan``, and the wrappers in which
the compiler runs operators that write to their arguments, have effects or draw random numbers.
``CountingMode`` counts them as in an eager program. Without data, ``cond`` counts as its costlier
branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from dispatch_flops._torch import HigherOrderOperator
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.higher_order import HANDLERS
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule

# Functionalization copies what an operator writes to; the compiler writes in place instead.
_COPYING = ("auto_functionalized", "auto_functionalized_v2")
_COPIES = ("aten.clone.default", "aten.as_strided.default")


def runs_functions(op: Any) -> bool:
    """Return True for a higher-order operator whose functions can be counted."""
    return isinstance(op, HigherOrderOperator) and op.name() in HANDLERS


def count_functions(
    op: HigherOrderOperator,
    args: Any,
    kwargs: dict[str, Any],
    fakes: AbstractContextManager[Any] | None,
    conventions: Conventions,
    own_rules: Mapping[Any, Rule],
) -> tuple[Counter[CallCost], tuple[str, ...]]:
    """Return the operator calls that one call of ``op`` makes, and notes on them.

    args, kwargs: tensors in them are fake tensors of the mode ``fakes``. What the operator raises
    on fake tensors becomes the error of an unknown cost.
    """
    tracker = Tracker(ModuleNames(()))
    mode = CountingMode(tracker, conventions, own_rules, lambda: None)
    try:
        with torch.no_grad(), fakes or nullcontext():
            mode.handle_higher_order(op, args, kwargs)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        return Counter([CallCost(name_of(op), "unknown", error=text)]), ()
    calls: Counter[CallCost] = Counter()
    for module_phase in tracker.module_phases():
        for cost, times in module_phase.counts.items():
            if op.name() not in _COPYING or cost.op not in _COPIES:
                calls[cost] += times
    return calls, tuple(mode.higher_order.notes)
