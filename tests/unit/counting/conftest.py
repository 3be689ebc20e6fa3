"""Plans of operators that counters share, taken away for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dispatch_flops.counting.plans import SHARED_PLANS


@pytest.fixture
def no_plans() -> Iterator[None]:
    """Start and end without shared plans."""
    SHARED_PLANS.rules_changed()
    yield
    SHARED_PLANS.rules_changed()
