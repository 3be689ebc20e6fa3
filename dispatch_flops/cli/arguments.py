"""Command-line options that several commands share, and the parsing of their values."""

from __future__ import annotations

import argparse
import ast
from argparse import ArgumentParser
from collections.abc import Iterable
from typing import Any, get_args

from dispatch_flops.analysis.figures import Key
from dispatch_flops.analysis.machine_files import load_machine
from dispatch_flops.analysis.machines import MACHINES, Machine, find
from dispatch_flops.cli.formats import DEFAULT, FORMATS
from dispatch_flops.cli.output import print_progress
from dispatch_flops.errors import TargetError
from dispatch_flops.profile.cost import PHASES
from dispatch_flops.renderers import overview
from dispatch_flops.renderers.overview.columns import column_names

Commands = Any  # argparse's _SubParsersAction, which has no public name
OPTIMIZERS = ("adamw", "adam", "sgd")  # those of ``profilers.training_step``, without torch

TARGET_HELP = """\
TARGET is one of:
  package.module:NAME   a name in a module that can be imported
  path/to/file.py:NAME  a name in a Python file
  hf:config.json        a transformers AutoModel with random weights;
                        hf:config.json:BertForMaskedLM selects another class
  timm:NAME             a timm model with random weights
  exported.pt2          a program saved by torch.export.save
A NAME in Python is a function that returns the model (or the model and its inputs), an nn.Module
class or a model.
"""

FORMAT_HELP = "\n".join(
    [
        "FORMAT is one of:",
        *(
            f"  {name:<15}{entry.help}{f' ({entry.suffix})' if entry.suffix else ''}"
            for name, entry in FORMATS.items()
        ),
        "",
    ]
)

_DEPTH_HELP = "levels of submodules to show; 0 shows the model alone"
DEPTH_HELP = f"{_DEPTH_HELP} (default: all)"


def add_command(commands: Commands, name: str, help_text: str, epilog: str = "") -> ArgumentParser:
    """Add a command and return its parser, with the options that every command has."""
    parser: ArgumentParser = commands.add_parser(
        name,
        help=help_text,
        description=f"{help_text[0].upper()}{help_text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--debug", action="store_true", help="print the traceback of an error, and Python warnings"
    )
    return parser


def add_target_argument(parser: ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="the model to profile (see below)")


def add_profile_argument(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a profile saved as JSON; - reads stdin")


def add_model_options(parser: ArgumentParser) -> None:
    """Add the options that build and call the model, and those of ``add_run_options``."""
    group = parser.add_argument_group("model and inputs")
    group.add_argument(
        "--input-shape",
        action="append",
        default=[],
        metavar="SHAPE",
        help="pass a tensor of ones of this shape: 1,3,224,224; with a dtype: 1,128:int64; as a "
        "keyword argument: mask=1,128. A size may be a name that --set gives. Repeat the option "
        "for several inputs",
    )
    group.add_argument(
        "--inputs",
        metavar="FACTORY",
        help="pass what a function returns, named as module:NAME or file.py:NAME: an input, a "
        "tuple of inputs, a dict of keyword arguments, or a tuple and a dict",
    )
    group.add_argument(
        "--dtype",
        help="a floating-point or complex dtype such as bfloat16 converts the model and its "
        "inputs; any other dtype such as int64 applies to the inputs of --input-shape (default: "
        "the model's dtype)",
    )
    add_device_option(group)
    group.add_argument(
        "--mode",
        default="forward",
        metavar="NAME",
        help="the method of the model to call (default: forward)",
    )
    group.add_argument(
        "--backward",
        action="store_true",
        help="also run the backward pass, from the sum of the outputs",
    )
    group.add_argument(
        "--train",
        action="store_true",
        help="run a whole training step in training mode: forward, loss, backward and optimizer; "
        "the loss is the output's loss if it has one, else the sum of the outputs",
    )
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        help="the optimizer of --train (default: sgd)",
    )
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile the model with torch.compile: latency is that of the compiled code, counts "
        "are those of the eager code",
    )
    add_run_options(parser)


def add_device_option(parser: Any) -> None:
    """Add ``--device`` to a parser or an argument group."""
    parser.add_argument(
        "--device",
        default="cpu",
        help="cpu, cuda, cuda:1, ..., or meta, which counts from shapes alone: it needs no memory "
        "and measures no latency (default: cpu)",
    )


def add_run_options(parser: ArgumentParser) -> None:
    """Add the options of the measurement: runs, operator latency, conventions."""
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--warm-up",
        type=natural,
        default=1,
        metavar="N",
        help="unmeasured runs before the measured ones (default: 1)",
    )
    group.add_argument(
        "--repeats",
        type=positive,
        default=1,
        metavar="N",
        help="timed runs, whose median is reported (default: 1)",
    )
    group.add_argument(
        "--operator-latency",
        action="store_true",
        help="also measure the latency of every operator, in the run that counts",
    )
    group.add_argument(
        "--memory",
        action="store_true",
        help="also follow what is allocated, and show the peak and what it consists of",
    )
    group.add_argument(
        "--memory-timeline",
        action="store_const",
        const="timeline",
        dest="memory",
        help="as --memory, and record memory over the operators, for --format json and html",
    )
    add_causal_option(group)
    add_flops_option(group)
    group.add_argument(
        "--target-device",
        choices=("cpu", "cuda"),
        help="with --device meta, run attention, dropout, RMS norm and optimizers as on this one "
        "(default: cpu)",
    )


