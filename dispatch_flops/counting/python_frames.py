"""Who asked for the operator that runs now: read off Python's frames and autograd's graph."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint

from dispatch_flops import _torch
from dispatch_flops.profile import OUTSIDE

# What torch itself does between backward and optimizer step, told by the calling module.
_PARTS = {
    "torch.nn.utils.clip_grad": f"{OUTSIDE}.gradient clipping",
    "torch.amp.grad_scaler": f"{OUTSIDE}.gradient scaling",
}
_ENGINE = _torch.ENGINE_CODE
_CALL = _torch.MODULE_CALL_CODE
_PARTS_DEPTH = 16  # frames between an operator and the function that asked for it
# Nodes between a parameter and the operator that it was meant for.
_PASSING = ("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0")


def modules_at_work() -> Counter[int]:
    """``{id of a module: its calls that are not over}``."""
    found: Counter[int] = Counter()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL:
            found[id(frame.f_locals["self"])] += 1
        frame = frame.f_back
    return found


def first_over(calls: Iterable[torch.nn.Module], entering: torch.nn.Module | None) -> int | None:
    """Which of these calls, outermost first, is the first that is over; None if none is.

    entering: a module whose call has just begun, and is none of these.
    """
    at_work = modules_at_work()
    at_work[id(entering)] -= 1
    for place, module in enumerate(calls):
        at_work[id(module)] -= 1
        if at_work[id(module)] < 0:
            return place
    return None


def part_of_torch() -> str | None:
    """What part of torch asked for the operator that runs now, if it has a name here."""
    caller = sys._getframe(1)
    for _ in range(_PARTS_DEPTH):
        part = _PARTS.get(caller.f_globals.get("__name__", ""))
        if part is not None:
            return part
        if caller.f_back is None:
            return None
        caller = caller.f_back
    return None


def caller_of(hook: str) -> Any:
    """The Python frame that called the hook of that name (or what overrides it)."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == hook:
        frame = frame.f_back  # type: ignore[assignment]
    return frame


def is_over(step: int) -> bool:
    """True if the Python frame of that id has returned: none of those that are running is it."""
    caller = sys._getframe(1)
    while caller is not None:
        if id(caller) == step:
            return False
        caller = caller.f_back  # type: ignore[assignment]
    return True


def maker_by_parameters(node: Any, owners: Mapping[int, str]) -> str | None:
    """The module whose parameters a backward node works on, or the one that holds all of those.

    owners: ``{id of a parameter: fqn of its module}``.
    """
    common: list[str] | None = None
    for source, _ in node.next_functions:
        while source is not None and source.name() in _PASSING:
            source = source.next_functions[0][0]
        fqn = owners.get(id(getattr(source, "variable", None)))
        if fqn is not None:
            parts = fqn.split(".")
            pairs = zip(parts if common is None else common, parts, strict=False)
            common = [part for part, other in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return None if common is None else ".".join(common)
