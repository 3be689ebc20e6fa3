"""Counting conventions that the user chooses, and how formulas read them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

from dispatch_flops.errors import ConfigError

Causal = Literal["full", "half"]
Subclass = Literal["executed", "logical"]
Flops = Literal["all", "contractions"]
Target = Literal["cpu", "cuda"]
_ALLOWED: dict[str, tuple[str, ...]] = {
    "causal": get_args(Causal),
    "flops": get_args(Flops),
    "subclass": get_args(Subclass),
    "target": get_args(Target),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """Counting conventions of one counter.

    causal: "full" counts the whole Sq x Sk rectangle of causal attention, "half" the triangle
        that a causal kernel needs.
    subclass: for tensors made of other tensors, such as DTensor and quantised weights,
        "executed" counts the operators on the inner tensors (for a DTensor: on this rank),
        "logical" the operator on the outer one.
    meta_value: what ``.item()`` and similar calls return on tensors without data; None: they
        raise.
    flops: "all" counts every floating-point operation, "contractions" only 2 for each MAC.
    target: the device whose rules choose the kernel of attention on tensors without data.

    Raises ConfigError for a value that is not allowed.
    """

    causal: Causal = "full"
    subclass: Subclass = "executed"
    meta_value: float | None = None
    flops: Flops = "all"
    target: Target = "cpu"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                choices = " or ".join(f'"{value}"' for value in allowed)
                raise ConfigError(f"{name}={getattr(self, name)!r:.60}: choose {choices}")
        value = self.meta_value
        if value is not None and not isinstance(value, int | float):
            raise ConfigError(f"meta_value={value!r:.60}: pass a number, or None")


_CONVENTIONS: ContextVar[Conventions] = ContextVar("dispatch_flops_conventions")
_DEFAULT = Conventions()


def conventions() -> Conventions:
    """Return the conventions of the counter that is asking for a cost.

    Example::

        def scores_cost(q, k, *, out, **_):  # a formula to register for a causal kernel
            macs = q.numel() * k.shape[-2]
            return 2 * macs if conventions().causal == "full" else macs

        with overridden({torch.ops.aten.mm: scores_cost}), FlopCounterMode(causal="half"):
            torch.mm(torch.ones(2, 3), torch.ones(3, 5))
    """
    return _CONVENTIONS.get(_DEFAULT)


@contextlib.contextmanager
def using(chosen: Conventions) -> Iterator[None]:
    """Make ``conventions()`` return ``chosen`` inside the block."""
    token = _CONVENTIONS.set(chosen)
    try:
        yield
    finally:
        _CONVENTIONS.reset(token)
