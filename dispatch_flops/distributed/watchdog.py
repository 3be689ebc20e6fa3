"""A time limit for code that may never end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dispatch_flops.errors import TargetError

# Python ignores an interrupt that arrives in a destructor, so that one may not be enough. The next
# one must not meet the block's own cleaning up.
_AGAIN_S = 3.0


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Interrupt the block after ``seconds``, and raise TargetError.

    The block is interrupted as by Ctrl-C, so only the main thread has a limit, and only where
    Ctrl-C raises KeyboardInterrupt. None sets no limit.
    """
    if seconds is None or not _is_interruptible():
        yield
        return
    is_late, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        wait_s = seconds
        while not is_over.wait(wait_s):
            is_late.set()
            signal.pthread_kill(main, signal.SIGINT)
            wait_s = _AGAIN_S

    main = threading.get_ident()
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    except KeyboardInterrupt:
        if not is_late.is_set():
            raise
        raise TargetError(
            f"{what} did not end within {seconds:g} s; a job must not wait for other ranks, for "
            "they do not run; pass a larger timeout_s if it only needs more time"
        ) from None
    finally:
        is_over.set()


def _is_interruptible() -> bool:
    return (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
