"""Run the eager code of compiled callables while a counter is active, and keep them compiled.

By default torch.compile drops compiled code for good when a dispatch mode is active. A stance of
``torch.compiler`` makes it run the eager code instead. The stance applies to the whole process,
including compiled callables in other threads.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, cast

from dispatch_flops import _torch

_DYNAMO = _torch.DYNAMO


@contextmanager
def eager_stance() -> Iterator[None]:
    """Make compiled callables run their eager code inside the block, also those compiled in it."""
    with ExitStack() as undo:
        _WARNING.enter(undo)
        if _DYNAMO in sys.modules:
            _STANCE.enter(undo)
        else:
            # Importing torch._dynamo takes about a second, which programs that compile nothing
            # should not pay. A program may compile for the first time inside the block.
            watch = _ImportWatch(_DYNAMO, lambda: _STANCE.enter(undo))
            sys.meta_path.insert(0, watch)
            undo.callback(watch.remove)
        yield


class _SharedSetting:
    """Setting of the process that overlapping blocks share, in one thread or in several.

    The first block calls ``apply``, the last one calls what ``apply`` returned.
    """

    def __init__(self, apply: Callable[[], Callable[[], None]]) -> None:
        self._apply = apply
        self._blocks = 0
        self._lock = threading.Lock()
        self._restore: Callable[[], None] = lambda: None

    def enter(self, undo: ExitStack) -> None:
        with self._lock:
            if not self._blocks:
                self._restore = self._apply()
            self._blocks += 1
        undo.callback(self._leave)

    def _leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._restore()


def _set_stance() -> Callable[[], None]:
    prior = _torch.set_stance(_Stance(_torch.current_stance()))

    def restore() -> None:
        _torch.set_stance(prior)

    return restore


def _ignore_hook_warning() -> Callable[[], None]:
    """Ignore torch's warning about global hooks on compiled modules: they are the counter's."""
    filters = cast("list[Any]", warnings.filters)
    before = list(filters)
    warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global")
    added = [entry for entry in filters if entry not in before]

    def restore() -> None:
        # The program may have added filters. Within its ``catch_warnings`` a copy is in use.
        for used in (filters, cast("list[Any]", warnings.filters)):
            used[:] = [entry for entry in used if entry not in added]

    return restore


_STANCE = _SharedSetting(_set_stance)
_WARNING = _SharedSetting(_ignore_hook_warning)


class _Stance:
    """The stance ``force_eager``, with an exception for higher-order operators.

    ``torch.cond``, ``scan`` and similar operators compile even in an eager program, to find the
    tensors that their functions close over. Otherwise those tensors would not get gradients. The
    compiled functions still run operator by operator, so that all operators are counted. The
    public ``torch.compiler.set_stance("force_eager")`` does not make this exception.
    """

    def __init__(self, prior: Any) -> None:
        self._prior = prior
        self.skip_guard_eval_unsafe = prior.skip_guard_eval_unsafe

    @property
    def stance(self) -> str:
        return str(self._prior.stance) if _torch.compiles_higher_order_operator() else "force_eager"

    @property
    def backend(self) -> Any:
        return self._prior.backend if _torch.compiles_higher_order_operator() else None


class _ImportWatch(MetaPathFinder):
    """Import hook that calls back once, after a module has been imported."""

    def __init__(self, name: str, on_import: Callable[[], None]) -> None:
        self._name = name
        self._on_import = on_import

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        self.remove()
        spec = PathFinder.find_spec(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:

            def execute(module: ModuleType) -> None:
                del loader.exec_module  # restores the method of the class
                loader.exec_module(module)
                self._on_import()

            loader.exec_module = execute
        return spec
