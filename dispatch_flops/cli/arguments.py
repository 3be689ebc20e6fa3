"""Options that several commands share, and what their text means."""

from __future__ import annotations

import argparse
import ast
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any

from dispatch_flops.cli.formats import FORMATS
from dispatch_flops.errors import TargetError
from dispatch_flops.profile.cost import PHASES

Commands = Any  # argparse's _SubParsersAction, which has no public name

TARGETS = """\
TARGET is one of
  package.module:NAME   NAME is a function that returns the model (or the model and its inputs),
  path/to/file.py:NAME  an nn.Module class, or a model
  hf:config.json        a transformers model with random weights; hf:config.json:BertForMaskedLM
                        chooses the class (default AutoModel)
  timm:NAME             a model of timm
  exported.pt2          a file that torch.export.save wrote
"""


def add_command(commands: Commands, name: str, help_text: str, epilog: str = "") -> ArgumentParser:
    """A command with its help; ``--debug`` is understood by all of them."""
    parser: ArgumentParser = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of an error, and Python's warnings"
    )
    return parser


def add_model_options(parser: ArgumentParser) -> None:
    """How the model is built and run."""
    group = parser.add_argument_group("the model and its inputs")
    group.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="SHAPE",
        help="a tensor of ones: 1,3,224,224 or 1,128:int64 (a dtype after the colon); name=1,128 "
        "for a keyword input; repeat it for several inputs; names instead of sizes are given by "
        "--set",
    )
    group.add_argument(
        "--inputs",
        metavar="FACTORY",
        help="module:NAME or file.py:NAME, a function that returns the input, a tuple of inputs, "
        "a dict of keyword inputs, or a tuple and a dict",
    )
    group.add_argument(
        "--dtype",
        help="float32, bfloat16, ...: of the model and its inputs; int64 and other integers: of "
        "inputs given by --input-shape (default: as the model is)",
    )
    add_device_option(group)
    group.add_argument(
        "--mode", default="forward", metavar="NAME", help="the method to call (default: forward)"
    )
    group.add_argument(
        "--backward", action="store_true", help="also run backward, from the sum of the outputs"
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile the model: latency is that of the compiled model, counts are of its "
        "eager code",
    )
    add_run_options(parser)


def add_device_option(parser: Any) -> None:
    """parser: or a group of one."""
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu, cuda, cuda:1, ... or meta: shapes alone, without memory or latency "
        "(default: cpu)",
    )


def add_run_options(parser: ArgumentParser) -> None:
    """How often it is run, and what is counted."""
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--warm-up", type=natural, default=1, metavar="N", help="runs before the measured one (1)"
    )
    group.add_argument(
        "--repeats", type=_positive, default=1, metavar="N", help="timed runs, median taken (1)"
    )
    group.add_argument(
        "--operator-latency",
        action="store_true",
        help="also take the time of every operator, while counting",
    )
    group.add_argument(
        "--causal",
        choices=("full", "half"),
        default="full",
        help="count of causal attention the full rectangle, or what the mask keeps (full)",
    )


def add_view_options(parser: ArgumentParser, *, fold: bool = False) -> None:
    """How a profile is shown."""
    group = parser.add_argument_group("the printout")
    listed = "; ".join(f"{name}: {entry.help}" for name, entry in FORMATS.items())
    group.add_argument(
        "--format",
        choices=tuple(FORMATS),
        help=f"{listed} (default: by the ending of --output, else deepspeed)",
    )
    group.add_argument("--output", metavar="FILE", help="write to a file instead of stdout")
    group.add_argument(
        "--depth",
        type=natural,
        metavar="N",
        help="levels of modules below the model: 0 shows the model alone (default: all)",
    )
    group.add_argument(
        "--top", type=_positive, default=1, metavar="K", help="classes per depth in the summary (1)"
    )
    group.add_argument(
        "--detailed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show the tree of modules",
    )
    group.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        default=fold,
        help="show a run of identical modules as one, with their sums",
    )


def add_machine_option(parser: ArgumentParser, help_text: str) -> None:
    parser.add_argument("--machine", metavar="NAME", help=help_text)


def add_set_option(parser: ArgumentParser, help_text: str, *names: str) -> None:
    parser.add_argument(
        "--set",
        *names,
        dest="set",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help=help_text,
    )


def add_phase_option(parser: ArgumentParser) -> None:
    parser.add_argument("--phase", choices=PHASES, help="only this phase (default: all together)")


def assignment(text: str) -> tuple[str, str]:
    """``"batch=4"`` as name and text of the value; raises TargetError where it is none."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not value:
        raise TargetError(f"--set {text!r}: write NAME=VALUE, such as batch=4")
    return name, value


def assignments(texts: Iterable[str]) -> dict[str, str]:
    """``["batch=4"]`` as ``{"batch": "4"}``; raises TargetError where a name is given twice."""
    given: dict[str, str] = {}
    for name, value in map(assignment, texts):
        if name in given:
            raise TargetError(f"--set {name}: given twice, as {given[name]} and as {value}")
        given[name] = value
    return given


def plain_value(text: str) -> Any:
    """A Python literal where the text is one, such as ``4``, ``0.5`` or ``True``; else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def natural(text: str) -> int:
    """A whole number of at least 0, for argparse."""
    return _at_least(0, text)


def _positive(text: str) -> int:
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)
