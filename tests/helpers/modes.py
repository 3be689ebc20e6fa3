"""Dispatch modes that watch a program."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorNames(TorchDispatchMode):
    """Keeps the names of the operators that reach it, in ``seen``."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class NamesBesideCompiled(OperatorNames):
    """Does not keep torch from running compiled code, as the counter's mode does not."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True
