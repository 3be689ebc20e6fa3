"""Tell the errors by which signals end a program from those that this package expects."""

from __future__ import annotations

import signal
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

_PACKAGE = __name__.partition(".")[0]


def is_of_signal_handler(error: BaseException) -> bool:
    """Return True if a signal's handler raised the error.

    A handler runs between two instructions of any function, such as one whose errors are expected.
    What it raises, to end a run that takes too long or has lost a worker, is the program's.
    """
    elsewhere = set()
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_globals.get("__name__", "").partition(".")[0] != _PACKAGE:
            elsewhere.add(frame.f_code)
        trace = trace.tb_next
    return bool(elsewhere) and not elsewhere.isdisjoint(_codes_of_handlers())


def _codes_of_handlers() -> set[CodeType]:
    found = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    return {code for code in found if code is not None}


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that a handler runs; None for a default one, and for one without code."""
    while isinstance(handler, partial):
        handler = handler.func
    if callable(handler) and not isinstance(handler, (FunctionType, MethodType)):
        handler = type(handler).__call__
    return getattr(handler, "__code__", None)
