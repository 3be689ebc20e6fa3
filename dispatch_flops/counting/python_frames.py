"""Find an operator's origin in Python frames and autograd nodes."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from types import CodeType, FrameType
from typing import Any

import torch

from dispatch_flops import _torch
from dispatch_flops.operators.program_lines import PACKAGE, package_of
from dispatch_flops.profile import OUTSIDE
from dispatch_flops.profile.cost import Phase

ACCUMULATION = f"{OUTSIDE}.gradient accumulation"
_Part = tuple[str, Phase]
_CLIPPING: _Part = (f"{OUTSIDE}.gradient clipping", "optimizer")
_SCALING: _Part = (f"{OUTSIDE}.gradient scaling", "optimizer")
# Parts of torch that run operators after a backward pass, by calling module. Zero-bubble schedules
# of pipelines add up the gradients of weights themselves.
_PARTS: dict[str, _Part] = {
    "torch.nn.utils.clip_grad": _CLIPPING,
    "torch.amp.grad_scaler": _SCALING,
    "torch.distributed.fsdp.sharded_grad_scaler": _SCALING,
    "torch.distributed.pipelining._backward": (ACCUMULATION, "backward"),
}
# The same by calling module and function, where the module has other functions.
_FUNCTIONS: dict[tuple[str, str], _Part] = {
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "clip_grad_norm_"): _CLIPPING,
}
# DeepSpeed's engines and optimizers reduce gradients at the end of ``backward``, after autograd.
# In ``step`` they work on flat buffers of gradients.
_ENGINES = "deepspeed.runtime."
_ENGINE_METHODS: dict[str, Phase] = {"step": "optimizer", "backward": "backward"}
ENGINE = f"{OUTSIDE}.DeepSpeed engine"
# Frames between an operator and the function of torch that runs it, at most. DTensor takes many.
_PARTS_DEPTH = 64
# Nodes between a parameter and the operator that uses it.
_PASSING = ("TBackward0", "TransposeBackward0", "ToCopyBackward0", "ViewBackward0")


def frame_of_operator() -> FrameType:
    """Return the frame that called the operator which a mode is dispatching.

    It is the one that torch names in the operator's warnings. Frames of this package, of other
    modes and of an overload's call are passed over.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        package_of(frame) == PACKAGE
        or frame.f_code.co_name == "__torch_dispatch__"
        or frame.f_globals.get("__name__") == "torch._ops"
    ):
        frame = frame.f_back
    return frame


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame of torch's own, whose function does not call ``locals()``.

    Before Python 3.13, a frame keeps the mapping that it hands out, and with it what its function
    lets go of later. Once emptied, the mapping is filled anew when it is next asked for.
    """
    mapping = frame.f_locals
    variables = dict(mapping)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        mapping.clear()
    return variables


def is_dispatching(mode: Any) -> bool:
    """Return True if this thread runs an operator that ``mode`` dispatches, as Python's kernels.

    Torch takes the mode off the stack meanwhile, and puts it back when the operator returns.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__torch_dispatch__" and variables_of(frame).get("self") is mode:
            return True
        frame = frame.f_back
    return False


def running_modules() -> Counter[int]:
    """Return ``{id of a module: its calls that have not returned}``, of this thread."""
    return Counter(id(call["self"]) for call in _module_calls())


