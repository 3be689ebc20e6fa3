"""Formats: which one is chosen."""

from __future__ import annotations

import pytest

from dispatch_flops.cli.formats import FORMATS, choose_format


@pytest.mark.parametrize(
    "file,name",
    [
        ("x.json", "json"),
        ("x.csv", "csv"),
        ("x.MD", "markdown"),
        ("x.trace.json", "trace"),
        ("x.collapsed", "collapsed"),
        ("x.html", "html"),
        ("x.txt", "overview"),
        ("folder/x.csv", "csv"),
        (None, "overview"),
    ],
)
def test_suffix_of_the_file_chooses_the_format(file: str | None, name: str) -> None:
    assert choose_format(None, file) is FORMATS[name]


def test_named_format_precedes_the_suffix() -> None:
    assert choose_format("json", "x.csv") is FORMATS["json"]
