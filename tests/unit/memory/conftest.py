"""Fixtures for tests of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def collected_before() -> Iterator[None]:
    """Keep the collector from releasing tensors in one of two runs alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
