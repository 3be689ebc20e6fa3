"""The command line as a whole: exit codes, errors, and a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dispatch_flops import __version__
from dispatch_flops.cli import main
from tests.helpers.command_line import NET, Run, Save, error_line, macs
from tests.helpers.interpreters import run_python
from tests.helpers.paths import REPOSITORY

FULL = (2, "dispatch-flops: cannot write to stdout: No space left on device\n")


class TestMain:
    @pytest.fixture
    def ops_raises(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
        def replace(error: BaseException) -> None:
            def run_ops(options: Namespace) -> int:
                raise error

            monkeypatch.setattr("dispatch_flops.cli.ops.run_ops", run_ops)

        return replace

    def test_version_is_printed(self, run: Run) -> None:
        assert run("--version").out == f"dispatch-flops {__version__}\n"

    def test_no_arguments_show_three_commands_on_stderr(self, run: Run) -> None:
        result = run()
        assert (result.code, result.out) == (2, "")
        commands = [line for line in result.err.splitlines() if line.startswith("  dispatch-flops")]
        assert [line.split()[1] for line in commands] == ["demo", "profile", "--help"]

    def test_shell_that_completes_gets_the_parser(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        parsers: list[ArgumentParser] = []
        argcomplete = ModuleType("argcomplete")
        argcomplete.autocomplete = parsers.append  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "argcomplete", argcomplete)
        assert run("ops", "aten.addmm").code == 0
        assert not parsers
        monkeypatch.setenv("_ARGCOMPLETE", "1")
        run()  # the shell's function passes no arguments
        assert [parser.prog for parser in parsers] == ["dispatch-flops"]

    def test_missing_folder_is_refused_before_anything_runs(self, run: Run) -> None:
        result = run("profile", "net.py:make", "--output", "folder/p.json")
        assert error_line(result) == (
            "cannot write 'folder/p.json': the folder 'folder' does not exist; make it first"
        )
        assert "profiling" not in result.err and not Path("folder").exists()

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (("--output", "."), "it is a folder"),
            (("--output", ""), "argument --output: '' is not a file; name one, or - for stdout"),
            (("--output", "net.py/p.json"), "cannot write 'net.py/p.json': its folder is a file"),
            (("--columns", "speed"), "is not a column"),
        ],
    )
    def test_unusable_output_is_refused_before_anything_runs(
        self, run: Run, options: tuple[str, str], message: str
    ) -> None:
        result = run("profile", "net.py:make", *options)
        assert message in error_line(result)
        assert "profiling" not in result.err

    def test_empty_name_of_a_page_is_that_of_its_argument(self, run: Run) -> None:
        result = run("report", "p.json", " ")
        assert "argument FILE.html: ' ' is not a file" in error_line(result)

    def test_unknown_suffix_is_refused_before_anything_runs(self, run: Run) -> None:
        result = run("profile", "net.py:make", "--output", "p.yaml")
        assert error_line(result).startswith(
            "--output p.yaml: the suffix .yaml is unknown; use one of .txt, .md, .json, .csv"
        )
        assert "profiling" not in result.err
        assert run("profile", "net.py:make", "--output", "p.yaml", "--format", "json").code == 0

    @pytest.mark.parametrize("command", [("profile", "net.py:make"), ("demo",)])
    def test_option_without_effect_is_refused_before_anything_runs(
        self, run: Run, command: tuple[str, ...]
    ) -> None:
        result = run(*command, "--format", "csv", "--depth", "1")
        assert error_line(result).startswith("--depth has no effect on the format csv; omit it")
        assert "profiling" not in result.err

    @pytest.mark.parametrize(
        "error,message",
        [
            (KeyError("gone"), "internal error: KeyError: 'gone' (--debug shows the traceback)"),
            (
                ModuleNotFoundError("No module named 'torch'", name="torch"),
                "torch is not installed; run pip install torch",
            ),
            (SystemExit(3), "the profiled code called sys.exit(3)"),
        ],
    )
    def test_unexpected_error_is_one_line(
        self,
        run: Run,
        ops_raises: Callable[[BaseException], None],
        error: BaseException,
        message: str,
    ) -> None:
        ops_raises(error)
        assert error_line(run("ops")) == message

    def test_interrupt_exits_with_130(
        self, run: Run, ops_raises: Callable[[BaseException], None]
    ) -> None:
        ops_raises(KeyboardInterrupt())
        result = run("ops")
        assert (result.code, result.err) == (130, "dispatch-flops: interrupted\n")

    def test_error_of_user_code_points_to_debug(self, run: Run) -> None:
        assert error_line(run("profile", "net.py:broken")) == (
            "net.py:broken raised ValueError: a wrong (--debug shows the traceback)"
        )

    def test_debug_prints_the_traceback(self, run: Run) -> None:
        result = run("profile", "net.py:broken", "--debug")
        assert result.code == 2
        assert 'raise ValueError("a wrong' in result.err
        assert "--debug" not in result.err.splitlines()[-1]

    def test_module_of_the_working_directory_is_found(self, run: Run) -> None:
        Path("found_here.py").write_text(NET)
        assert run("profile", "found_here:make", "--device", "meta").code == 0
        del sys.modules["found_here"]

    @pytest.mark.parametrize("command", ["profile --format json", "sweep --set width=3,5"])
    def test_progress_never_reaches_stdout_where_stderr_is_closed(
        self,
        command: str,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        name, *options = command.split()
        arguments = [name, "net.py:make", "--device", "meta", *options]
        main(arguments)
        expected = capsys.readouterr().out
        monkeypatch.setattr(sys, "stderr", None)
        assert main(arguments) == 0
        assert sys.stderr is None
        assert len(capsys.readouterr().out.splitlines()) == len(expected.splitlines())

    def test_process_settings_are_restored(self, run: Run) -> None:
        before = (list(sys.path), warnings.filters.copy(), sys.stdout)
        run("profile", "net.py:make")
        run("profile", "net.py:broken")
        assert (sys.path, warnings.filters, sys.stdout) == before


@pytest.mark.slow
class TestProcess:
    """``python -m dispatch_flops`` as a process of its own."""

    @staticmethod
    def _environment() -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": path}

    def _written_to(
        self, stdout: str, *arguments: str, is_unbuffered: bool = False
    ) -> tuple[int, str]:
        """Run a command whose stdout is a descriptor; return the exit code and stderr.

        It is a fork: to import torch takes longest. Its stdout is made as Python makes one.
        """
        program = f"""
