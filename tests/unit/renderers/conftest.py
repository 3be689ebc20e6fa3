"""Golden files: what a renderer gave when it was last looked at."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.helpers.paths import GOLDEN


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden(name, text)``: the text is the file's, to the byte."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_bytes(text.encode())
        assert text == path.read_bytes().decode()

    return compare
