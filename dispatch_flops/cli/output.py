"""Where text goes: results to stdout or a file, progress and errors to stderr."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dispatch_flops.errors import TargetError

OK, FAILED, CANNOT, INTERRUPTED = 0, 1, 2, 130


def emit(text: str, output: str | None = None) -> None:
    """Print a result, or write it to a file. A reader who has had enough is no error."""
    if output is not None:
        _write(Path(output), text)
        return
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    printable = text.encode(encoding, "replace").decode(encoding)
    try:
        print(printable.removesuffix("\n"))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def flush() -> None:
    """Let out what is still held back, so that the interpreter's own end meets no closed pipe."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def progress(text: str) -> None:
    """Say what is going on, to whoever is watching."""
    print(text, file=sys.stderr, flush=True)


def error(text: str) -> None:
    """One line on stderr, whatever the text."""
    print(f"dispatch-flops: {' '.join(text.split())}", file=sys.stderr, flush=True)


def read(path: str) -> str:
    """The text of a file, or of stdin for ``-``; raises TargetError where it cannot be read."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        raise TargetError(f"cannot read {path!r}: {_reason(wrong)}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.removesuffix("\n") + "\n", encoding="utf-8")
    except OSError as wrong:
        raise TargetError(f"cannot write {str(path)!r}: {_reason(wrong)}") from None
    progress(f"written to {path}")


def _reason(wrong: OSError | UnicodeDecodeError) -> str:
    if isinstance(wrong, UnicodeDecodeError):
        return "it is no text"
    return wrong.strerror or str(wrong)


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
