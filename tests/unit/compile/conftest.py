"""Every test of compiled code starts with an empty compiler."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def empty_compiler(fresh_compiler: None) -> None:
    """Use the fixture in every test of this folder."""
