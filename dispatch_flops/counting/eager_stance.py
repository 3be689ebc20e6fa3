"""Let compiled callables run their eager code while a counter is active, and stay compiled.

Left to itself, torch.compile gives compiled code up for good when it meets a dispatch mode. A
stance tells it to step aside instead. The stance is of the whole process: compiled callables in
other threads run their eager code meanwhile, too.
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
    """Compiled callables run their eager code inside the block, also ones compiled in it.

    torch._dynamo is not imported for this; should the program import it inside the block, the
    stance is taken then.
    """
    with ExitStack() as undo:
        _SILENCE.enter(undo)
        if _DYNAMO in sys.modules:
            _STANCE.enter(undo)
        else:
            watch = _ImportWatch(_DYNAMO, lambda: _STANCE.enter(undo))
            sys.meta_path.insert(0, watch)
            undo.callback(watch.remove)
        yield


class _Shared:
    """Something of the whole process that blocks take together: the first of them takes it, the
    last one gives it back. Blocks may overlap, in one thread or in several.
    """

    def __init__(self, take: Callable[[], Callable[[], None]]) -> None:
        self._take = take
        self._blocks = 0
        self._lock = threading.Lock()
        self._give_back: Callable[[], None] = lambda: None

    def enter(self, undo: ExitStack) -> None:
        with self._lock:
            if not self._blocks:
                self._give_back = self._take()
            self._blocks += 1
        undo.callback(self._leave)

    def _leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if not self._blocks:
                self._give_back()


def _take_stance() -> Callable[[], None]:
    prior = _torch.set_stance(_Stance(_torch.current_stance()))

    def restore() -> None:
        _torch.set_stance(prior)

    return restore


def _silence() -> Callable[[], None]:
    """torch warns of global hooks on compiled modules: it is the counter that has them."""
    filters = cast("list[Any]", warnings.filters)
    before = list(filters)
    warnings.filterwarnings("ignore", message="Using `torch.compile.module.` when there are global")
    added = [entry for entry in filters if entry not in before]

    def restore() -> None:
        # The program may have set filters of its own; and within its ``catch_warnings`` those in
        # use are a copy.
        for used in (filters, cast("list[Any]", warnings.filters)):
            used[:] = [entry for entry in used if entry not in added]

    return restore


_STANCE, _SILENCE = _Shared(_take_stance), _Shared(_silence)


class _Stance:
    """``force_eager``, with an exception for higher-order operators.

    ``torch.cond``, ``scan`` and their like compile themselves even in an eager program, to find
    the tensors that the functions given to them close over; without it those tensors would get
    no gradients. What is compiled so runs operator by operator: nothing escapes the count.
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
    """Calls back when a module has been imported, once."""

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
                del loader.exec_module  # the class's own method again
                loader.exec_module(module)
                self._on_import()

            loader.exec_module = execute
        return spec
