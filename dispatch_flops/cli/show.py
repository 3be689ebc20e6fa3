"""The commands ``show`` and ``report``: a saved profile in any format."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.cli.arguments import (
    FORMAT_HELP,
    Commands,
    add_command,
    add_machine_option,
    add_profile_argument,
    add_view_options,
    machine_named,
    output_path,
)
from dispatch_flops.cli.cluster_formats import show_cluster
from dispatch_flops.cli.exit_codes import OK
from dispatch_flops.cli.formats import FORMATS, check_options, choose_format, refuse_options
from dispatch_flops.cli.output import emit
from dispatch_flops.errors import ProfileFormatError, TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cluster import ClusterProfile, is_cluster
from dispatch_flops.renderers import View
from dispatch_flops.renderers.terminal import terminal_view

_SHOW_EPILOG = f"""\
{FORMAT_HELP}
examples:
  dispatch-flops show profile.json
  dispatch-flops show profile.json --format markdown --depth 1
  dispatch-flops show profile.json --output profile.csv
  dispatch-flops show cluster.json --format comm
  dispatch-flops profile model.py:Net --format json | dispatch-flops show - --fold
"""

_REPORT_EPILOG = """\
examples:
  dispatch-flops report profile.json report.html
  dispatch-flops report profile.json report.html --machine 'NVIDIA H200'
"""

_MERGED = "these are the merged profiles of several ranks; only show and merge read them"
_MACHINE_HELP = (
    "compare the run with this machine's peak rates{}: a name such as H100, measure for this "
    "machine, or the path of a JSON file (default: the profiled device)"
)


def add_show(commands: Commands) -> None:
    parser = add_command(commands, "show", "show a saved profile in any format", _SHOW_EPILOG)
    add_profile_argument(parser)
    add_machine_option(parser, _MACHINE_HELP.format(", in the overview and in an HTML page"))
    add_view_options(parser)
    parser.set_defaults(run=run_show)


def run_show(options: Namespace) -> int:
    saved = load_saved(options.file)
    if isinstance(saved, ClusterProfile):
        refuse_options(options, of="the profiles of several ranks", but=("depth",))
        show_cluster(saved, options)
    else:
        check_options(options)
        show_profile(saved, options, machine_named(options.machine, saved.run.device))
    return OK


def add_report(commands: Commands) -> None:
    parser = add_command(
        commands, "report", "write a saved profile as an HTML page", _REPORT_EPILOG
    )
    add_profile_argument(parser)
    parser.add_argument(
        "output", type=output_path, metavar="FILE.html", help="the page to write; - is stdout"
    )
    add_machine_option(parser, _MACHINE_HELP.format(""))
    parser.set_defaults(run=run_report)


def run_report(options: Namespace) -> int:
    if Path(options.output or "").suffix.lower() not in ("", ".html", ".htm"):
        raise TargetError(
            f"report writes HTML, and {options.output!r} does not end in .html; for other formats "
            "use dispatch-flops show"
        )
    profile = load_profile(options.file)
    view = View(machine=machine_named(options.machine, profile.run.device))
    emit(FORMATS["html"].render(profile, view), options.output)
    return OK


def load_profile(path: str) -> Profile:
    """Read a saved profile; raises as ``load_saved``, and ProfileFormatError for several ranks."""
    saved = load_saved(path)
    if isinstance(saved, ClusterProfile):
        raise ProfileFormatError(f"{path}: {_MERGED}")
    return saved


def load_saved(path: str) -> Profile | ClusterProfile:
    """Read a profile, or the profiles of several ranks, from a file, or from stdin for ``-``.

    Raises TargetError if the file cannot be read, ProfileFormatError if it is neither.
    """
    text = _read_text(path)
    try:
        return ClusterProfile.from_json(text) if is_cluster(text) else Profile.from_json(text)
    except ProfileFormatError as error:
        raise ProfileFormatError(f"{path}: {error}") from None


def _read_text(path: str) -> str:
    """Read a text file, or stdin for ``-``; raises TargetError if it cannot be read."""
    if path == "-" and sys.stdin is None:
        raise TargetError("cannot read '-': stdin is closed")
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise TargetError(f"cannot read {path!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TargetError(f"cannot read {path!r}: it is not a text file") from None
    except ValueError as error:  # a null character in the path
        raise TargetError(f"cannot read {path!r}: {error}") from None
    if path == "-" and not text:
        raise TargetError("cannot read '-': stdin is empty, or was read before")
    return text


def show_profile(profile: Profile, options: Namespace, machine: Machine | None = None) -> None:
    """Print the profile, or write it to a file, as the options of ``add_view_options`` say."""
    view = View(
        depth=options.depth,
        top=options.top,
        detailed=options.detailed,
        fold=options.fold,
        machine=machine,
        sort=options.sort,
        columns=options.columns,
        **({} if options.output else terminal_view()),
    )
    emit(choose_format(options.format, options.output).render(profile, view), options.output)
