"""Names of the code that ``torch.compile`` left to run eagerly, whose cost is in no graph.

Such code follows a graph break, or is a whole function that could not be compiled or has exceeded
the recompile limit. ``torch.compile`` records it for the whole process, so that code of other
compiled functions is named, too.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.nn import parallel

from dispatch_flops import _torch
from dispatch_flops.operators.costing import CallCost

# Graph breaks at which only Python runs, or a tensor is read. Beginnings of torch's reasons.
_WITHOUT_ARITHMETIC = (
    "Call to `torch._dynamo.graph_break()`",
    "generic_jump",
    "Data-dependent branching",
    "Unsupported Tensor.item()",
    "logging.Logger method",
)
# Files whose functions run no operator themselves: the standard library's, and DDP's.
_FOLDERS = frozenset(Path(str(m.__file__)).parent for m in (contextlib, logging, parallel))
_PRINTING = ("Failed to trace builtin operator", "`print`")


class EagerParts:
    """Collects what was left eager since this object was made."""

    def __init__(self) -> None:
        self._found: dict[str, CallCost] = {}
        self._breaks = len(_torch.graph_breaks())
        self._last_compilation = _last(_torch.compilations())

    def found(self) -> tuple[CallCost, ...]:
        """Return an unknown cost for each part found so far."""
        self.read()
        return tuple(self._found.values())

    def read(self) -> None:
        """Read what torch has recorded; it keeps the last compilations only."""
        breaks = _torch.graph_breaks()
        for reason in breaks[min(self._breaks, len(breaks)) :]:
            if not _is_without_arithmetic(reason.reason):
                self._add(*_where(reason.user_stack), reason.reason)
        self._breaks = len(breaks)
        for record in self._new_compilations():
            if record.fail_type is not None:
                place = record.co_filename, record.co_firstlineno
                self._add(record.co_name, *place, str(record.fail_reason))

    def _new_compilations(self) -> Iterator[Any]:
        records = _torch.compilations()
        known = [i for i, record in enumerate(records) if record is self._last_compilation]
        self._last_compilation = _last(records)
        yield from records[known[-1] + 1 if known else 0 :]

    def _add(self, function: Any, file: Any, line: Any, reason: str) -> None:
        if Path(str(file)).parent in _FOLDERS:
            return
        why = reason.partition("\n")[0]
        name = f"eager code: {why}"
        if function is not None:
            name = f"eager code: {function} ({Path(str(file)).name}:{line})"
        self._found.setdefault(name, CallCost(name, "unknown", error=why))


def _last(records: list[Any]) -> Any:
    return records[-1] if records else None


def _where(stack: Any) -> tuple[Any, Any, Any]:
    frame = stack[-1] if stack else None
    return (frame.name, frame.filename, frame.lineno) if frame is not None else (None, None, None)


def _is_without_arithmetic(reason: str) -> bool:
    return reason.startswith(_WITHOUT_ARITHMETIC) or all(text in reason for text in _PRINTING)
