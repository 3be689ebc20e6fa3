"""No number decides the cost of a call in these tests unless its formula declares that."""

from __future__ import annotations

import pytest

from tests.helpers.number_probe import probe_every_answer


@pytest.fixture(autouse=True)
def _probed(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_every_answer(monkeypatch)
