"""TODO."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from dispatch_flops.analysis.efficiency import roofline
from dispatch_flops.analysis.headline import ABOVE_PEAK, headline
from dispatch_flops.analysis.machines import MACHINES, Machine, find
from dispatch_flops.cli.formats import choose
from dispatch_flops.cli.output import emit, progress
from dispatch_flops.errors import DispatchFlopsError, TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import View
from dispatch_flops.units import fraction_text, seconds_text

if TYPE_CHECKING:
    from dispatch_flops.cli.targets import Inputs


def machine_named(name: str | None, device: str) -> Machine | None:
    """The machine of that name, or this one, measured; None where none is named."""
    if name is None:
        return None
    if name == "measure":
        from dispatch_flops.timing.peaks import measure_machine

        progress("measuring what a matmul and a copy reach here")
        return measure_machine("cpu" if device == "meta" else device)
    machine = find(name)
    if machine is None:
        raise TargetError(f"--machine {name!r} is none of measure, {', '.join(sorted(MACHINES))}")
    return machine


def _utilisation_text(profile: Profile, machine: Machine) -> str:
    top, roof = headline(profile, machine), roofline(profile.op_totals(), machine)
    return (
        f"{machine.name}: MFU {fraction_text(top.mfu)}, HFU {fraction_text(top.hfu)}; "
        f"at best {seconds_text(roof.attainable_s)}, bound by {roof.bound or 'n/a'}; "
        f"measured {seconds_text(top.seconds)} ({top.seconds_of})"
        f"{f'; {ABOVE_PEAK}' if top.exceeds_peak else ''}"
    )


def show(profile: Profile, options: Namespace, machine: Machine | None = None) -> None:
    """Print the profile, or write it to the file, as the options say."""
    view = View(
        depth=options.depth,
        top=options.top,
        detailed=options.detailed,
        fold=options.fold,
        machine=machine,
    )
    emit(choose(options.format, options.output).render(profile, view), options.output)


def measure(options: Namespace, variables: Mapping[str, Any]) -> Profile:
    """The profile of the options' target. What the user's code prints goes to stderr."""
    with redirect_stdout(sys.stderr):
        return _measure(options, variables)


def _measure(options: Namespace, variables: Mapping[str, Any]) -> Profile:
    import torch

    from dispatch_flops.cli.targets import first_line, parse_shape, prepare
    from dispatch_flops.profilers.model import profile_model

    subject = prepare(
        options.target,
        shapes=[parse_shape(text) for text in options.input_shape],
        inputs=options.inputs,
        dtype=options.dtype,
        device=options.device,
        variables=variables,
        say=progress,
    )
    model: Any = torch.compile(subject.model) if options.compile else subject.model
    try:
        return profile_model(
            model,
            args=subject.inputs.args,
            kwargs=subject.inputs.kwargs,
            warm_up=options.warm_up,
            repeats=options.repeats,
            mode=options.mode,
            causal=options.causal,
            backward=options.backward,
            operator_latency=options.operator_latency,
            device="meta" if options.device == "meta" else None,
        )
    except DispatchFlopsError:
        raise
    except (Exception, SystemExit) as error:
        hint = _hint(error, options, subject.inputs)
        raise TargetError(f"running {options.target} raised {first_line(error)}{hint}") from error


def _hint(error: BaseException, options: Namespace, inputs: Inputs) -> str:
    if not inputs.args and not inputs.kwargs:
        return "; it was run without inputs: give --input-shape or --inputs"
    if not options.input_shape and not options.inputs and options.target.startswith("hf:"):
        names = ", ".join(inputs.kwargs)
        return f"; it was run on default inputs ({names}): give --input-shape or --inputs"
    if "'indices'" in str(error) and "Float" in str(error):
        return "; token ids need an integer dtype: --input-shape 1,128:int64"
    return ""
