"""A time limit for code that may never end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dispatch_flops.errors import TargetError

# Python ignores an exception in a destructor, so that one interrupt may not be enough. The next one
# must not meet the block's own cleaning up.
_AGAIN_S = 3.0

LONGEST_S = 1e9
"""The longest time that timers are given: more, and the clocks of torch and the system overflow."""


class _OutOfTimeError(KeyboardInterrupt):
    """Ends the block as Ctrl-C does, so that ``except Exception`` does not catch it."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Interrupt the block after ``seconds``, and raise TargetError.

    The block is interrupted by the signal SIGALRM, so only the main thread has a limit, and only
    where nothing else uses that signal. None sets no limit.
    """
    if seconds is None or not _has_free_alarm():
        yield
        return
    signal.signal(signal.SIGALRM, _interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, min(seconds, LONGEST_S), _AGAIN_S)
        yield
    except _OutOfTimeError:
        raise TargetError(
            f"{what} did not end within {seconds:g} s; a job must not wait for other ranks, for "
            "they do not run; pass a larger timeout_s if it only needs more time"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError


def _has_free_alarm() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and hasattr(signal, "SIGALRM")
        and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    )
