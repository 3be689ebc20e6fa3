"""A dispatch mode that is entered and left at any moments, not by one ``with`` block."""

from __future__ import annotations

import threading
from itertools import takewhile
from typing import Any

from dispatch_flops import _torch
from dispatch_flops._torch import ModeScope, TorchDispatchMode
from dispatch_flops.counting.python_frames import is_dispatching
from dispatch_flops.counting.torch_functions import Witness


class EnteredMode(TorchDispatchMode):
    """Dispatch mode that one thread enters, and leaves wherever it is on the stack by then.

    is_entered: True from ``enter`` on, until the mode is left for good.
    scope: the scope in which it was entered.
    within: ids of the modes within which it is entered, outermost first: those in force that follow
        them stay inside of it. None: it is entered within all that are in force.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scope = _torch.NO_SCOPE
        self.within: tuple[int, ...] | None = None
        self._home = threading.get_ident()
        self.is_entered = False

    @property
    def can_be_left(self) -> bool:
        """False in a scope or operator at whose end torch would undo that the mode was left."""
        if not self.is_entered:
            return True
        return ModeScope.here() in (_torch.NO_SCOPE, self.scope) and not is_dispatching(self)

    def enter(self) -> None:
        """Enter the mode in this thread; one that could not be left sees operators again."""
        vars(self).pop("__torch_dispatch__", None)
        if any(mode is self for mode in _torch.modes_in_force()) or is_dispatching(self):
            return
        self._home, self.scope = threading.get_ident(), ModeScope.here()
        self.is_entered = True
        inside = self._modes_inside()
        try:
            for _ in inside:
                _torch.pop_mode()
            self.__enter__()  # type: ignore[no-untyped-call]
        finally:
            for mode in inside:
                _torch.push_mode(mode)

    def _modes_inside(self) -> list[TorchDispatchMode]:
        if self.within is None:
            return []
        modes = _torch.stacked_modes()
        pairs = zip(map(id, modes), self.within, strict=False)
        outer = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return modes[outer:]

    def leave(self) -> None:
        """Leave the mode, and keep those that were entered later; do nothing if it is left.

        ``TorchDispatchMode.__exit__`` takes off whichever mode is on top. An interrupt can leave
        the mode on the stack more than once, for it enters itself again in composite operators,
        or leave a witness there. Where the mode cannot be left, as in another thread, operators of
        its thread pass unseen until it is entered again, or left elsewhere.
        """
        if not self.is_entered:
            return
        if threading.get_ident() != self._home or not self.can_be_left:
            vars(self)["__torch_dispatch__"] = self._pass_through
            return
        _torch.leave_hidden_mode(self)
        above = []
        while any(self._is_to_be_left(mode) for mode in _torch.modes_in_force()):
            mode = _torch.pop_mode()
            if not self._is_to_be_left(mode):
                above.append(mode)
        for mode in reversed(above):
            _torch.push_mode(mode)
        _torch.tell_of_modes()
        vars(self).pop("__torch_dispatch__", None)
        self.is_entered = False

    def _is_to_be_left(self, mode: TorchDispatchMode) -> bool:
        return mode is self or isinstance(mode, Witness)

    def _pass_through(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() == self._home:
            return func(*args, **kwargs or {})
        dispatch: Any = type(self).__torch_dispatch__
        return dispatch(self, func, types, args, kwargs)
