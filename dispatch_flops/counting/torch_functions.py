"""Find torch's own functions, such as ``torch.add``, that run one operator and nothing else.

``torch.ops`` converts arguments and results by an operator's schema while it runs. Torch's
functions are generated code, which takes 0.3 to 2.8 µs less. They choose the overload by the types
of the arguments, and take a tensor without dimensions for a number: what one call shows holds for
calls of the same types and shapes.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload, TorchDispatchMode
from dispatch_flops.counting.python_frames import frame_of_operator
from dispatch_flops.operators.interrupts import is_of_signal_handler


class _OtherOperatorError(Exception):
    """A function of torch does not begin with the operator whose place it is to take."""


_NO_KEYWORDS: Mapping[str, Any] = {}
_FINDING = threading.RLock()  # warnings are noted by what the process has only one of

# What functions raise that do not take the arguments.
_REFUSALS = (_OtherOperatorError, TypeError, ValueError, RuntimeError)


class Witness(TorchDispatchMode):
    """Dispatch mode that sees whether a function runs one call of an operator, and nothing else.

    It raises before any other operator runs first; those that follow the call run.
    """

    def __init__(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NO_KEYWORDS
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._func = func
        self.args, self.kwargs = args, kwargs
        self.operators = 0
        self.out: Any = None
        self.is_over = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see CountingMode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_call = func is self._func and self._has_same(args, kwargs or {})
        if not is_call and not self.operators and not self.is_over:
            raise _OtherOperatorError
        self.operators += 1
        self.out = func(*args, **kwargs or {})
        return self.out

    def _has_same(self, args: Any, kwargs: Mapping[str, Any]) -> bool:
        return (
            kwargs.keys() == self.kwargs.keys()
            and _are_same(args, self.args)
            and all(_is_same(value, self.kwargs[name]) for name, value in kwargs.items())
        )


def run_and_find(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NO_KEYWORDS
) -> tuple[Any, Callable[..., Any] | None]:
    """Run an operator, once; return its result, and what runs it alike in the least time.

    None for the latter where another thread is finding it out for an operator of its own.
    """
    kernel = _torch.kernel_of(func)
    if not _FINDING.acquire(blocking=False):
        return kernel(*args, **kwargs), None
    try:
        return _run_and_find(func, kernel, args, kwargs)
    finally:
        _FINDING.release()


def _run_and_find(
    func: OpOverload, kernel: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Callable[..., Any]]:
    for function in _torch.functions_named_as(func):
        witness = Witness(func, args, kwargs)
        try:
            out, has_warned = _run_noting_warnings(witness, function)
        except _REFUSALS as error:
            if witness.operators or is_of_signal_handler(error):
                raise  # the operator's own, or a handler's
        else:
            is_alike = witness.operators == 1 and type(out) is type(witness.out)
            if witness.operators:
                return out, function if is_alike and not has_warned else kernel
    return kernel(*args, **kwargs), kernel


def _run_noting_warnings(witness: Witness, function: Callable[..., Any]) -> tuple[Any, bool]:
    """Run the function; return its result, and whether it issued a warning.

    Torch's functions warn in the name of the line that calls them, here. That is to be the
    program's, as it is where the operator runs.
    """
    noted: list[tuple[Any, type[Warning]]] = []
    show: Any = warnings.showwarning

    def note(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any
    ) -> None:
        if filename == _run_before.__code__.co_filename:
            noted.append((message, category))
        else:  # of another thread, or of the operator's own Python code
            show(message, category, filename, *rest, **named)

    try:
        try:
            warnings.showwarning = note  # type: ignore[assignment]
            return _run_before(witness, function), bool(noted)
        finally:
            warnings.showwarning = show
    finally:
        warnings.showwarning = show  # again: an interrupt may have come before the line above
        globals().pop("__warningregistry__", None)  # what is shown once is to be noted each time
        for message, category in noted:
            frame = frame_of_operator()
            registry = frame.f_globals.setdefault("__warningregistry__", {})
            warnings.warn_explicit(
                message, category, frame.f_code.co_filename, frame.f_lineno,
                frame.f_globals.get("__name__"), registry,
            )  # fmt: skip


def _run_before(witness: Witness, function: Callable[..., Any]) -> Any:
    """Run the function; a witness that an interrupt leaves in force ends with the counter."""
    try:
        _torch.push_mode(witness)
        return function(*witness.args, **witness.kwargs)
    finally:
        witness.is_over = True
        if witness in _torch.modes_in_force()[-1:]:  # an interrupt may come before it is
            _torch.pop_mode()


def _are_same(args: Any, others: Any) -> bool:
    return len(args) == len(others) and all(map(_is_same, args, others))


def _is_same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if type(value) is not type(other) or isinstance(value, Tensor):
        return False
    return _are_same(value, other) if isinstance(value, list) else bool(value == other)