def add_causal_option(parser: Any) -> None:
    """Add ``--causal`` to a parser or an argument group."""
    parser.add_argument(
        "--causal",
        choices=("full", "half"),
        default="full",
        help="count causal attention in full, or only the half that the mask keeps (default: full)",
    )


def add_flops_option(parser: Any) -> None:
    """Add ``--flops`` to a parser or an argument group."""
    parser.add_argument(
        "--flops",
        choices=("all", "contractions"),
        default="all",
        help="count all FLOPs, or only 2 for each MAC of a contraction (default: all)",
    )


def add_view_options(parser: ArgumentParser) -> None:
    """Add the options that select how a profile is shown."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format",
        choices=tuple(FORMATS),
        metavar="FORMAT",
        help=f"see below (default: by the suffix of --output, else {DEFAULT})",
    )
    add_output_option(group)
    group.add_argument(
        "--depth",
        type=natural,
        metavar="N",
        help=f"{_DEPTH_HELP}; in the overview, DeepSpeed's format, the tables and memory (default: "
        f"{overview.DEPTH} in the overview, else all)",
    )
    group.add_argument(
        "--top",
        type=positive,
        metavar="K",
        help="operators listed in the overview (default: 5), or module classes per depth in "
        "DeepSpeed's format (default: 1)",
    )
    group.add_argument(
        "--detailed",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="show the tree of modules in DeepSpeed's format (default: --detailed)",
    )
    group.add_argument(
        "--fold",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show consecutive identical modules as one, with their sums, in the overview (the "
        "default there) or in DeepSpeed's format",
    )
    group.add_argument(
        "--sort",
        choices=get_args(Key),
        help="sort the modules of each level in the overview, the largest first (default: the "
        "model's order)",
    )
    group.add_argument(
        "--columns",
        type=_columns,
        metavar="NAME,...",
        help="columns of the overview, such as params,macs,forward_flops,bytes,latency,rate",
    )


def add_table_options(parser: ArgumentParser, *formats: str) -> None:
    """Add --format and --output for a command that prints tables; the first format is default."""
    parser.add_argument(
        "--format",
        choices=formats,
        help=f"format of the result (default: by the suffix of --output, else {formats[0]})",
    )
    add_output_option(parser)
    parser.set_defaults(formats=formats)


def add_output_option(parser: Any) -> None:
    parser.add_argument(
        "--output",
        type=output_path,
        metavar="FILE",
        help="write to FILE; - is stdout (default: stdout)",
    )


def output_path(text: str) -> str | None:
    """Return the file to write; None, which is stdout, for ``-``. An argparse type."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; name one, or - for stdout")
    return None if text == "-" else text


def add_phase_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--phase", choices=PHASES, help="restrict to one phase (default: all phases)"
    )


def add_machine_option(parser: ArgumentParser, help_text: str) -> None:
    option = parser.add_argument("--machine", metavar="NAME", help=help_text)
    option.completer = _machine_names  # type: ignore[attr-defined]  # asked by argcomplete


def _machine_names(**_: Any) -> list[str]:
    return ["measure", *sorted(MACHINES)]


def machine_named(name: str | None, device: str) -> Machine | None:
    """Return the machine that --machine names; None for None.

    name: a machine's name, or a part of it that no other machine's name has; case is ignored.
    device: what "measure" measures; the CPU for "meta".

    A name that ends in .json is the path of a machine's description.

    Raises TargetError for an unknown name, and for a part of several names, which it lists;
    ConfigError for an unusable file.
    """
    if name is None:
        return None
    if name.endswith(".json"):
        return load_machine(name)
    if name == "measure":
        from dispatch_flops.timing.peaks import measure_machine

        print_progress("measuring the peak rates of a matmul and a copy on this machine")
        return measure_machine("cpu" if device == "meta" else device)
    machine = find(name) or find(name.upper())
    if machine is not None:
        return machine
    part = name.strip().casefold()
    names = sorted(known for known in MACHINES if part and part in known.casefold())
    whole = [known for known in names if known.casefold() in (part, f"nvidia {part}")]
    if len(whole or names) == 1:
        return MACHINES[(whole or names)[0]]
    if names:
        raise TargetError(f"--machine {name!r} is ambiguous; use one of {', '.join(names)}")
    raise TargetError(
        f"--machine {name!r} is unknown; use measure, the path of a JSON file that describes a "
        f"machine, or one of {', '.join(sorted(MACHINES))}"
    )


def add_set_option(parser: ArgumentParser, help_text: str, *names: str) -> None:
    """Add --set, also under the names in ``names``."""
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


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """Parse ``["batch=4"]`` as ``{"batch": "4"}``.

    Raises TargetError for a text without a name or a value, and for a name given twice.
    """
    given: dict[str, str] = {}
    for name, value in map(_parse_assignment, texts):
        if name in given:
            raise TargetError(
                f"--set {name} is given twice, as {given[name]} and as {value}; give it once"
            )
        given[name] = value
    return given


def _parse_assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier() or not value:
        raise TargetError(f"--set {text!r} is not an assignment; write NAME=VALUE, such as batch=4")
    return name, value


def parse_value(text: str) -> Any:
    """Parse a Python literal such as ``4``, ``0.5`` or ``True``; return any other text as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def natural(text: str) -> int:
    """Parse a whole number of at least 0, as an argparse type."""
    return _at_least(0, text)


def positive(text: str) -> int:
    """Parse a whole number of at least 1, as an argparse type."""
    return _at_least(1, text)


def _columns(text: str) -> tuple[str, ...]:
    names, known = tuple(name.strip() for name in text.split(",")), column_names()
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"{name!r} is not a column; choose from {', '.join(known)}"
            )
    return names


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)