def call_arguments(module: torch.nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of the innermost running call of ``module``, as its hooks left them.

    Global pre-hooks are not given keyword arguments; the call's frame has them. None without such
    a frame.
    """
    call = next((call for call in _module_calls() if call["self"] is module), None)
    return None if call is None else (call["args"], call["kwargs"])


def _module_calls() -> Iterator[Mapping[str, Any]]:
    """Yield the variables of the module calls that run in this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _torch.MODULE_CALL_CODE:
            yield frame.f_locals
        frame = frame.f_back


def is_in_custom_function() -> bool:
    """Return True if the forward of a custom ``torch.autograd.Function`` runs the operator.

    It runs without gradients, whatever the mode is outside. It must be a function called forward:
    to compare each frame with all such functions would take longer than most operators.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code in _methods_below(torch.autograd.Function, "forward"):
            return True
        frame = frame.f_back
    return False


def optimizer_in_step() -> str | None:
    """Return the name of the class of the optimizer whose step runs the operator; None without one.

    For steps of which no hook tells: an optimizer that wraps another one, as those of Opacus do,
    need not call ``Optimizer.__init__``, which adds the hooks.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "step":
            cls = _methods_below(torch.optim.Optimizer, "step").get(frame.f_code)
            if cls is not None:
                return cls.__name__
        frame = frame.f_back
    return None


def _methods_below(base: type, name: str) -> dict[CodeType, type]:
    """Return ``{code: class}`` of the methods of that name, of ``base`` and the classes below."""
    classes = [base]
    for cls in classes:  # grows in the loop
        classes += cls.__subclasses__()
    methods: list[tuple[Any, type]] = [(vars(cls).get(name), cls) for cls in classes]
    inner = [(inspect.unwrap(getattr(found, "__func__", found)), cls) for found, cls in methods]
    return {found.__code__: cls for found, cls in inner if inspect.isfunction(found)}


def first_ended(calls: Iterable[torch.nn.Module], entering: torch.nn.Module | None) -> int | None:
    """Return the position of the first of these calls that has ended; None if none has.

    calls: the modules called, outermost first. entering: a module whose call has just started and
    that is not among them.
    """
    running = running_modules()
    running[id(entering)] -= 1
    for position, module in enumerate(calls):
        running[id(module)] -= 1
        if running[id(module)] < 0:
            return position
    return None


def named_part_of_torch() -> _Part | None:
    """Return the name for the part of torch or DeepSpeed that runs the operator, and its phase.

    None if another part runs it.
    """
    frame = sys._getframe(1)
    for _ in range(_PARTS_DEPTH):
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_name
        part = _PARTS.get(module) or _FUNCTIONS.get((module, name))
        if part is not None:
            return part
        if module.startswith(_ENGINES) and name in _ENGINE_METHODS:
            return ENGINE, _ENGINE_METHODS[name]
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


# Stands for a Python frame that may have returned: its id, which another frame can get then, and
# its code. A reference to the frame itself would keep its variables alive.
FrameKey = tuple[int, CodeType]


def calling_frame(hook: str) -> FrameKey:
    """Return the key of the Python frame that called the hook of that name."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == hook:
        frame = frame.f_back  # type: ignore[assignment]
    return id(frame), frame.f_code


def has_returned(key: FrameKey) -> bool:
    """Return True if the Python frame of that key does not run in this thread any more."""
    frame_id, code = key
    frame = sys._getframe(1)
    while frame is not None:
        if id(frame) == frame_id and frame.f_code is code:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


# Stands for the Python frame that called an operator: its key and the code of its own caller.
CallerKey = tuple[int, CodeType, CodeType | None]


def is_mode_of_package(frame: FrameType) -> bool:
    """Return True for the frame in which a mode of this package dispatches an operator."""
    is_mode = frame.f_code.co_name == "__torch_dispatch__"
    return is_mode and frame.f_globals["__name__"].startswith("dispatch_flops.")


def operator_caller() -> CallerKey | None:
    """Return the key of the Python frame that called the operator which a mode is dispatching.

    None where no mode is, as in a kernel that autograd calls; where C++ called the operator; and
    where another mode did, whose frames are alike for every operator.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back
    while frame is not None and is_mode_of_package(frame):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name == "__torch_dispatch__":
        return None
    above = None if frame.f_back is None else frame.f_back.f_code
    if above is not None and above.co_name == "__torch_dispatch__":  # by an overload's __call__
        return None
    return id(frame), frame.f_code, above


def owner_by_parameters(node: Any, owners: Mapping[int, str]) -> str | None:
    """Return the fqn of the module that holds all parameters on which a backward node works.

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
