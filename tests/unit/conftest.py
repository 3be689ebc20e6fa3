"""Golden files: exact text that was checked by hand when it was last written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.paths import GOLDEN


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Return ``golden(name, text)``, which asserts that the text equals the file's bytes.

    With ``--update-golden`` it writes the file first.
    """

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_bytes(text.encode())
        assert text == path.read_bytes().decode()

    return compare