import io, os, runpy, sys
{stdout}
os.dup2(stdout, 1)
raw = io.FileIO(1, "w", closefd=False)
buffer = raw if {is_unbuffered} else io.BufferedWriter(raw)
sys.stdout = io.TextIOWrapper(buffer, write_through={is_unbuffered})
runpy.run_module("dispatch_flops", run_name="__main__")
"""
        done = run_python("-c", program, *arguments, env=self._environment())
        return done.returncode, done.stderr

    def test_exceeded_limit_stops_a_shell_script(self, saved: Save) -> None:
        saved("p.json", "net:make", "--device", "meta")
        Path("ci.sh").write_text(
            f"""set -e
flops() {{ "{sys.executable}" -m dispatch_flops "$@"; }}
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
            env=self._environment(),
        )
        lines = done.stdout.splitlines()
        assert (done.returncode, lines[:2]) == (1, ["within the limit: macs", "kept"]), done.stderr
        assert [line.split(":")[0] for line in lines[2:]] == ["MACs"]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
    @pytest.mark.parametrize("command", ["--help", "--version"])
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_full_disk_is_an_error_of_stdout(self, command: str, unbuffered: str) -> None:
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "dispatch_flops", command],
                stdout=full,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
                timeout=120,
                env=self._environment() | {"PYTHONUNBUFFERED": unbuffered},
            )
        assert (done.returncode, done.stderr) == FULL

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no full device")
    @pytest.mark.parametrize("is_unbuffered", [False, True])
    def test_full_disk_is_an_error_of_a_commands_stdout(self, is_unbuffered: bool) -> None:
        full = 'stdout = os.open("/dev/full", os.O_WRONLY)'
        assert self._written_to(full, "ops", is_unbuffered=is_unbuffered) == FULL

    def test_closed_pipe_is_not_an_error(self) -> None:
        closed = "unread, stdout = os.pipe(); os.close(unread)"
        assert self._written_to(closed, "ops", "--format", "csv") == (0, "")
