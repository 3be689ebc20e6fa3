"""Recognize functions that torch.utils.checkpoint runs for the first time or recomputes."""

from __future__ import annotations

import inspect
import sys
import weakref
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint

from dispatch_flops import _torch

# Functions of torch.utils.checkpoint that recompute: without and with reentrant backward.
_RECOMPUTING = ("unpack_hook", "backward")
_saved_tensors_hooks = _torch.saved_tensors_hooks


class CheckpointCallers:
    """The fqns of the modules that called each checkpointed function."""

    def __init__(self) -> None:
        self._fqns: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def note(self, hooks: Any, fqn: str) -> None:
        """Note that ``fqn`` called the function under these saved-tensor hooks, if it is one."""
        variables = checkpoint_variables(hooks)
        if "frame" in variables:
            self._fqns.setdefault(variables["frame"], fqn)

    def caller_of(self, frame: FrameType, owner: str, task: int) -> str:
        """Return the fqn that called the function which ``frame`` recomputes in a graph task.

        owner: the module that made the running node. It is the answer for a backward pass that
        is part of the recomputed function.
        """
        function, group = frame.f_locals.get("frame"), frame.f_locals.get("gid")
        if function is None or (isinstance(group, int) and group != task):
            return owner
        return self._fqns.get(function, owner)


def checkpoint_variables(hooks: Any) -> dict[str, Any]:
    """Return what saved-tensor hooks of torch.utils.checkpoint close over; nothing for others."""
    pack = inspect.unwrap(hooks[0])
    if not getattr(pack, "__qualname__", "").startswith("_checkpoint_hook."):
        return {}
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=False)
    return {name: cell.cell_contents for name, cell in cells}


def is_checkpointing() -> bool:
    """Return True in a function that a reentrant checkpoint runs first, without gradients."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch.utils.checkpoint.__file__ and code.co_name == "forward":
            return True
        frame = frame.f_back
    return False


def recomputing_frame() -> FrameType | None:
    """Return the frame of torch.utils.checkpoint that recomputes what runs now; None without one.

    A backward pass that the recomputed function runs is part of the recomputation. The backward
    pass that a reentrant checkpoint runs through the recomputed graph is not.
    """
    frame: FrameType | None = sys._getframe(1)
    called_engine = False
    while frame is not None:
        code = frame.f_code
        in_checkpoint = code.co_filename == torch.utils.checkpoint.__file__
        is_backward_pass = called_engine and code.co_name == "backward"
        if in_checkpoint and code.co_name in _RECOMPUTING and not is_backward_pass:
            return frame
        called_engine = code is _torch.ENGINE_CODE or (
            called_engine and code.co_filename == torch.autograd.__file__
        )
        frame = frame.f_back
    return None


def recomputing_frame_at(node: Any) -> FrameType | None:
    """Return ``recomputing_frame()``, without its walk where nothing can be recomputed.

    node: the one that runs. During recomputation, torch.utils.checkpoint has hooks on saved
    tensors, or its own autograd node runs.
    """
    if node.__class__ is _torch.REENTRANT_NODE or _saved_tensors_hooks(True):
        return recomputing_frame()
    return None
