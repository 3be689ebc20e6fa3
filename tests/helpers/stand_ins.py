"""Operators with the schemas of libraries that are not installed, in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def stand_in(namespace: str, schema: str, kernel: Callable[..., Any]) -> Iterator[Any]:
    """Define an operator of that schema for the block; yield it.

    Skips the test where the library itself has defined it.
    """
    name = schema.partition("(")[0]
    if torch._C._dispatch_has_kernel(f"{namespace}::{name}"):
        pytest.skip(f"{namespace} is installed")
    with torch.library._scoped_library(namespace, "FRAGMENT") as library:
        library.define(schema)
        library.impl(name, kernel, "CompositeExplicitAutograd")
        yield getattr(getattr(torch.ops, namespace), name)


def nothing(*_: Any, **__: Any) -> None:
    """A kernel that writes nothing and returns nothing."""
