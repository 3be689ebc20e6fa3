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
from tests.helpers.command_line import Run, Save, macs, refused


class TestShow:
    @pytest.mark.parametrize("name", sorted(formats.FORMATS))
    def test_every_format_shows_every_profile(self, run: Run, saved: Save, name: str) -> None:
        saved("p.json", "net.py:make", "--backward")
        result = run("show", "p.json", "--format", name)
        assert result.code == 0
        assert "head" in result.out

    @pytest.mark.parametrize(
        "file,name",
        [
            ("x.json", "json"),
            ("x.csv", "csv"),
            ("x.MD", "markdown"),
            ("x.trace.json", "trace"),
            ("x.collapsed", "collapsed"),
            ("x.txt", "deepspeed"),
            ("folder/x.csv", "csv"),
        ],
    )
    def test_a_file_name_says_the_format(self, run: Run, saved: Save, file: str, name: str) -> None:
        profile = saved("p.json", "net.py:make")
        assert run("show", "p.json", "--output", file).out == ""
        expected = formats.FORMATS[name].render(profile, formats.View())
        assert Path(file).read_text() == expected.removesuffix("\n") + "\n"

    def test_a_named_format_comes_first(self, run: Run, saved: Save) -> None:
        profile = saved("p.json", "net.py:make")
        run("show", "p.json", "--output", "x.csv", "--format", "json")
        assert Profile.from_json(Path("x.csv").read_text()) == profile

    def test_stdin(self, run: Run, saved: Save, monkeypatch: pytest.MonkeyPatch) -> None:
        profile = saved("p.json", "net.py:make")
        monkeypatch.setattr(sys, "stdin", io.StringIO(profile.to_json()))
        assert Profile.from_json(run("show", "-", "--format", "json").out) == profile

    def test_files_that_hold_no_profile(self, run: Run) -> None:
        Path("latin.json").write_bytes(b"\xff\xfe\x00")
        Path("other.json").write_text("{}")
        future = {"schema": "dispatch_flops.profile", "version": 99}
        Path("future.json").write_text(json.dumps(future))
        refused(run("show", "missing.json"), "cannot read 'missing.json'", "No such file")
        refused(run("show", "."), "cannot read '.'")
        refused(run("show", "latin.json"), "it is no text")
        refused(run("show", "net.py"), "net.py: this is not JSON")
        refused(run("show", "other.json"), "other.json: this is not a dispatch_flops profile")
        refused(run("show", "future.json"), "version 99")


class TestReport:
    def test_it_is_offered_where_there_is_a_renderer(
        self, run: Run, saved: Save, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = formats.Format(help="a page", render=lambda p, _: f"<p>{p.total().macs}</p>")
        monkeypatch.setitem(formats.FORMATS, "html", page)
        saved("p.json", "net.py:make")
        assert run("report", "p.json", "out/r.html").code == 0
        assert Path("out/r.html").read_text() == f"<p>{macs()}</p>\n"

    def test_the_machine_is_named(self, run: Run, saved: Save) -> None:
        saved("p.json", "net.py:make")
        named = ("--machine", "NVIDIA H200")
        for arguments in (("report", "p.json", "r.html"), ("show", "p.json", "--output", "r.html")):
            assert run(*arguments, *named).code == 0
            assert MACHINES["NVIDIA H200"].source in Path("r.html").read_text(encoding="utf-8")
        refused(run("report", "p.json", "r.html", "--machine", "abacus"), "'abacus' is none of")
