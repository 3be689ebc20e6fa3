"""Read JSON: the text of a saved profile, and files of settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dispatch_flops.errors import ConfigError, ProfileFormatError


def parse_saved(text: Any, what: str) -> Any:
    """Return the data of a saved text; raises ProfileFormatError if it is not JSON.

    what: the kind of the profile, for the error.
    """
    if not isinstance(text, str | bytes | bytearray):
        raise ProfileFormatError(
            f"the {what} profile is of type {type(text).__name__}; pass the text of its file"
        )
    if not text.strip():
        raise ProfileFormatError(f"the {what} profile is empty; profile again")
    try:
        return _parsed(text)
    except ValueError as error:
        is_name = isinstance(text, str) and text.endswith(".json")
        hint = "; pass the text of the file, not its name" if is_name else ""
        raise ProfileFormatError(f"this is not JSON: {error}{hint}") from error


def read_settings(path: Path) -> Any:
    """Return the data of a JSON file; raises ConfigError naming the file if that fails."""
    try:
        return _parsed(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def _parsed(text: str | bytes | bytearray) -> Any:
    """Return the data of JSON, also after the mark by which some editors begin a file."""
    try:
        return json.loads(text.removeprefix("\ufeff") if isinstance(text, str) else text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
