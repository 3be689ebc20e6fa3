"""``sweep --plot``: what is drawn, and what cannot be drawn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dispatch_flops.cli.sweep_plot import SweepPlot
from tests.helpers.command_line import Run, error_line

SWEEP = ("sweep", "net.py:make", "--device", "meta", "--set")
NO_AXIS = (
    "--plot needs a size with two or more positive values; add one with --set, such as "
    "seq=128..4096"
)


def test_plot_has_a_curve_per_combination_of_the_other_sizes(run: Run) -> None:
    pytest.importorskip("matplotlib")
    result = run(*SWEEP, "width=10,20", "batch=2,4,8", "--plot", "p.svg")
    assert (result.code, result.err.splitlines()[-1]) == (0, "written to p.svg")
    svg = Path("p.svg").read_text()
    for text in ("<!-- batch -->", "width=10: batch^1.00", "width=20: batch^1.00"):
        assert text in svg
    assert "≥" not in svg
    assert "FLOPs ~ batch^1 " in result.out


def test_plot_of_one_size_is_written_as_png(run: Run) -> None:
    pytest.importorskip("matplotlib")
    assert run(*SWEEP, "batch=2,4", "--plot", "p.png").code == 0
    assert Path("p.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_lower_bound_is_marked() -> None:
    pytest.importorskip("matplotlib")
    plot = SweepPlot.of_grid([{"s": 4}, {"s": 2}], "p.svg")
    plot.write([16, 4], is_lower_bound=True)
    svg = Path("p.svg").read_text()
    assert "FLOPs: s^2.00" in svg
    assert "≥ FLOPs" in svg


@pytest.mark.parametrize(
    "sizes,name,message",
    [
        (("batch=2,4",), "p.gif", "--plot p.gif has an unknown suffix; use .png, .svg or .pdf"),
        (
            ("batch=2,4",),
            "none/p.svg",
            "cannot write 'none/p.svg': the folder 'none' does not exist; make it first",
        ),
        (("batch=2",), "p.svg", NO_AXIS),
        (("batch=0,2",), "p.svg", NO_AXIS),
        (("kind=a,b",), "p.svg", NO_AXIS),
        (
            ("batch=2,4,8", "a=1,2,3", "b=1,2,3", "c=1,2"),
            "p.svg",
            "--plot would draw 18 curves; sweep at most 12",
        ),
    ],
)
def test_plot_that_cannot_be_drawn_is_refused_before_the_runs(
    run: Run, sizes: tuple[str, ...], name: str, message: str
) -> None:
    pytest.importorskip("matplotlib")
    result = run(*SWEEP, *sizes, "--plot", name)
    assert error_line(result) == message
    assert len(result.err.splitlines()) == 1


def test_missing_matplotlib_is_reported_before_the_runs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(*SWEEP, "batch=2,4", "--plot", "p.svg")
    assert error_line(result) == (
        "--plot needs matplotlib; run pip install 'dispatch-flops[plots]'"
    )
    assert len(result.err.splitlines()) == 1
