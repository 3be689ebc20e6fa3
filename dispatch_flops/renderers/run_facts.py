"""What the run was: its inputs, modes, versions, command and date, for every format."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from dispatch_flops.profile import RunInfo, TensorInput
from dispatch_flops.renderers.text import one_line

_MOST_INPUTS = 8  # that are shown; a saved profile has all of them
_GRAD_MODES = {"grad": "gradients on", "no_grad": "no_grad", "inference": "inference_mode"}


def run_facts(run: RunInfo) -> Iterator[tuple[str, str]]:
    """Yield label and text of each recorded fact, each text on one line.

    list(run_facts(profile.run))  # [("Inputs", "x float32 [3, 7] on cpu"), ...]
    """
    if run.inputs is not None:
        yield "Inputs", inputs_text(run)
    if modes := ", ".join(_modes(run)):
        yield "Mode", modes
    if run.python_version is not None:
        yield "Versions", ", ".join(_versions(run))
    if run.platform is not None:
        yield "Platform", one_line(run.platform)
    if run.command is not None:
        yield "Command", one_line(run.command)
    if run.date is not None:
        yield "Date", one_line(run.date)


def inputs_text(run: RunInfo) -> str:
    """Return the first input tensors with dtype, shape and device."""
    if run.inputs is None:
        return "not recorded"
    shown = [_input(tensor) for tensor in islice(run.inputs, _MOST_INPUTS)]
    more = len(run.inputs) - len(shown)
    return "; ".join([*shown, *([f"and {more} more"] if more else [])]) or "no tensors"


def mode_text(run: RunInfo) -> str:
    """Return the modes of the model and of torch; "not recorded" for none."""
    return ", ".join(_modes(run)) or "not recorded"


def shape_text(shape: tuple[int, ...] | None) -> str:
    """Format a shape: ``(3, 7) -> "[3, 7]"``; an unknown size is "?", a nested shape "nested"."""
    if shape is None:
        return "nested"
    return f"[{', '.join('?' if size < 0 else str(size) for size in shape)}]"


def _input(tensor: TensorInput) -> str:
    return one_line(f"{tensor.name} {tensor.dtype} {shape_text(tensor.shape)} on {tensor.device}")


def _modes(run: RunInfo) -> Iterator[str]:
    if run.training is not None:
        yield "training" if run.training else "evaluation"
    if run.grad_mode is not None:
        yield one_line(_GRAD_MODES.get(run.grad_mode, run.grad_mode))
        yield f"autocast {one_line(run.autocast)}" if run.autocast else "autocast off"


def _versions(run: RunInfo) -> Iterator[str]:
    for name, version in (
        ("dispatch_flops", run.dispatch_flops_version),
        ("torch", run.torch_version),
        ("Python", run.python_version),
    ):
        if version is not None:
            yield f"{name} {one_line(version)}"
