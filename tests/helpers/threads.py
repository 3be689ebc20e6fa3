"""Threads for tests: new ones, and ones that take the role of autograd's.

On a GPU, backward runs in threads of autograd, which inherit the dispatch mode. In tests a thread
that enters the mode takes the role of such a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode


def in_new_thread(fn: Callable[..., Any], *args: Any) -> Any:
    """Return ``fn(*args)``, run in a new thread; raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, *args).result()


def as_autograd_would(fn: Callable[[], Any]) -> Any:
    """Return ``fn()``, run in a new thread with the dispatch mode of this one."""
    mode = _get_current_dispatch_mode()

    def run() -> Any:
        with mode:
            return fn()

    return in_new_thread(run)
