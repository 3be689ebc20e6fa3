"""``show`` and ``report``: a saved profile through any renderer."""

from __future__ import annotations

from argparse import Namespace

from dispatch_flops.cli.arguments import Commands, add_command, add_machine_option, add_view_options
from dispatch_flops.cli.formats import FORMATS
from dispatch_flops.cli.output import OK, emit, read
from dispatch_flops.cli.run import machine_named, show
from dispatch_flops.errors import ProfileFormatError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import View

_SHOW_EPILOG = """\
examples:
  dispatch-flops show profile.json
  dispatch-flops show profile.json --format markdown --depth 1
  dispatch-flops show profile.json --output profile.csv
  dispatch-flops profile model.py:Net --format json | dispatch-flops show - --fold
"""

_MACHINE = (
    "whose peaks a page for the browser holds the run against: a device's name, such as "
    "'NVIDIA H200', or measure for what this machine reaches (default: the profile's device)"
)


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "show", "show a saved profile, in any format", _SHOW_EPILOG)
    parser.add_argument("file", metavar="FILE", help="a profile saved as JSON; - reads stdin")
    add_machine_option(parser, _MACHINE)
    add_view_options(parser)
    parser.set_defaults(run=run_show)
    report = add_command(commands, "report", "make a page for the browser of a saved profile")
    report.add_argument("file", metavar="FILE", help="a profile saved as JSON; - reads stdin")
    report.add_argument("output", metavar="FILE.html", help="the page to write")
    add_machine_option(report, _MACHINE)
    report.set_defaults(run=run_report)


def run_show(options: Namespace) -> int:
    profile = load(options.file)
    show(profile, options, machine_named(options.machine, profile.run.device))
    return OK


def run_report(options: Namespace) -> int:
    profile = load(options.file)
    view = View(machine=machine_named(options.machine, profile.run.device))
    emit(FORMATS["html"].render(profile, view), options.output)
    return OK


def load(path: str) -> Profile:
    """The saved profile; raises TargetError or ProfileFormatError naming the file."""
    text = read(path)
    try:
        return Profile.from_json(text)
    except ProfileFormatError as error:
        raise ProfileFormatError(f"{path}: {error}") from None
