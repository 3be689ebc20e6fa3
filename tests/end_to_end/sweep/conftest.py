"""The sweep is not collected where slow tests are deselected: torch's databases import slowly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.number_probe import probe_every_answer

_IMPORTING = ("test_opdb.py", "test_workspaces.py")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    is_deselected = config.getoption("markexpr") == "not slow"
    return True if is_deselected and collection_path.name in _IMPORTING else None


@pytest.fixture(autouse=True)
def _probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a formula fail whose answer depends on a number that it does not declare."""
    probe_every_answer(monkeypatch)
