"""The command line: ``dispatch-flops`` and ``python -m dispatch_flops``.

Results go to stdout, progress and errors to stderr. Exit codes: 0, 1 for a check that failed,
2 for anything that could not be done.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dispatch_flops.cli.output import CANNOT, INTERRUPTED, error, flush
from dispatch_flops.cli.parser import build_parser
from dispatch_flops.errors import DispatchFlopsError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of ``argv`` (default: the process's own) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments
    parser = build_parser()
    try:
        if not arguments:
            parser.print_help(sys.stderr)
            return CANNOT
        options = parser.parse_args(arguments)
    except SystemExit as end:  # --help and --version have printed what was asked for
        flush()
        return int(end.code or 0)
    except DispatchFlopsError as wrong:
        error(str(wrong))
        return CANNOT
    with _as_a_process(debug):
        return _run(options, debug)


def _run(options: Namespace, debug: bool) -> int:
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        error("interrupted")
        return INTERRUPTED
    except DispatchFlopsError as wrong:
        hint = "" if wrong.__cause__ is None or debug else " (--debug shows where)"
        return _failed(f"{wrong}{hint}", debug)
    except SystemExit as end:  # the user's own code ends the process
        return _failed(f"the program called sys.exit({end.code!r})", debug)
    except ModuleNotFoundError as missing:
        return _failed(f"this needs {missing.name}: pip install {missing.name}", debug)
    except Exception as bug:
        text = f"a defect of dispatch-flops: {type(bug).__name__}: {bug} (--debug shows where)"
        return _failed(text, debug)
    flush()
    return code


def _failed(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    error(text)
    return CANNOT


@contextmanager
def _as_a_process(debug: bool) -> Iterator[None]:
    """What a process of its own may do and a caller of ``main`` must not notice.

    Modules of the working directory can be imported; Python's warnings are not shown (operators
    without a known cost stand in the printout), unless it is asked where things go wrong.
    """
    path = list(sys.path)
    sys.path.insert(0, "")
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.simplefilter("ignore")
            yield
    finally:
        sys.path[:] = path
