"""Where text goes: results to stdout or a file, progress and errors to stderr."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dispatch_flops.errors import TargetError

OK, FAILED, CANNOT, INTERRUPTED = 0, 1, 2, 130


def emit(text: str, output: str | None = None) -> None:
    """Print a result, or write it to a file. A reader who has had enough is no error."""
    if output is not None:
        if not output.strip():
            raise TargetError("--output is empty: name a file, or leave it out for stdout")
        write(Path(output), (text.removesuffix("\n") + "\n").encode())
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


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Gives ``advance(text)``, to be called before each of ``total`` steps.

    A terminal shows tqdm's bar where tqdm is installed, else one line that changes; a file or a
    pipe gets a line a step.
    """
    terminal = sys.stderr.isatty()
    bar = _tqdm(total) if terminal else None
    started = 0

    def advance(text: str) -> None:
        nonlocal started
        started += 1
        if bar is not None:
            bar.update(int(started > 1))
            bar.set_postfix_str(text)
        elif terminal:
            line = f"[{started}/{total}] {text}"
            print(f"\r\x1b[K{line[:78]}", end="", file=sys.stderr, flush=True)
        else:
            progress(f"[{started}/{total}] {text}")

    done = 0
    try:
        yield advance
        done = 1
    finally:
        if bar is not None:
            bar.update(done)
            bar.close()
        elif terminal and started:
            progress("")


def _tqdm(total: int) -> Any:
    """A bar on stderr; None where tqdm is not installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    size = shutil.get_terminal_size()  # 80 x 24 where the terminal does not say
    return tqdm(total=total, file=sys.stderr, ncols=size.columns, nrows=size.lines, unit="run")


def error(text: str) -> None:
    """One line on stderr, whatever the text."""
    print(f"dispatch-flops: {' '.join(text.split())}", file=sys.stderr, flush=True)


def read(path: str) -> str:
    """The text of a file, or of stdin for ``-``; raises TargetError where it cannot be read."""
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as wrong:
        raise TargetError(f"cannot read {path!r}: {_reason(wrong)}") from None


def write(path: Path, content: bytes) -> None:
    """Write a file, and say so; raises TargetError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as wrong:
        raise TargetError(f"cannot write {str(path)!r}: {_reason(wrong)}") from None
    progress(f"written to {path}")


def _reason(wrong: OSError | UnicodeDecodeError) -> str:
    if isinstance(wrong, UnicodeDecodeError):
        return "it is no text"
    return wrong.strerror or str(wrong)


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
