"""``show`` and ``report``: saved profiles in every format."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from dispatch_flops import Profile
from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.cli import formats
from tests.helpers.command_line import Run, Save, error_line, macs
from tests.helpers.communicating import communicating
from tests.helpers.html_pages import page_data


class TestShow:
    # The formats of memory and communication say of this profile that they were not recorded.
    @pytest.mark.parametrize(
        "name", sorted(formats.FORMATS.keys() - {"comm", "csv-comm", "memory"})
    )
    def test_every_format_shows_a_profile(self, run: Run, saved: Save, name: str) -> None:
        saved("p.json", "net.py:make", "--backward")
        result = run("show", "p.json", "--format", name)
        assert result.code == 0
        assert "head" in result.out

    def test_comm_shows_what_a_rank_sends_and_receives(self, run: Run) -> None:
        Path("rank5.json").write_text(communicating().to_json(), encoding="utf-8")
        result = run("show", "rank5.json", "--format", "comm")
        assert result.code == 0
        assert "reduce_scatter  dp (3 ranks)" in result.out

    def test_file_has_the_format_of_its_suffix(self, run: Run, saved: Save) -> None:
        profile = saved("p.json", "net.py:make")
        Path("folder").mkdir()
        assert run("show", "p.json", "--output", "folder/x.csv").out == ""
        expected = formats.FORMATS["csv"].render(profile, formats.View())
        assert Path("folder/x.csv").read_text() == expected.removesuffix("\n") + "\n"

    def test_view_options_apply(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")

        def text(*options: str) -> str:
            return run("show", "p.json", "--format", "deepspeed", *options).out

        assert "(0-1): 2 x Linear(" in text("--fold")
        assert "(0): Linear(" in text("--no-fold")
        assert "(0): Linear(" not in text("--depth", "1")
        assert "(head): Linear(" in text("--depth", "1")
        assert "(head): Linear(" not in text("--no-detailed")
        assert "Top 3 modules" in text("--top", "3")
        table = run("show", "p.json", "--format", "table", "--depth", "1").out
        assert "Net.head" in table
        assert "Net.layers.0" not in table

    def test_overview_options_apply(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")

        def text(*options: str) -> str:
            return run("show", "p.json", *options).out

        assert "layers.0-1 (2 x Linear)" in text()
        assert "each (Linear)" in text()
        assert "1 (Linear)" in text("--no-fold")
        assert "head (Linear)" in text("--depth", "1")
        assert "each (Linear)" not in text("--depth", "1")
        assert "Share" in text()
        assert "Share" not in text("--columns", "macs,bytes")
        assert text("--columns", " macs, bytes") == text("--columns", "macs,bytes")
        assert text("--sort", "macs").startswith("Net: ")

    @pytest.mark.parametrize(
        "option",
        [
            "--depth 0",
            "--top 2",
            "--no-detailed",
            "--sort macs",
            "--columns macs",
            "--machine H200",
        ],
    )
    def test_option_acts_or_is_refused(self, run: Run, saved: Save, option: str) -> None:
        saved("p.json", "net.py:make", "--backward", "--memory", "--set", "width=2")
        for name in formats.FORMATS:
            command = ("show", "p.json", "--format", name)
            result = run(*command, *option.split())
            if result.code == 0:
                assert result.out != run(*command).out
            else:
                refusal = f"{option.split()[0]} has no effect on the format {name}; omit it, or use"
                assert error_line(result).startswith(refusal)

    def test_refused_option_names_the_formats_that_have_it(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")
        message = error_line(run("show", "p.json", "--output", "x.csv", "--depth", "1"))
        assert message.endswith("--format overview or deepspeed or table or markdown or memory")
        assert not Path("x.csv").exists()
        message = error_line(run("show", "p.json", "--format", "json", "--no-fold"))
        assert message.startswith("--no-fold has no effect on the format json; omit it, or use ")

    def test_closed_stdin_is_an_error_that_says_so(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", None)
        assert error_line(run("show", "-")) == "cannot read '-': stdin is closed"

    def test_empty_stdin_is_an_error_that_says_so(
        self, run: Run, saved: Save, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO())  # of a command in a pipe that failed
        message = "cannot read '-': stdin is empty, or was read before"
        assert error_line(run("show", "-")) == message
        profile = saved("p.json", "net.py:make")
        monkeypatch.setattr(sys, "stdin", io.StringIO(profile.to_json()))
        assert error_line(run("diff", "-", "-")) == message

    def test_dash_reads_stdin(self, run: Run, saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
        profile = saved("p.json", "net.py:make")
        monkeypatch.setattr(sys, "stdin", io.StringIO(profile.to_json()))
        assert Profile.from_json(run("show", "-", "--format", "json").out) == profile

    def test_dash_as_output_is_stdout(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")
        options = ("p.json", "--format", "json")
        assert run("show", *options, "--output", "-").out == run("show", *options).out
        assert "</html>" in run("report", "p.json", "-").out
        assert not Path("-").exists()

    def test_file_that_is_not_a_profile_is_refused(self, run: Run) -> None:
        Path("latin.json").write_bytes(b"\xff\xfe\x00")
        Path("other.json").write_text("{}")
        future = {"schema": "dispatch_flops.profile", "version": 99}
        Path("future.json").write_text(json.dumps(future))

        def message(file: str) -> str:
            return error_line(run("show", file))

        assert message("missing.json") == "cannot read 'missing.json': No such file or directory"
        assert message(".") == "cannot read '.': Is a directory"
        assert message("latin.json") == "cannot read 'latin.json': it is not a text file"
        assert message("net.py").startswith("net.py: this is not JSON")
        assert message("other.json").startswith("other.json: this is not a dispatch_flops profile")
        assert "version 99" in message("future.json")

    def test_file_with_the_mark_of_its_encoding_is_read(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")
        Path("marked.json").write_bytes(b"\xef\xbb\xbf" + Path("p.json").read_bytes())
        assert run("show", "marked.json") == run("show", "p.json")


class TestReport:
    def test_page_of_the_html_format_is_written(
        self, run: Run, saved: Save, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = formats.Format(help="a page", render=lambda p, _: f"<p>{p.total().macs}</p>")
        monkeypatch.setitem(formats.FORMATS, "html", page)
        saved("p.json", "net.py:make")
        Path("out").mkdir()
        assert run("report", "p.json", "out/r.html").code == 0
        assert Path("out/r.html").read_text() == f"<p>{macs()}</p>\n"

    def test_page_names_the_machine(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")
        named = ("--machine", "NVIDIA H200")
        for arguments in (("report", "p.json", "r.html"), ("show", "p.json", "--output", "r.html")):
            assert run(*arguments, *named).code == 0
            page = Path("r.html").read_text(encoding="utf-8")
            assert MACHINES["NVIDIA H200"].source in str(page_data(page))

    def test_name_of_another_format_is_refused(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")
        result = run("report", "p.json", "r.csv")
        assert error_line(result).startswith("report writes HTML, and 'r.csv' does not end in ")
        assert not Path("r.csv").exists()
