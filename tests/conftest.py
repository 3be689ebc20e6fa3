"""Options of the test suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole-sweep", action="store_true", help="run every sample of torch's operator database"
    )
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )
