"""What every kind of target implements, and how errors of the user's code are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, Protocol

from torch import nn

from dispatch_flops.cli.targets.inputs import Inputs, Variables
from dispatch_flops.errors import TargetError

_MAX_LENGTH = 300
_EXIT_HINT = "code that ends the process belongs under if __name__ == '__main__'"


class Source(Protocol):
    """Something that builds a model.

    variables: the names that ``build`` takes from the variables; ``None`` if it takes any name.
    """

    @property
    def variables(self) -> frozenset[str] | None: ...

    def build(self, variables: Variables) -> tuple[nn.Module, Inputs | None]:
        """Return the model, and inputs for it if the target provides them.

        Raises TargetError for any error in the user's code.
        """
        ...


def first_line(error: BaseException) -> str:
    """Return ``"ValueError: message"`` on one line of at most 300 characters of message.

    Lines that end in a colon introduce the next one, so they are kept together with it.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    count = next((n for n, line in enumerate(lines, 1) if not line.endswith(":")), len(lines))
    text = " ".join(lines[:count])
    if len(text) > _MAX_LENGTH:
        text = f"{text[: _MAX_LENGTH - 3]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def raise_target_error(action: str, error: BaseException, hint: str = "") -> NoReturn:
    """Raise the TargetError that reports an error of the user's code, with that error as cause.

    action: what raised the error, such as "importing net.py". hint: what the user may try.
    """
    if isinstance(error, SystemExit):
        hint = _EXIT_HINT
    suffix = f"; {hint}" if hint else ""
    raise TargetError(f"{action} raised {first_line(error)}{suffix}") from error


def require_file(path: Path) -> None:
    """Raise TargetError if there is no such file."""
    if not path.is_file():
        raise TargetError(f"file {str(path)!r} does not exist; check the path")


def require_model(value: Any, label: str) -> nn.Module:
    """Return the value if it is a model; raise TargetError if it is not.

    label: what returned the value.
    """
    if not isinstance(value, nn.Module):
        raise TargetError(
            f"{label} returned a value of type {type(value).__name__}; it must return an "
            "nn.Module, or a pair of a model and its inputs"
        )
    return value
