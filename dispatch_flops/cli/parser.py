"""The parser of all commands, and the top-level help."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from contextlib import suppress
from typing import Any, NoReturn

from dispatch_flops.cli import check, clusters, compare, ops, plan, profile, show, sweep
from dispatch_flops.cli.output import emit
from dispatch_flops.errors import TargetError
from dispatch_flops.profile.suggestions import did_you_mean

_DESCRIPTION = """\
Exact FLOPs, MACs, bytes, parameters and latency of PyTorch models, per module and operator.
"""

_EPILOG = """\
examples:
  dispatch-flops demo
      profile a built-in BERT-base, to see what a profile looks like
  dispatch-flops profile model.py:make_model --input-shape 1,3,224,224
      profile your own model
  dispatch-flops profile model.py:make_model --input-shape 1,3,224,224 --output p.json
      save the profile for the commands show, report, diff and check
  dispatch-flops profile hf:config.json:AutoModelForCausalLM --device meta
      profile a transformers model that is too large for this machine, from shapes alone
  dispatch-flops sweep model.py:make_model --input-shape batch,seq:int64 \\
          --set batch=1,8 seq=128..4096
      see how cost grows with batch size and sequence length

exit codes:
  0    success; every check passed
  1    a check failed: `check` found a limit exceeded, or `diff --exit-code` a changed count
  2    an error: wrong usage, an unusable target, shape or file, or an error in the model
  130  interrupted

Tab completion needs the extra `completion`, and in the shell's start-up file:
  eval "$(register-python-argcomplete dispatch-flops)"

Results go to stdout, progress and one-line errors to stderr.
Run `dispatch-flops COMMAND --help` for the options of a command.
"""


FIRST_STEPS = """\
Exact FLOPs, MACs, bytes, parameters and latency of PyTorch models. Try first:

  dispatch-flops demo
      profile a built-in BERT-base
  dispatch-flops profile model.py:make_model --input-shape 1,3,224,224
      profile your own model
  dispatch-flops --help
      list all commands, with examples"""


def complete_shell(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for completions, and exit; do nothing in any other call.

    It needs the extra `completion`, and in the shell's start-up file:
    eval "$(register-python-argcomplete dispatch-flops)"
    """
    if "_ARGCOMPLETE" in os.environ:  # set by the shell's completion function
        with suppress(ImportError):
            importlib.import_module("argcomplete").autocomplete(parser)


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises its errors, so that ``main`` reports them like all others.

    commands: the parsers of the commands.
    """

    commands: Any

    def error(self, message: str) -> NoReturn:
        raise TargetError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments of a command; an unknown one is reported with the command's help."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: Any = self.commands.choices[options.command]
            hint = did_you_mean(unknown[0], command._option_string_actions)
            help_of = f"(see {command.prog} --help)"
            raise TargetError(f"unrecognized arguments: {' '.join(unknown)}{hint} {help_of}")
        return options

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help or the version; argparse ignores that stdout cannot be written."""
        if file is sys.stdout:
            emit(message)
        else:
            super()._print_message(message, file)


def build_parser() -> Parser:
    """Return the parser of all commands. Each sets ``run``: options in, exit code out."""
    from dispatch_flops import __version__

    parser = Parser(
        prog="dispatch-flops",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dispatch-flops {__version__}")
    parser.commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for add_command in (
        profile.add_profile,
        profile.add_demo,
        sweep.add_sweep,
        plan.add_plan,
        show.add_show,
        show.add_report,
        compare.add_diff,
        check.add_check,
        clusters.add_merge,
        clusters.add_simulate,
        ops.add_ops,
    ):
        add_command(parser.commands)
    return parser
