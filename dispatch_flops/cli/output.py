"""Output of the command line: results to stdout or a file, progress and errors to stderr."""

from __future__ import annotations

import csv
import importlib
import io
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any

from dispatch_flops.errors import TargetError
from dispatch_flops.renderers.terminal import printable


def emit(text: str, output: str | None = None) -> None:
    """Print a result, or write it to the file ``output``. A closed pipe is not an error.

    Raises TargetError if the file or stdout cannot be written, as on a full disk.
    """
    if output is not None:
        write_file(Path(output), (text.removesuffix("\n") + "\n").encode())
        return
    with _stdout_errors():
        stream = getattr(sys.stdout, "buffer", None)
        if stream is not None and text.startswith("<!DOCTYPE html>"):
            # A page says that it is UTF-8, which stdout is not in a file or pipe of Windows.
            stream.write((text.removesuffix("\n") + "\n").encode())
            stream.flush()
        else:
            print(printable(text).removesuffix("\n"), flush=True)


def flush_stdout() -> None:
    """Flush stdout here, where errors can be handled, and not at interpreter exit.

    Raises TargetError if stdout cannot be written. A closed pipe is not an error.
    """
    with _stdout_errors():
        print(end="", flush=True)


@contextmanager
def _stdout_errors() -> Iterator[None]:
    """Ignore a closed pipe, and raise any other error of stdout as TargetError.

    Where the caller closed stdout, ``sys.stdout`` is None and nothing is written.
    """
    try:
        yield
    except BrokenPipeError:
        _discard_stdout()
    except OSError as error:
        _discard_stdout()  # else the interpreter writes the rest again when it exits
        raise TargetError(f"cannot write to stdout: {error.strerror or error}") from None


def write_file(path: Path, content: bytes) -> None:
    """Write a file; raises TargetError if that fails, as where its folder does not exist."""
    check_writable(path)
    try:
        path.write_bytes(content)
    except OSError as error:
        raise TargetError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    print_progress(f"written to {path}")


def check_writable(path: Path) -> None:
    """Raise TargetError if a file cannot be written; leave it, or that there is none, as it is."""
    shown = repr(str(path))
    try:
        if path.is_dir():
            raise TargetError(f"cannot write {shown}: it is a folder; name a file in it")
        if not path.parent.exists():
            raise TargetError(
                f"cannot write {shown}: the folder {str(path.parent)!r} does not exist; make it "
                "first"
            )
        if not path.parent.is_dir():
            raise TargetError(f"cannot write {shown}: its folder is a file")
        if path.is_file():  # and not a pipe, which would end for its reader
            path.open("ab").close()
        elif not os.path.lexists(path):
            path.open("xb").close()
            path.unlink()
    except OSError as error:
        raise TargetError(f"cannot write {shown}: {error.strerror or error}") from None


def page(text: str) -> None:
    """Print a result, through $PAGER (or less) if it does not fit the terminal."""
    command = shlex.split(os.environ.get("PAGER", "less -FRX"))
    stdout = sys.stdout
    is_terminal = stdout is not None and stdout.isatty()
    fits = text.count("\n") < shutil.get_terminal_size().lines - 1
    if not is_terminal or fits or not command or shutil.which(command[0]) is None:
        emit(text)
        return
    # The pager may be left before it has read everything: that is not an error.
    subprocess.run(command, input=text, text=True, errors="replace", check=False)


def csv_text(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows([header, *rows])
    return buffer.getvalue()


@contextmanager
def writable_stderr() -> Iterator[None]:
    """Discard progress and errors where the caller closed stderr.

    ``sys.stderr`` is None there, and ``print(file=None)`` would mix them with the result.
    """
    if sys.stderr is not None:
        yield
        return
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stderr(nowhere):
        yield


def print_error(text: str) -> None:
    """Print the text to stderr as a single line."""
    print_progress(f"dispatch-flops: {' '.join(text.split())}")


def print_progress(text: str) -> None:
    """Print a line to stderr; one that cannot be written is lost, and the command goes on."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Yield ``advance(text)``, to be called before each of ``total`` steps.

    On a terminal this is a tqdm bar, or one changing line if tqdm is not installed. A file or a
    pipe receives one line per step.
    """
    is_terminal = sys.stderr.isatty()
    bar = _tqdm(total) if is_terminal else None
    started = 0

    def advance(text: str) -> None:
        nonlocal started
        started += 1
        if bar is not None:
            bar.update(int(started > 1))
            bar.set_postfix_str(text)
        elif is_terminal:
            line = f"[{started}/{total}] {text}"
            print(f"\r\x1b[K{line[:78]}", end="", file=sys.stderr, flush=True)
        else:
            print_progress(f"[{started}/{total}] {text}")

    finished_last = 0
    try:
        yield advance
        finished_last = 1
    finally:
        if bar is not None:
            bar.update(finished_last)
            bar.close()
        elif is_terminal and started:
            print_progress("")


def _tqdm(total: int) -> Any:
    """Return a tqdm bar on stderr, or None if tqdm is not installed."""
    try:
        tqdm = importlib.import_module("tqdm").tqdm
    except ImportError:
        return None
    size = shutil.get_terminal_size()  # 80 x 24 if the terminal does not report one
    return tqdm(total=total, file=sys.stderr, ncols=size.columns, nrows=size.lines, unit="run")


def _discard_stdout() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
