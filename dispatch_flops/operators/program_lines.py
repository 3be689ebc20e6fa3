"""The line of the program that a warning of this package names."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Final

PACKAGE: Final = __name__.partition(".")[0]
_NOT_PROGRAM: Final = (PACKAGE, "torch", "contextlib")


def stacklevel_of_program() -> int:
    """Return the ``stacklevel`` by which a warning of the caller names the program's own line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and package_of(frame) in _NOT_PROGRAM:
        level, frame = level + 1, frame.f_back
    return level


def package_of(frame: FrameType) -> str:
    """Return the name of the package whose code the frame runs."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
