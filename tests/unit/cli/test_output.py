"""Output: results, files, errors and progress."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from dispatch_flops.cli.output import (
    check_writable,
    csv_text,
    emit,
    page,
    print_error,
    progress_bar,
)
from dispatch_flops.errors import TargetError


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestEmit:
    def test_result_is_printed_with_one_line_end(self, capsys: pytest.CaptureFixture[str]) -> None:
        emit("text")
        emit("text\n")
        assert capsys.readouterr() == ("text\ntext\n", "")

    def test_file_is_written_into_its_folder(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("folder").mkdir()
        emit("M·N", "folder/x.txt")
        assert Path("folder/x.txt").read_bytes() == "M·N\n".encode()
        assert capsys.readouterr() == ("", "written to folder/x.txt\n")

    def test_character_unknown_to_the_terminal_is_replaced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stream)
        emit("M·N\n")
        assert stream.buffer.getvalue() == b"M?N\n"  # type: ignore[attr-defined]

    def test_page_is_utf8_as_it_says_whatever_stdout_is(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
        monkeypatch.setattr(sys, "stdout", stream)
        emit('<!DOCTYPE html><meta charset="utf-8">é ▌')
        written = stream.buffer.getvalue()  # type: ignore[attr-defined]
        assert written.decode() == '<!DOCTYPE html><meta charset="utf-8">é ▌\n'

    @pytest.mark.parametrize(
        "output,message",
        [
            (".", "cannot write '.': it is a folder; name a file in it"),
            (
                "none/x",
                "cannot write 'none/x': the folder 'none' does not exist; make it first",
            ),
            (f"{__file__}/x", f"cannot write '{__file__}/x': its folder is a file"),
            ("x" * 256, f"cannot write '{'x' * 256}': File name too long"),
        ],
    )
    def test_unwritable_file_is_refused(self, output: str, message: str) -> None:
        with pytest.raises(TargetError) as caught:
            emit("text", output)
        assert str(caught.value) == message

    def test_check_of_a_file_leaves_the_folder_as_it_was(self) -> None:
        Path("old").write_text("text")
        Path("dangling").symlink_to("nowhere")
        os.mkfifo("pipe")  # to open it would wait for a reader
        before = sorted(Path().iterdir())
        for name in ("old", "new", "dangling", "pipe"):
            check_writable(Path(name))
        assert sorted(Path().iterdir()) == before
        assert Path("old").read_text() == "text"

    def test_file_of_another_user_is_refused_before_anything_runs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(TargetError, match="cannot write 'new': Permission denied"):
            check_writable(Path("new"))


def test_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("first\n  second")
    assert capsys.readouterr().err == "dispatch-flops: first second\n"


def test_csv_text_has_a_header_and_quotes_where_needed() -> None:
    assert csv_text(("a", "b"), [(1, "x,y"), (None, 0.5)]) == 'a,b\n1,"x,y"\n,0.5\n'


class TestProgressBar:
    @staticmethod
    def _run(steps: int = 3, fail: bool = False) -> None:
        with progress_bar(3) as advance:
            for step in range(steps):
                advance(f"s={step}")
            if fail:
                raise TargetError("no more")

    def test_terminal_shows_a_bar(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("tqdm")
        monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
        self._run()
        last = terminal.getvalue().split("\r")[-1]
        assert "100%" in last
        assert "3/3" in last
        assert "s=2" in last
        assert last.endswith("\n")

    def test_bar_of_a_failed_run_counts_finished_steps(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("tqdm")
        monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
        with pytest.raises(TargetError):
            self._run(2, fail=True)
        last = terminal.getvalue().split("\r")[-1]
        assert "1/3" in last
        assert last.endswith("\n")

    def test_terminal_without_tqdm_shows_a_changing_line(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        monkeypatch.setattr(sys, "stderr", terminal := _Terminal())
        self._run()
        lines = "".join(f"\r\x1b[K[{n}/3] s={n - 1}" for n in (1, 2, 3))
        assert terminal.getvalue() == f"{lines}\n"

    def test_pipe_receives_a_line_per_step(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._run()
        assert capsys.readouterr().err == "[1/3] s=0\n[2/3] s=1\n[3/3] s=2\n"


class TestPage:
    LINES = "a line\n" * 100

    @pytest.fixture
    def paged(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """What a pager was given."""
        seen: list[str] = []
        monkeypatch.setenv("PAGER", f"{sys.executable} -x")
        monkeypatch.setattr(
            "dispatch_flops.cli.output.subprocess.run",
            lambda command, input, **_: seen.append(f"{command[1]} {input}"),
        )
        return seen

    def test_long_text_on_a_terminal_goes_through_the_pager(
        self, paged: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        page(self.LINES)
        assert paged == [f"-x {self.LINES}"]

    def test_short_text_on_a_terminal_is_printed(
        self,
        paged: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        page("a line")
        assert (paged, capsys.readouterr().out) == ([], "a line\n")

    def test_text_in_a_pipe_is_printed(
        self, paged: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        page(self.LINES)
        assert (paged, capsys.readouterr().out) == ([], self.LINES)
