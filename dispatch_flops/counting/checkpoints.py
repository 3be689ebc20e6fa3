"""Recognize functions that torch.utils.checkpoint runs, or runs again."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint

from dispatch_flops.counting.python_frames import _ENGINE

# Functions of torch.utils.checkpoint: without and with reentrant backward.
_RERUNNING = ("unpack_hook", "backward")


def held_by_checkpoint(hooks: Any, made_by: str) -> dict[str, Any] | None:
    """What saved-tensor hooks hold, if ``made_by``, of torch.utils.checkpoint, made them."""
    pack = inspect.unwrap(hooks[0])
    if not getattr(pack, "__qualname__", "").startswith(f"{made_by}."):
        return None
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells}


def rerun_by_checkpoint() -> FrameType | None:
    """The frame in which torch.utils.checkpoint runs a function again, as part of the backward
    pass that runs now; None if what runs now is no part of such a function.

    A backward pass that such a function runs is part of it. The one that a reentrant checkpoint
    itself runs, through what its function has made, is not: it is the backward pass.
    """
    frame: FrameType | None = sys._getframe(1)
    by_engine = False  # the frame has called the engine
    while frame is not None:
        code = frame.f_code
        by_checkpoint = code.co_filename == torch.utils.checkpoint.__file__
        is_the_backward = by_engine and code.co_name == "backward"
        if by_checkpoint and code.co_name in _RERUNNING and not is_the_backward:
            return frame
        by_engine = code is _ENGINE or (by_engine and code.co_filename == torch.autograd.__file__)
        frame = frame.f_back
    return None
