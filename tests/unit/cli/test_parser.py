"""The parser: help of every command, and errors of use."""

from __future__ import annotations

import pytest

from tests.helpers.command_line import Run, error_line

COMMANDS = (
    "profile",
    "demo",
    "sweep",
    "plan",
    "show",
    "report",
    "diff",
    "check",
    "merge",
    "simulate",
    "ops",
)


def test_help_lists_commands_examples_and_exit_codes(run: Run) -> None:
    result = run("--help")
    assert (result.code, result.err) == (0, "")
    for words in ("exit codes:", "examples:", *COMMANDS):
        assert words in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_examples(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert "--debug" in result.out
    assert f"  dispatch-flops {command} " in result.out or f"  dispatch-flops {command}\n" in (
        result.out
    )
    assert max(map(len, result.out.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments,message",
    [
        (
            ("--debug",),
            "the following arguments are required: COMMAND (see dispatch-flops --help)",
        ),
        (
            ("profile",),
            "the following arguments are required: TARGET (see dispatch-flops profile --help)",
        ),
        (
            ("profile", "net.py:make", "--lethargy", "1"),
            "unrecognized arguments: --lethargy 1 (see dispatch-flops profile --help)",
        ),
        (
            ("profile", "net.py:make", "--detph", "1"),
            "unrecognized arguments: --detph 1; did you mean --depth or --dtype? (see "
            "dispatch-flops profile --help)",
        ),
    ],
)
def test_wrong_use_is_one_line_that_names_the_help(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    assert error_line(run(*arguments)) == message


def test_unknown_command_is_refused(run: Run) -> None:
    assert "invalid choice: 'profil'" in error_line(run("profil"))
