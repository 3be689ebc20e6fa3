"""``profile`` and ``demo``: build a model, run it, show what it cost."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

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
from dispatch_flops.cli.output import OK, progress
from dispatch_flops.cli.sweep_plot import add_plot_option
from dispatch_flops.errors import TargetError

if TYPE_CHECKING:
    pass
from dispatch_flops.cli.run import _utilisation_text, machine_named, measure, show

DEMO = "dispatch_flops.cli.demo:bert_base"

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
