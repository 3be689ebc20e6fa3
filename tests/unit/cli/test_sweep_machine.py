"""``sweep --machine``: least time, attainable rate and MFU ceiling at each point."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from tests.helpers.command_line import Run

IN, OUT, F32 = 7, 11, 4
PEAK, BANDWIDTH, CAPACITY = 1e9, 1e7, 600
LINEAR = f"""
import torch

def make():
    return torch.nn.Linear({IN}, {OUT}, bias=False)
"""
MACHINE = {
    "name": "mine", "flops_per_s": {"float32": PEAK}, "bytes_per_s": BANDWIDTH,
    "memory_bytes": CAPACITY,
}  # fmt: skip
SWEEP = (
    "sweep", "linear.py:make", "--input-shape", f"batch,{IN}", "--device", "meta",
    "--set", "batch=2,5", "--machine", "mine.json",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    (tmp_path / "mine.json").write_text(json.dumps(MACHINE))


def moved(batch: int) -> int:
    return F32 * (IN * OUT + batch * (IN + OUT))


def test_csv_has_the_bounds_of_each_point(run: Run) -> None:
    result = run(*SWEEP, "--format", "csv", "--memory")
    rows = list(csv.DictReader(io.StringIO(result.out)))
    assert result.code == 0, result.err
    for row, batch in zip(rows, (2, 5), strict=True):
        flops, least = 2 * batch * IN * OUT, moved(batch) / BANDWIDTH
        assert float(row["least_s"]) == pytest.approx(least)
        assert float(row["attainable_flops_per_s"]) == pytest.approx(flops / least)
        assert float(row["mfu_ceiling"]) == pytest.approx(flops / PEAK / least)
        assert row["bound"] == "memory"
        assert row["fits"] == str(int(moved(batch) <= CAPACITY))
    assert {row["fits"] for row in rows} == {"0", "1"}


def test_table_names_the_machine_and_says_what_fits(run: Run) -> None:
    lines = run(*SWEEP, "--memory").out.splitlines()
    headings = "Least time Attainable MFU ceiling Bound by Fits"
    assert " ".join(lines[0].split()).endswith(f"Peak memory {headings}")
    assert [line.split()[-1] for line in lines[2:4]] == ["yes", "no"]
    assert lines[-1].endswith("are of unfused operators on mine")


def test_table_without_memory_does_not_say_what_fits(run: Run) -> None:
    assert run(*SWEEP).out.splitlines()[0].split()[-2:] == ["Bound", "by"]


def test_machine_without_figures_has_no_bounds(run: Run) -> None:
    Path("mine.json").write_text(json.dumps({"name": "mine"}))
    result = run(*SWEEP, "--memory")
    assert result.code == 0
    assert result.out.splitlines()[2].split()[-5:] == ["n/a"] * 5


def test_plot_has_a_panel_for_each_figure_and_a_line_at_the_capacity(run: Run) -> None:
    pytest.importorskip("matplotlib")
    assert run(*SWEEP, "--memory", "--plot", "p.svg").code == 0
    svg = Path("p.svg").read_text()
    for text in (
        "FLOPs: batch^1.00", "least seconds", "attainable FLOP/s", "MFU ceiling",
        "bytes at the peak", "600 B of memory", "<!-- batch -->",
    ):  # fmt: skip
        assert text in svg
    assert svg.count('id="axes_') == 5


def test_plot_has_no_panel_of_what_is_unknown(run: Run) -> None:
    pytest.importorskip("matplotlib")
    Path("mine.json").write_text(json.dumps({"name": "mine"}))
    assert run(*SWEEP, "--plot", "p.svg").code == 0
    assert Path("p.svg").read_text().count('id="axes_') == 1
