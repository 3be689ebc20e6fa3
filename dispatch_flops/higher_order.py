"""Higher-order operators: their bodies are run under the mode, so that what really runs counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HANDLERS: dict[str, Callable[..., Any]] = {}
