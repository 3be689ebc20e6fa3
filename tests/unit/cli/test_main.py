"""The command line as a whole: help, exit codes, and as a process of its own."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from dispatch_flops import Profile, __version__
from dispatch_flops.cli import output
from tests.helpers.command_line import NET, Run, macs, refused
from tests.helpers.paths import REPOSITORY


class TestMain:
    COMMANDS = ("profile", "demo", "sweep", "show", "diff", "check", "ops")

    def test_help(self, run: Run) -> None:
        result = run("--help")
        assert (result.code, result.err) == (0, "")
        for words in ("exit codes:", "examples:", *self.COMMANDS):
            assert words in result.out

    @pytest.mark.parametrize("command", COMMANDS)
    def test_help_of_a_command(self, run: Run, command: str) -> None:
        result = run(command, "--help")
        assert result.code == 0
        assert "--debug" in result.out

    def test_version(self, run: Run) -> None:
        assert run("--version").out == f"dispatch-flops {__version__}\n"

    def test_no_command(self, run: Run) -> None:
        result = run()
        assert (result.code, result.out) == (2, "")
        assert "examples:" in result.err
        refused(run("--debug"))
        refused(run("profil"), "invalid choice: 'profil'")

    def test_a_defect_of_our_own_is_one_line_too(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def defect(options: Namespace) -> int:
            raise KeyError("gone")

        monkeypatch.setattr("dispatch_flops.cli.ops.run_ops", defect)
        refused(run("ops"), "a defect of dispatch-flops: KeyError")

    def test_a_library_that_is_not_installed(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def without(options: Namespace) -> int:
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

        monkeypatch.setattr("dispatch_flops.cli.ops.run_ops", without)
        refused(run("ops"), "this needs torch: pip install torch")

    def test_interrupted(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(options: Namespace) -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr("dispatch_flops.cli.ops.run_ops", interrupt)
        result = run("ops")
        assert (result.code, result.err) == (130, "dispatch-flops: interrupted\n")

    def test_a_module_of_the_working_directory(self, run: Run) -> None:
        Path("found_here.py").write_text(NET)
        assert run("profile", "found_here:make", "--device", "meta").code == 0
        del sys.modules["found_here"]

    def test_an_error_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        output.error("first\n  second")
        assert capsys.readouterr().err == "dispatch-flops: first second\n"

    def test_what_the_terminal_cannot_write(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        output.emit("M·N\n")
        assert stream.buffer.getvalue() == b"M?N\n"  # type: ignore[attr-defined]


class TestProcess:
    """``python -m dispatch_flops``, as a process of its own."""

    @staticmethod
    def _start(*arguments: str) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            [sys.executable, "-m", "dispatch_flops", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path},
        )

    def test_a_module_of_the_working_directory(self) -> None:
        process = self._start("profile", "net:make", "--format", "json", "--device", "meta")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert Profile.from_json(out).total().macs == macs()

    def test_a_script_of_continuous_integration_stops_at_a_limit(self) -> None:
        """``set -e``: what is after a kept limit runs, what is after an exceeded one does not."""
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        Path("ci.sh").write_text(
            f"""set -e
flops() {{ "{sys.executable}" -m dispatch_flops "$@"; }}
flops profile net:make --device meta --output p.json
flops check p.json --max-macs {macs()}
echo kept
flops check p.json --max-macs {macs() - 1}
echo never
"""
        )
        done = subprocess.run(
            ["sh", "ci.sh"],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env={**os.environ, "PYTHONPATH": path},
        )
        lines = done.stdout.splitlines()
        assert (done.returncode, lines[:2]) == (1, ["within the limit: macs", "kept"]), done.stderr
        assert [line.split(":")[0] for line in lines[2:]] == ["MACs"]

    def test_a_reader_who_has_had_enough(self) -> None:
        process = self._start("ops", "--format", "csv")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert (process.wait(timeout=120), err) == (0, "")
