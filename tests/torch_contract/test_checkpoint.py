"""torch.utils.checkpoint: closures and frames by which a function that is run again is found.

dispatch_flops books what runs again in a backward pass as recomputation, under the module that
called the checkpointed function. torch has no public way to ask for that.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
current_node = torch._C._current_autograd_node
graph_task = torch._C._current_graph_task_id


def frame_of_checkpoint(name: str) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch.utils.checkpoint.__file__ and code.co_name == name:
            return frame
        frame = frame.f_back
    return None


def run_twice(ask: Callable[[], Any], *, reentrant: bool) -> list[Any]:
    """What ``ask`` answers in a checkpointed function: in the forward pass, and again."""
    answers: list[Any] = []

    def function(x: Tensor) -> Tensor:
        answers.append(ask())
        return x.sin().cos()

    out = checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=reentrant)
    out.sum().backward()
    return answers


def held_by_pack_hook() -> dict[str, Any]:
    pack = inspect.unwrap(saved_tensors_hooks(True)[0])
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells}
    return {"": pack.__qualname__, **held}


def test_pack_hook_in_forward_holds_the_functions_frame() -> None:
    """dispatch_flops relies on this for who called the checkpointed function
    (counting/checkpoints.py: ``checkpoint_variables``, ``CheckpointCallers``).
    """
    held, _ = run_twice(held_by_pack_hook, reentrant=False)
    assert held[""].startswith("_checkpoint_hook."), (
        f"a checkpoint's saved-tensor hook is now called {held['']}"
    )
    assert "frame" in held, f"its closure now holds {sorted(held)}, and no 'frame'"
    assert weakref.ref(held["frame"]), "the frame is a key of a WeakKeyDictionary"
    assert hash(held["frame"]) is not None


def test_unpack_hook_when_run_again_has_frame_and_gid() -> None:
    """dispatch_flops relies on this for recomputation without reentrant backward
    (counting/checkpoints.py: ``recomputing_frame``, ``CheckpointCallers``).
    """
    frames: list[Any] = []

    def ask() -> Any:
        hooks = saved_tensors_hooks(True)
        unpacking = frame_of_checkpoint("unpack_hook")
        if unpacking is None:
            frames.append(held_by_pack_hook()["frame"])
            return None
        return bool(hooks), dict(unpacking.f_locals), graph_task()

    first, again = run_twice(ask, reentrant=False)
    assert first is None, "the forward pass itself must not run in a frame called unpack_hook"
    assert again is not None, "what is run again is no longer called by a frame called unpack_hook"
    hooks, variables, task = again
    assert hooks, "while a function is run again there must be hooks on saved tensors"
    assert variables["frame"] is frames[0], (
        "unpack_hook's variable 'frame' must be the one that the forward's pack_hook held"
    )
    assert variables["gid"] == task, "unpack_hook's 'gid' must be the id of the graph task"


def test_backward_when_reentrant_is_a_frame_of_checkpoint_and_its_own_node() -> None:
    """dispatch_flops relies on this for recomputation with reentrant backward
    (counting/checkpoints.py: ``recomputing_frame``, ``recomputing_frame_at``).
    """

    def ask() -> Any:
        node = current_node()
        return frame_of_checkpoint("backward") is not None, node and type(node)

    first, again = run_twice(ask, reentrant=True)
    assert first == (False, None)
    assert again == (True, CheckpointFunction._backward_cls), (
        "a reentrant checkpoint must run its function again in CheckpointFunction.backward, with "
        "a node of its _backward_cls as the running one"
    )


def test_backward_when_reentrant_runs_the_engine_from_its_own_frame() -> None:
    """dispatch_flops relies on this for telling the backward pass of a reentrant checkpoint from
    what its function runs (counting/checkpoints.py: ``recomputing_frame``).
    """
    engine = torch.autograd.graph._engine_run_backward.__code__
    names: list[list[str]] = []

    def function(x: Tensor) -> Tensor:
        out = x.sin()
        if torch.is_grad_enabled():
            out.register_hook(lambda _: names.append(between_engine_and_checkpoint()))
        return out.cos()

    def between_engine_and_checkpoint() -> list[str]:
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not engine:
            frame = frame.f_back
        while frame is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
            found.append(frame.f_code.co_filename)
            frame = frame.f_back
        return [*found[1:], frame.f_code.co_name if frame is not None else "none"]

    checkpoint(
        function, torch.ones(2, requires_grad=True), use_reentrant=True
    ).sum().backward()  # fmt: skip
    assert names == [[torch.autograd.__file__, "backward"]], (
        "between the engine and CheckpointFunction.backward there must be one frame of "
        "torch/autograd/__init__.py and no other"
    )
