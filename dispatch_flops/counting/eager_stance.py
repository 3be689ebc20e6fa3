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
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Protocol, cast

from dispatch_flops import _torch
from dispatch_flops.counting.undo import UndoStack

_DYNAMO = _torch.DYNAMO


def take_eager_stance(undo: UndoStack) -> None:
    """Make compiled callables run their eager code until ``undo`` runs, also ones compiled then."""
    _WARNING.hold(undo)
    if _DYNAMO in sys.modules:
        _STANCE.hold(undo)
        _COMPILED_AUTOGRAD.hold(undo)
    else:
        # Importing torch._dynamo takes about a second, which programs that compile nothing
        # should not pay. A program may compile for the first time while the counter is active.
        watch = _ImportWatch(_DYNAMO, lambda: _STANCE.hold(undo))
        undo.add(watch.remove)
        sys.meta_path.insert(0, watch)


@contextmanager
def eager_stance() -> Iterator[None]:
    """Make compiled callables run their eager code inside the block, also those compiled in it."""
    with UndoStack() as undo:
        take_eager_stance(undo)
        yield


def eager_runs() -> int:
    """Return how often a compiled callable of this process has run its eager code so far."""
    return _Stance.eager_runs


class _Setting(Protocol):
    """Setting of the process; both methods do nothing where there is nothing to do."""

    def apply(self) -> None: ...
    def revert(self) -> None: ...


class _SharedSetting:
    """Setting that several blocks hold, which may overlap in one thread or in several."""

    def __init__(self, setting: _Setting) -> None:
        self._setting = setting
        self._holders: set[object] = set()
        self._lock = threading.RLock()  # the garbage collector may end a lost counter inside

    def hold(self, undo: UndoStack) -> None:
        """Apply the setting until ``undo`` runs, and the undoing of all other holders."""
        holder = object()
        undo.add(lambda: self._release(holder))
        with self._lock:
            self._holders.add(holder)
            self._setting.apply()

    def _release(self, holder: object) -> None:
        with self._lock:
            self._holders.discard(holder)
            if not self._holders:
                self._setting.revert()


class _StanceSetting:
    """The stance of torch.compile.

    A stance that the program sets meanwhile is kept, and acts afterwards.
    """

    def __init__(self) -> None:
        self._stance: _Stance | None = None

    def apply(self) -> None:
        if self._stance is None:
            self._stance = stance = _Stance(_torch.current_stance())
            _torch.answer_set_stance(stance.replace_prior)
            _torch.set_stance(stance)

    def revert(self) -> None:
        if self._stance is not None:
            _torch.answer_set_stance(None)
            if _torch.current_stance() is self._stance:
                _torch.set_stance(self._stance.prior)
            self._stance = None


class _CompiledAutogradSetting:
    """Suspends compiled autograd, whose graphs do not tell which module made a node.

    The stance keeps the program from enabling it in the block.
    """

    def __init__(self) -> None:
        self._suspended: tuple[Any, ...] | None = None

    def apply(self) -> None:
        if self._suspended is None:
            self._suspended = _torch.suspend_compiled_autograd()

    def revert(self) -> None:
        if self._suspended is not None:
            _torch.resume_compiled_autograd(self._suspended)
            self._suspended = None


class _WarningFilter:
    """A filter for torch's warning about global hooks on compiled modules: they are ours."""

    # The empty group makes the pattern differ from any that the program filters by.
    _PATTERN = "(?:)Using `torch.compile.module.` when there are global"

    def __init__(self) -> None:
        self._filters: list[Any] = []  # those in use when the filter was added

    def apply(self) -> None:
        if not any(map(self._is_ours, self._filters)):
            self._filters = cast("list[Any]", warnings.filters)
            warnings.filterwarnings("ignore", message=self._PATTERN)

    def revert(self) -> None:
        # The program may have added filters. Within its ``catch_warnings`` a copy is in use.
        for used in (self._filters, cast("list[Any]", warnings.filters)):
            used[:] = [entry for entry in used if not self._is_ours(entry)]
        self._filters = []

    def _is_ours(self, entry: Any) -> bool:
        return getattr(entry[1], "pattern", None) == self._PATTERN


class _Stance:
    """The stance ``force_eager``, with an exception for higher-order operators.

    ``torch.cond``, ``scan`` and similar operators compile even in an eager program, to find the
    tensors that their functions close over. Otherwise those tensors would not get gradients. The
    compiled functions still run operator by operator, so that all operators are counted. The
    public ``torch.compiler.set_stance("force_eager")`` does not make this exception.
    """

    eager_runs = 0

    def __init__(self, prior: Any) -> None:
        self.prior = prior

    def replace_prior(self, stance: Any) -> Any:
        """Note a stance that the program sets; return the one that it had set before.

        Raises RuntimeError within compiled code, as torch does.
        """
        _torch.set_stance(self)
        prior, self.prior = self.prior, stance
        return prior

    @property
    def stance(self) -> str:
        return "force_eager" if self._is_eager() else str(self.prior.stance)

    @property
    def backend(self) -> Any:
        return None if self._is_eager() else self.prior.backend

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        # Asked once in each call of a compiled callable, and never else. Functions that are not to
        # be compiled ask for ``stance``, too.
        if self._is_eager():
            _Stance.eager_runs += 1
        return bool(self.prior.skip_guard_eval_unsafe)

    def _is_eager(self) -> bool:
        return not _torch.compiles_higher_order_operator()


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


_STANCE = _SharedSetting(_StanceSetting())
_COMPILED_AUTOGRAD = _SharedSetting(_CompiledAutogradSetting())
_WARNING = _SharedSetting(_WarningFilter())
