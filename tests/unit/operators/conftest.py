"""No number decides the cost of a call unless its formula declares that; the registry stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dispatch_flops.operators import registry
from tests.helpers.number_probe import probe_every_answer


@pytest.fixture(autouse=True)
def _probed(monkeypatch: pytest.MonkeyPatch) -> None:
    probe_every_answer(monkeypatch)


@pytest.fixture
def registry_unchanged() -> Iterator[None]:
    before = dict(registry._BUILTIN), dict(registry._USER)
    yield
    assert before == (registry._BUILTIN, registry._USER)
