"""How errors of the user's own code are reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from dispatch_flops.cli.targets.source import (
    first_line,
    raise_target_error,
    require_file,
    require_model,
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


def test_target_error_of_a_process_exit_says_where_such_code_belongs() -> None:
    with pytest.raises(TargetError) as caught:
        raise_target_error("importing x", SystemExit(3))
    assert str(caught.value) == (
        "importing x raised SystemExit: 3; code that ends the process belongs under "
        "if __name__ == '__main__'"
    )


def test_require_file_refuses_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    require_file(tmp_path / "there")
    with pytest.raises(TargetError, match="^file 'missing' does not exist; check the path$"):
        require_file(Path("missing"))


def test_require_model_refuses_other_values() -> None:
    model = nn.Identity()
    assert require_model(model, "make") is model
    with pytest.raises(TargetError) as caught:
        require_model(3, "make")
    assert str(caught.value) == (
        "make returned a value of type int; it must return an nn.Module, or a pair of a model and "
        "its inputs"
    )
