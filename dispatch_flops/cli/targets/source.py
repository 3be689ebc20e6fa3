"""What every kind of target is to the rest: something that builds a model."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from torch import nn

from dispatch_flops.cli.targets.inputs import Inputs, Variables
from dispatch_flops.errors import TargetError


class Source(Protocol):
    """A model that can be built, as often as asked.

    variables: the names that change what is built; ``None`` where any name may.
    """

    @property
    def variables(self) -> frozenset[str] | None: ...

    def build(self, variables: Variables) -> tuple[nn.Module, Inputs | None]:
        """The model, and inputs for it where the target knows any."""
        ...


def first_line(error: BaseException) -> str:
    """``"ValueError: what it says"``, on one line of bearable length.

    A line that ends in a colon only announces the next.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((n for n, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:said])
    if len(text) > 300:
        text = f"{text[:297]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def blame(what: str, error: BaseException) -> NoReturn:
    """Raise the TargetError that names what the user's own code raised."""
    if isinstance(error, SystemExit):
        what += " (a script that ends the process belongs under if __name__ == '__main__')"
    raise TargetError(f"{what}: {first_line(error)}") from error


def as_model(value: Any, label: str) -> nn.Module:
    """The value, if it is a model; raises TargetError naming what it is instead."""
    if not isinstance(value, nn.Module):
        raise TargetError(
            f"{label} gave a value of type {type(value).__name__}; it must give an nn.Module, or a "
            "pair of a model and its inputs"
        )
    return value
