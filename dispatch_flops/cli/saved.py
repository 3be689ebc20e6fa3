"""``show`` and ``report``: a saved profile through any renderer."""

from __future__ import annotations

from argparse import Namespace

from dispatch_flops.cli.arguments import Commands, add_command, add_view_options
from dispatch_flops.cli.formats import FORMATS, View
from dispatch_flops.cli.output import OK, emit, read
from dispatch_flops.cli.profiling import show
from dispatch_flops.errors import ProfileFormatError
from dispatch_flops.tree import Profile

_SHOW_EPILOG = """\
examples:
  dispatch-flops show profile.json
  dispatch-flops show profile.json --format markdown --depth 1
  dispatch-flops show profile.json --output profile.csv
  dispatch-flops profile model.py:Net --format json | dispatch-flops show - --fold
"""


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "show", "show a saved profile, in any format", _SHOW_EPILOG)
    parser.add_argument("file", metavar="FILE", help="a profile saved as JSON; - reads stdin")
    add_view_options(parser)
    parser.set_defaults(run=run_show)
    if "html" in FORMATS:
        report = add_command(commands, "report", "make a page for the browser of a saved profile")
        report.add_argument("file", metavar="FILE", help="a profile saved as JSON; - reads stdin")
        report.add_argument("output", metavar="FILE.html", help="the page to write")
        report.set_defaults(run=run_report)


def run_show(options: Namespace) -> int:
    show(load(options.file), options)
    return OK


def run_report(options: Namespace) -> int:
    emit(FORMATS["html"].render(load(options.file), View()), options.output)
    return OK


def load(path: str) -> Profile:
    """The saved profile; raises TargetError or ProfileFormatError naming the file."""
    text = read(path)
    try:
        return Profile.from_json(text)
    except ProfileFormatError as error:
        raise ProfileFormatError(f"{path}: {error}") from None
