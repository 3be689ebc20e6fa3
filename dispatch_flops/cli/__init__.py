"""The command line: ``dispatch-flops`` and ``python -m dispatch_flops``.

A command is a pair of functions: ``add_NAME`` adds its parser and ``run_NAME`` runs it. Results go
to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import shlex
import sys
import traceback
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dispatch_flops.cli.exit_codes import ERROR, INTERRUPTED
from dispatch_flops.cli.formats import choose_format, format_named
from dispatch_flops.cli.output import (
    check_writable,
    flush_stdout,
    print_error,
    writable_stderr,
)
from dispatch_flops.cli.parser import FIRST_STEPS, build_parser, complete_shell
from dispatch_flops.errors import DispatchFlopsError

__all__ = ["main"]


@writable_stderr()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: ``sys.argv[1:]``) and return the exit code.

    Example: ``main(["check", "profile.json", "--max-params", "40M"])``.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in arguments
    parser = build_parser()
    try:
        complete_shell(parser)  # whose call has no arguments: the line is in COMP_LINE
        if not arguments:
            print(FIRST_STEPS, file=sys.stderr)
            return ERROR
        try:
            options = parser.parse_args(arguments)
            options.command_line = shlex.join(["dispatch-flops", *arguments])
        except SystemExit as end:  # --help and --version have printed their text
            flush_stdout()
            return int(end.code or 0)
    except DispatchFlopsError as error:
        print_error(str(error))
        return ERROR
    with _process_settings(debug):
        return _run(options, debug)


def _run(options: Namespace, debug: bool) -> int:
    try:
        _check_output(options)
        code: int = options.run(options)
        flush_stdout()
    except KeyboardInterrupt:
        print_error("interrupted")
        return INTERRUPTED
    except DispatchFlopsError as error:
        hint = "" if error.__cause__ is None or debug else " (--debug shows the traceback)"
        return _fail(f"{error}{hint}", debug)
    except SystemExit as end:
        return _fail(f"the profiled code called sys.exit({end.code!r})", debug)
    except ModuleNotFoundError as error:
        return _fail(f"{error.name} is not installed; run pip install {error.name}", debug)
    except Exception as error:
        text = f"internal error: {type(error).__name__}: {error} (--debug shows the traceback)"
        return _fail(text, debug)
    return code


def _check_output(options: Namespace) -> None:
    """Raise TargetError for an --output that cannot be written, before anything runs.

    The suffix of the file may choose the format.
    """
    output = getattr(options, "output", None)
    if output:
        check_writable(Path(output))
        if hasattr(options, "detailed"):  # of a profile
            choose_format(options.format, output)
    if hasattr(options, "formats"):
        options.format = format_named(options, options.formats)


def _fail(text: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print_error(text)
    return ERROR


@contextmanager
def _process_settings(debug: bool) -> Iterator[None]:
    """Make modules of the working directory importable and hide Python warnings, for one command.

    The printout already lists operators without a known cost, so a warning would repeat them.
    Callers of ``main`` get back their ``sys.path`` and warning filters.
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
