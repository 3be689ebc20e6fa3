"""The command line as a function, in a folder with net.py in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dispatch_flops import Profile
from dispatch_flops.cli import main
from tests.helpers.command_line import NET, Result, Run, Save


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # the width of help
    (tmp_path / "net.py").write_text(NET)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the command line in this process."""

    def call(*arguments: str) -> Result:
        capsys.readouterr()
        code = main(arguments)
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def saved(run: Run) -> Save:
    """Profile a target into a file, and read the file."""

    def save(name: str, *arguments: str) -> Profile:
        result = run("profile", *arguments, "--output", name)
        assert result.code == 0, result.err
        return Profile.from_json(Path(name).read_text())

    return save


@pytest.fixture
def odd_operator() -> Iterator[None]:
    """Define ``cli_test.odd``, which ``odd`` in net.py calls and which has no known cost."""
    with torch.library._scoped_library("cli_test", "DEF") as library:
        library.define("odd(Tensor x) -> Tensor")
        library.impl("odd", lambda x: x.clone(), "CompositeExplicitAutograd")
        yield
