"""Python frames of the running program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def frames() -> Iterator[FrameType]:
    """Yield the frames of the caller and of those that called it, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
