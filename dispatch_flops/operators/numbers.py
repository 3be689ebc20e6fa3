"""Numbers among an operator's arguments that decide the cost of a call.

Most formulas read shapes and dtypes only: the numbers of ``mul(x, 0.1)`` or of an optimizer's step
change from call to call and cost the same. A formula that compares its numbers with a few values
declares these; one whose cost, or whose result's size, follows from a number declares that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.operators.access import declaration_of
from dispatch_flops.operators.registry import Rule

F = TypeVar("F", bound=Callable[..., Any])
SCALARS: frozenset[type] = frozenset((int, bool, float, type(None)))
NUMBERS: frozenset[type] = frozenset((int, float, complex))


@dataclass(frozen=True, slots=True)
class NumberKeys:
    """How the numbers among the arguments of an operator enter the signature of a call.

    by_value: types whose values all decide the cost. Other numbers count by their type.
    told_apart: values that decide the cost even so.
    in_lists: True if this holds for numbers in lists, too: these are not sizes.
    """

    by_value: frozenset[type] = SCALARS
    told_apart: frozenset[Any] = frozenset()
    in_lists: bool = False


BY_VALUE = NumberKeys(SCALARS | NUMBERS)
BY_TYPE = NumberKeys(SCALARS - NUMBERS)
_ATTRIBUTE = "told_apart"
_SIZES = frozenset(("int", "SymInt", "Optional[int]", "Optional[SymInt]"))


def tells_apart(*values: float) -> Callable[[F], F]:
    """Declare that a formula asks of its numbers only whether they equal one of ``values``."""

    def declare(formula: F) -> F:
        setattr(formula, _ATTRIBUTE, frozenset(values))
        return formula

    return declare


def depends_on_numbers(formula: F) -> F:
    """Declare that a formula's cost depends on the values of numbers."""
    setattr(formula, _ATTRIBUTE, None)
    return formula


def same_numbers(formula: Callable[..., Any], wrapper: F) -> F:
    """Give ``wrapper``, a formula that calls ``formula``, the same declaration."""
    setattr(wrapper, _ATTRIBUTE, _told_apart(formula))
    return wrapper


def _told_apart(formula: Callable[..., Any]) -> frozenset[Any] | None:
    return getattr(formula, _ATTRIBUTE, frozenset())


def number_keys(func: Any, rule: Rule | None) -> NumberKeys:
    """Return which numbers among the arguments of ``func`` decide what ``rule`` answers.

    Integers that are sizes or dimensions always count by their value. So does every number for a
    user's formula, and where the schema has a list of floats, such as the factors of a resampling.
    """
    if rule is None or not rule.builtin or not isinstance(func, OpOverload):
        return BY_VALUE
    types = [str(argument.real_type) for argument in _torch.schema_of(func).arguments]
    declared = [_told_apart(rule.formula)]
    if (declaration := declaration_of(func)) is not None:
        declared.append(_told_apart(declaration))
    if None in declared or any("List[float]" in kind for kind in types):
        return BY_VALUE
    has_sizes = any(kind in _SIZES for kind in types)
    return NumberKeys(
        by_value=SCALARS - NUMBERS | ({int} if has_sizes else frozenset()),
        told_apart=frozenset[Any]().union(*(told for told in declared if told is not None)),
        in_lists="List[number]" in types,
    )
