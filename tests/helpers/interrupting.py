"""Interrupt functions at each of their steps in turn, as a signal's handler would."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class TooLateError(RuntimeError):
    """What a program's handler may raise; torch raises errors of its base class."""


@contextmanager
def interrupted_at(
    step: int,
    is_meant: Callable[[FrameType], bool],
    error: type[BaseException] = KeyboardInterrupt,
) -> Iterator[list[int]]:
    """Let a signal's handler raise at a step, a call or a line, of functions of meant frames.

    Yields a list that holds the step once it has come.
    """
    steps, hits = iter(range(step + 1)), list[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        raise error

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not is_meant(frame):
            return None
        if event in ("call", "line") and next(steps, None) == step:
            sys.settrace(None)
            hits.append(step)
            signal.raise_signal(signal.SIGALRM)
        return trace

    before = signal.signal(signal.SIGALRM, handle)
    sys.settrace(trace)
    try:
        yield hits
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGALRM, before)
