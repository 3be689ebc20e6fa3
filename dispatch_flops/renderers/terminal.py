"""What the terminal that a printout goes to can show."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from dispatch_flops.renderers.view import View

BOLD, BAR, RESET = "\x1b[1m", "\x1b[36m", "\x1b[0m"


def terminal_view() -> dict[str, Any]:
    """Return the fields of ``View`` that fit a printout to ``sys.stdout``.

    A terminal narrower than the default page narrows it, and a terminal has colours unless the
    environment variable NO_COLOR is set (https://no-color.org). A file or a pipe gets plain text
    of the default width.
    """
    stdout = sys.stdout
    if stdout is None or not stdout.isatty():
        return {}
    width = min(View().width or 0, shutil.get_terminal_size().columns)
    return {"width": width, "is_colored": not os.environ.get("NO_COLOR")}


def printable(text: str) -> str:
    """Return the text with "?" in place of what ``sys.stdout`` cannot encode.

    The bars are not in the code pages of Windows, which files and pipes have there, nor in ASCII.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def colored(text: str, code: str, is_colored: bool) -> str:
    """Return the text between a colour's escape sequences, if it is to be coloured."""
    return f"{code}{text}{RESET}" if is_colored and text else text
