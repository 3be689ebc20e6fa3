"""Counters side by side: a table for each group of workloads, and exact rows in total."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from counters import Reading, Workload, installed, readings, versions
from tabulate import tabulate

OURS = "dispatch_flops"


class Explained(Workload, Protocol):
    """Workload with its truth written out, and why counters differ on it."""

    note: str

    @property
    def truth(self) -> str: ...


def main(title: str, command: str, legend: str, groups: Mapping[str, Sequence[Explained]]) -> int:
    """Print all tables; return 1 if dispatch_flops differs from a truth, else 0."""
    parser = argparse.ArgumentParser(prog=command)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown document")
    parser.add_argument("--only", default="", help="only workloads whose name contains it")
    options = parser.parse_args()
    chosen = {g: [w for w in group if options.only in w.name] for g, group in groups.items()}
    style = "github" if options.markdown else "simple"
    heading = "## " if options.markdown else ""
    names = installed()
    cells = _cells(names, [w for group in chosen.values() for w in group])
    if options.markdown:
        packages = ", ".join(f"{package} {version}" for package, version in versions().items())
        print(f"# {title}\n\nMade by `{command} --markdown`. {packages}; CPU.\n\n{legend}\n")
    for group, workloads in chosen.items():
        if workloads:
            rows = [_row(w, cells[id(w)]) for w in workloads]
            headers = ["", "truth", *names, "who is right and why"]
            print(f"{heading}{group}\n\n{_table(rows, headers, style)}\n")
    totals = _exact(names, list(cells.values()))
    print(f"{heading}Exact rows\n\n{_table([list(totals.values())], list(totals), style)}")
    wrong = [w.name for group in chosen.values() for w in group if cells[id(w)][OURS] != "1"]
    for name in wrong:
        print(f"{OURS} differs from the truth: {name}", file=sys.stderr)
    return 1 if wrong else 0


def _cells(names: Sequence[str], workloads: Sequence[Workload]) -> dict[int, dict[str, str]]:
    cells: dict[int, dict[str, str]] = {id(w): {} for w in workloads}
    for name in names:
        print(f"{name} ...", file=sys.stderr)
        for workload, reading in zip(workloads, readings(name, workloads), strict=True):
            cells[id(workload)][name] = ratio(reading, workload.macs)
    return cells


def _row(workload: Explained, found: Mapping[str, str]) -> list[str]:
    why = ""
    if any(map(_says_more, found.values())):
        why = workload.note or "**not explained**"
    cells = ["**1**" if cell == "1" else cell for cell in found.values()]
    return [workload.name, workload.truth, *cells, why]


def _table(rows: list[list[str]], headers: list[str], style: str) -> str:
    return tabulate(rows, headers, tablefmt=style, disable_numparse=True)


def ratio(reading: Reading, macs: int) -> str:
    """Return ``1`` if exact, the reading itself if the truth is 0, else reading / truth."""
    if isinstance(reading, str):
        return reading
    if reading == macs:
        return "1"
    return f"{reading / macs:.4f}" if macs and reading else f"{reading:,}"


def _says_more(cell: str) -> bool:
    """Return whether a cell needs explaining: not exact, unseen, not offered or crashed."""
    return cell not in ("0", "1", "n/a") and not cell.startswith(("crash", "0 ("))


def _exact(names: Sequence[str], rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return ``exact/tried`` of each counter."""
    return {
        name: f"{sum(row[name] == '1' for row in rows)}/{sum(row[name] != 'n/a' for row in rows)}"
        for name in names
    }
