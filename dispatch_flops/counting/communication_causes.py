"""Find the module that causes a communication call, in the Python frames that led to it.

FSDP gathers the parameters of one module while another runs, and pipelines send between modules.
Their frames name the module and say which pass the call serves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.python_frames import variables_of
from dispatch_flops.profile.cost import Phase

# Training states of FSDP2 and of FSDP1 in which a parameter group serves the backward pass.
_BACKWARD_STATES = frozenset(("PRE_BACKWARD", "POST_BACKWARD", "BACKWARD_PRE", "BACKWARD_POST"))
_SETUP = frozenset(("_initialize_pp_stages", "_initialize_stage", "_initialize_stages"))
_BETWEEN_STAGES = ("send", "recv")  # collectives below a schedule are those of its stages
_BACKWARD_ACTIONS = frozenset(("SEND_B", "RECV_B"))


@dataclass(frozen=True, slots=True)
class Cause:
    """Module that causes a call. phase: the one that the call serves; None: that of the pass."""

    module: nn.Module
    phase: Phase | None


def find_cause(kind: str) -> Cause | None:
    """Return what the running frames say of a call of that kind; None if they say nothing."""
    if not sys.modules.keys() & {_torch.FSDP2, *_torch.FSDP1, _torch.PIPELINES}:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        cause = None
        if name == _torch.FSDP2:
            cause = _of_fsdp2(variables_of(frame).get("self"))
        elif name in _torch.FSDP1:
            variables = variables_of(frame)
            cause = _of_fsdp1(variables.get("handle") or variables.get("self"))
        elif name == _torch.PIPELINES and kind in _BETWEEN_STAGES:
            return _of_pipeline(frame, kind)
        if cause is not None:
            return cause
        frame = frame.f_back
    return None


def is_in_pipeline_setup() -> bool:
    """Return True while a pipeline's first step infers metadata: it runs an extra micro-batch."""
    if _torch.PIPELINES not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _SETUP and frame.f_globals.get("__name__") == _torch.PIPELINES:
            return True
        frame = frame.f_back
    return False


def _of_fsdp2(group: Any) -> Cause | None:
    """Return the module of an ``FSDPParamGroup``; None for another object."""
    modules = getattr(group, "modules", None)
    return Cause(modules[0], _phase_of(group)) if isinstance(modules, tuple) and modules else None


def _of_fsdp1(handle: Any) -> Cause | None:
    """Return the module of a ``FlatParamHandle``; None for another object."""
    module = getattr(handle, "_fully_sharded_module", None)
    return Cause(module, _phase_of(handle)) if isinstance(module, nn.Module) else None


def _phase_of(group: Any) -> Phase | None:
    state = getattr(group, "_training_state", None)
    return "backward" if getattr(state, "name", "") in _BACKWARD_STATES else None


def _of_pipeline(frame: FrameType | None, kind: str) -> Cause | None:
    """Return the module of the stage, and the pass that a send or a receive belongs to.

    A batch of both kinds is described as "fwd_send_bwd_recv"; schedules of several stages name
    the action instead.
    """
    stage: Any = None
    is_backward = False
    while frame is not None and stage is None:
        if frame.f_globals.get("__name__") == _torch.PIPELINES:
            variables = variables_of(frame)
            is_backward |= f"bwd_{kind}" in (variables.get("desc") or "")
            action = getattr(variables.get("action"), "computation_type", None)
            is_backward |= getattr(action, "name", "") in _BACKWARD_ACTIONS
            stage = variables.get("stage") or getattr(variables.get("self"), "_stage", None)
        frame = frame.f_back
    module = getattr(stage, "submod", None)
    if not isinstance(module, nn.Module):
        return None
    return Cause(module, "backward" if is_backward else "forward")
