"""Libraries that only some formats need."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, *, extra: str, purpose: str) -> Any:
    """Return the imported module of an optional library.

    extra: the extra of this package that installs it. purpose: what needs it, such as "a plot".

    Raises ImportError saying what to install; its ``name`` is the library's.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{library} is needed for {purpose}; "
            f"install it with pip install 'dispatch-flops[{extra}]'",
            name=library,
        ) from error
