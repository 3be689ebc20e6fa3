"""The commands ``profile`` and ``demo``: build a model, run it and show its profile."""

from __future__ import annotations

from argparse import Namespace

from dispatch_flops.analysis.efficiency import roofline
from dispatch_flops.analysis.headline import headline
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.cli.arguments import (
    FORMAT_HELP,
    TARGET_HELP,
    Commands,
    add_command,
    add_device_option,
    add_machine_option,
    add_model_options,
    add_run_options,
    add_set_option,
    add_target_argument,
    add_view_options,
    machine_named,
    parse_assignments,
    parse_value,
)
from dispatch_flops.cli.clusters import add_mesh_option
from dispatch_flops.cli.exit_codes import OK
from dispatch_flops.cli.formats import check_options, format_named, refuse_options
from dispatch_flops.cli.output import print_progress
from dispatch_flops.cli.run import measure
from dispatch_flops.cli.show import show_profile
from dispatch_flops.cli.sweep import SWEEP_FORMATS, run_sweep
from dispatch_flops.cli.sweep_plot import add_plot_option
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.text import about, at_least
from dispatch_flops.units import fraction_text, seconds_text

DEMO = "dispatch_flops.cli.demo:bert_base"

_EPILOG = f"""\
{TARGET_HELP}
{FORMAT_HELP}
examples:
  dispatch-flops profile model.py:Net --input-shape 8,3,32,32 --top 3 --depth 2
  dispatch-flops profile my.models:make --inputs my.data:one_batch --backward --device cuda
  dispatch-flops profile model.py:Net --input-shape 8,3,32,32 --train --optimizer adamw
  dispatch-flops profile model.py:Net --input-shape ids=1,128:int64 --input-shape mask=1,128
  dispatch-flops profile hf:config.json:AutoModelForCausalLM --device meta --set batch=4 seq=2048
  dispatch-flops profile model.py:Net --input-shape 8,3,32,32 --output profile.json
  torchrun --nproc-per-node 4 -m dispatch_flops profile job.py:job --mesh dp=2,tp=2

Integer inputs such as token ids need their dtype: 1,128:int64.
"""

_DEMO_EPILOG = f"""\
{FORMAT_HELP}
examples:
  dispatch-flops demo
  dispatch-flops demo --device meta --depth 2 --format table
"""


def add_profile(commands: Commands) -> None:
    parser = add_command(commands, "profile", "profile a model", _EPILOG)
    add_target_argument(parser)
    add_model_options(parser)
    add_set_option(
        parser, "values of sizes named in --input-shape, and of keyword arguments of the factories"
    )
    parser.add_argument(
        "--sweep",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUES",
        help="profile at every combination of values, such as batch=1,2,4,8 seq=128..4096, as the "
        "command sweep does",
    )
    add_plot_option(parser)
    add_mesh_option(parser)
    add_machine_option(
        parser,
        "compare the run with a machine's peak rates, on stderr, in the overview and in an HTML "
        "page: a name such as H100, measure for this machine, or the path of a JSON file",
    )
    add_view_options(parser)
    defaults = vars(parser.parse_args(["TARGET"]))
    del defaults["target"], defaults["debug"]
    parser.set_defaults(run=run_profile, defaults=defaults)


def run_profile(options: Namespace) -> int:
    if options.mesh is not None:
        from dispatch_flops.cli.real_ranks import run_profile_on_ranks

        return run_profile_on_ranks(options)
    if options.sweep:
        return _run_sweep(options)
    if options.plot is not None:
        raise TargetError("--plot needs a sweep; add --sweep, such as --sweep seq=128..4096")
    check_options(options, but=("machine",))  # its MFU is on stderr
    machine = machine_named(options.machine, options.device)
    assigned = parse_assignments(options.set)
    variables = {name: parse_value(text) for name, text in assigned.items()}
    print_progress(f"profiling {options.target} on {options.device}")
    profile = measure(options, variables)
    show_profile(profile, options, machine)
    if machine is not None:
        print_progress(_utilisation_text(profile, machine))
    return OK


def _run_sweep(options: Namespace) -> int:
    """Run ``sweep``; the values of --set apply at every point."""
    if options.format not in (None, *SWEEP_FORMATS):
        raise TargetError(
            f"--format {options.format} is not available for a sweep; use one of "
            f"{', '.join(SWEEP_FORMATS)}"
        )
    refuse_options(options, of="a sweep", but=("machine",))
    format = format_named(options, SWEEP_FORMATS)
    changed = {"set": [*options.set, *options.sweep], "format": format}
    return run_sweep(Namespace(**{**vars(options), **changed}))


def _utilisation_text(profile: Profile, machine: Machine) -> str:
    top, roof = headline(profile, machine), roofline(profile.op_totals(), machine)
    return (
        f"{machine.name}: MFU {at_least(fraction_text(top.mfu), top.mfu_is_lower_bound)}"
        f"{f' ({top.why_no_mfu})' if top.why_no_mfu else ''}, "
        f"HFU {at_least(fraction_text(top.hfu), top.hfu_is_lower_bound)}"
        f"{f' ({top.why_no_hfu})' if top.why_no_hfu not in ('', top.why_no_mfu) else ''}; "
        f"at best {seconds_text(roof.attainable_s)}, bound by {roof.bound or 'n/a'}; "
        f"measured {about(seconds_text(top.seconds), top.seconds_are_inexact)} "
        f"({top.seconds_of})"
        f"{f'; {top.warning}' if top.warning else ''}"
    )


def add_demo(commands: Commands) -> None:
    parser = add_command(
        commands, "demo", "profile a built-in BERT-base with random weights", _DEMO_EPILOG
    )
    add_device_option(parser)
    add_run_options(parser)
    add_view_options(parser)
    parser.set_defaults(
        run=run_demo,
        target=DEMO,
        input_shape=[],
        inputs=None,
        dtype=None,
        mode="forward",
        backward=False,
        train=False,
        compile=False,
    )


def run_demo(options: Namespace) -> int:
    check_options(options)
    print_progress(f"profiling {options.target} on {options.device}")
    show_profile(measure(options, variables={}), options)
    return OK
