"""The parser: which commands there are, and help written for people."""

from __future__ import annotations

import argparse
from typing import NoReturn

from dispatch_flops.cli import compare, ops, profile, show, sweep
from dispatch_flops.errors import TargetError

_DESCRIPTION = """\
Exact FLOPs, MACs, bytes, parameters and latency of PyTorch models, per module and operator.
"""

_EPILOG = """\
examples:
  dispatch-flops demo
      profile an embedded BERT-base, to see what a profile looks like
  dispatch-flops profile model.py:make_model --input-shape 1,3,224,224
      profile your own model
  dispatch-flops profile model.py:make_model --input-shape 1,3,224,224 --output p.json
      save the profile; look at it again with `show`, compare it with `diff`, hold it to
      limits with `check`
  dispatch-flops profile hf:config.json:AutoModelForCausalLM --device meta
      a transformers model too large for this machine: shapes alone
  dispatch-flops sweep model.py:make_model --input-shape batch,seq:int64 \\
          --set batch=1,8 seq=128..4096
      how cost grows with batch and sequence length

exit codes:
  0  done; every check passed
  1  a check failed: a limit of `check` is exceeded, or `diff --exit-code` found a change
  2  it could not be done: bad use, a bad target, shape or file, or the model raised an error

Results go to stdout; progress and errors, of one line, to stderr. `dispatch-flops COMMAND --help`
tells more about a command.
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are raised, so that they are reported as all others."""

    def error(self, message: str) -> NoReturn:
        raise TargetError(f"{message} (see {self.prog} --help)")


def build_parser() -> Parser:
    """The parser of all commands; each sets ``run``, a function of the options to an exit code."""
    from dispatch_flops import __version__

    parser = Parser(
        prog="dispatch-flops",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"dispatch-flops {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", required=True)
    for command in (profile, sweep, show, compare, ops):
        command.add_commands(commands)
    return parser
