"""What a counter lets its user choose, and how formulas learn of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

Causal = Literal["full", "half"]
Subclass = Literal["executed", "logical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """What a counter lets its user choose.

    causal: "full" counts the whole Sq x Sk rectangle of attention, "half" the part that a
        causal kernel needs.
    subclass: of tensors that are made of others, such as DTensor and quantised weights,
        "executed" counts the operators that run on the inner ones (of a DTensor: on this
        rank), "logical" the operator on the whole.
    meta_value: answers ``.item()`` and its like on tensors without data; None: they raise.
    """

    causal: Causal = "full"
    subclass: Subclass = "executed"
    meta_value: float | None = None


_CONVENTIONS: ContextVar[Conventions] = ContextVar("dispatch_flops_conventions")
_DEFAULT = Conventions()


def conventions() -> Conventions:
    """The conventions of the counter that is asking for a cost."""
    return _CONVENTIONS.get(_DEFAULT)


@contextlib.contextmanager
def using(chosen: Conventions) -> Iterator[None]:
    """Formulas called inside see ``chosen``."""
    token = _CONVENTIONS.set(chosen)
    try:
        yield
    finally:
        _CONVENTIONS.reset(token)
