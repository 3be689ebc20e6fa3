"""Formulas of composite operators, which a compiled graph does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dispatch_flops.operators import registry
from dispatch_flops.operators.composites import is_composite, taken_apart_of
from dispatch_flops.operators.operator_keys import name_of
from dispatch_flops.operators.registry import Rule

REASON = (
    "its formula is not asked, because a compiled graph holds the operators that it consists of; "
    "register formulas for those"
)


def formulas_not_asked(own_rules: Mapping[Any, Rule]) -> list[str]:
    """Return the names of the composite operators that have a formula of the user's.

    own_rules: those of one backend.
    """
    taken_apart = taken_apart_of(registry.keys_with_formulas(own_rules))
    return sorted({name_of(op.overloadpacket) for op in taken_apart if is_composite(op)})
