"""``profile`` and ``demo``: build a model, run it, show what it cost."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from dispatch_flops.cli.arguments import (
    TARGETS,
    Commands,
    add_command,
    add_device_option,
    add_machine_option,
    add_model_options,
    add_run_options,
    add_set_option,
    add_view_options,
    assignments,
    plain_value,
)
from dispatch_flops.cli.formats import View, choose
from dispatch_flops.cli.output import OK, emit, progress
from dispatch_flops.cli.sweep_plot import add_plot_option
from dispatch_flops.efficiency import roofline
from dispatch_flops.errors import DispatchFlopsError, TargetError
from dispatch_flops.hardware import MACHINES, Machine, find
from dispatch_flops.renderers.headline import ABOVE_PEAK, headline
from dispatch_flops.tree import Profile
from dispatch_flops.units import fraction_text, seconds_text

if TYPE_CHECKING:
    from dispatch_flops.targets import Inputs

DEMO = "dispatch_flops.demo:bert_base"

_EPILOG = f"""\
{TARGETS}
examples:
  dispatch-flops profile model.py:Net --input-shape 8,3,32,32 --top 3 --depth 2
  dispatch-flops profile my.models:make --inputs my.data:one_batch --backward --device cuda
  dispatch-flops profile model.py:Net --input-shape ids=1,128:int64 --input-shape mask=1,128
  dispatch-flops profile hf:config.json:AutoModelForCausalLM --device meta --set batch=4 seq=2048
  dispatch-flops profile model.py:Net --input-shape 8,3,32,32 --output profile.json

Integer inputs, such as token ids, need their dtype: 1,128:int64.
"""


def add_commands(commands: Commands) -> None:
    profile = add_command(commands, "profile", "profile a model of your own", _EPILOG)
    profile.add_argument("target", metavar="TARGET", help="the model: see below")
    add_model_options(profile)
    add_set_option(
        profile, "sizes for names in --input-shape, and arguments of the factories of that name"
    )
    profile.add_argument(
        "--sweep",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="profile at many sizes, batch=1,2,4,8 seq=128..4096, as the command sweep does",
    )
    add_plot_option(profile)
    add_machine_option(
        profile,
        "how near the run was to a machine's peaks, in a page for the browser and on stderr: a "
        "device's name, such as 'NVIDIA H200', or measure for what this machine reaches",
    )
    add_view_options(profile)
    profile.set_defaults(run=run_profile)

    demo = add_command(commands, "demo", "profile an embedded BERT-base with random weights")
    add_device_option(demo)
    add_run_options(demo)
    add_view_options(demo, fold=True)
    demo.set_defaults(
        run=run_profile,
        target=DEMO,
        set=[],
        input_shape=[],
        inputs=None,
        dtype=None,
        mode="forward",
        backward=False,
        compile=False,
        sweep=[],
        plot=None,
        machine=None,
    )


def run_profile(options: Namespace) -> int:
    if options.sweep:
        from dispatch_flops.cli.sweep import run_for_profile

        if options.machine is not None:
            raise TargetError("--machine is for one run: leave out --sweep")
        return run_for_profile(options)
    if options.plot is not None:
        raise TargetError("--plot draws a sweep: give --sweep batch=1,2,4,8 or seq=128..4096")
    machine = machine_named(options.machine, options.device)
    variables = {name: plain_value(text) for name, text in assignments(options.set).items()}
    progress(f"profiling {options.target} on {options.device}")
    profile = measure(options, variables)
    show(profile, options, machine)
    if machine is not None:
        progress(_utilisation_text(profile, machine))
    return OK


def machine_named(name: str | None, device: str) -> Machine | None:
    """The machine of that name, or this one, measured; None where none is named."""
    if name is None:
        return None
    if name == "measure":
        from dispatch_flops.measure import measure as measured

        progress("measuring what a matmul and a copy reach here")
        return measured("cpu" if device == "meta" else device)
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

    from dispatch_flops.profiling import profile_model
    from dispatch_flops.targets import first_line, parse_shape, prepare

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
