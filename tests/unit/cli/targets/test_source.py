"""How errors of the user's own code are reported."""

from __future__ import annotations

import pytest

from dispatch_flops.cli.targets.source import (
    first_line,
    raise_target_error,
)
from dispatch_flops.errors import TargetError


@pytest.mark.parametrize(
    "message,expected",
    [
        ("first\nsecond", "ValueError: first"),
        ("these are wrong:\n\n  the first:\n    it is 3\nthird",
         "ValueError: these are wrong: the first: it is 3"),
        ("these are wrong:", "ValueError: these are wrong:"),
        ("", "ValueError"),
        ("x" * 300, f"ValueError: {'x' * 300}"),
        ("x" * 301, f"ValueError: {'x' * 297}..."),
    ],
)  # fmt: skip
def test_first_line_of_an_error_is_its_first_statement(message: str, expected: str) -> None:
    assert first_line(ValueError(message)) == expected


def test_target_error_names_action_and_hint_and_keeps_the_cause() -> None:
    error = ValueError("wrong")
    with pytest.raises(TargetError, match="^importing x raised ValueError: wrong$") as caught:
        raise_target_error("importing x", error)
    assert caught.value.__cause__ is error
    with pytest.raises(TargetError, match="^importing x raised ValueError: wrong; try y$"):
        raise_target_error("importing x", error, "try y")
