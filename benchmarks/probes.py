"""One operator at a time: what each counter reads, beside the truth.

    DS_BUILD_OPS=0 pip install -c tests/constraints.txt '.[test,peers]'
    python benchmarks/probes.py [--markdown] [--only TEXT]

Truths are products, written in tests/one_op. Counters that are not installed are left out.
Exits with 1 if ours differs from a truth anywhere.
"""

from __future__ import annotations

import argparse
import sys

from counters import exact, installed, needs_words, ratio, readings, versions
from one_op import GROUPS, PROBES, Probe
from tabulate import tabulate

LEGEND = """\
Reading / truth, in MACs; **1** is exact to the integer. Where the truth is 0 the reading itself
stands. torch's FLOPs are halved; a backward row is forward and backward together.

- `0`: the peer knows no such operator or call, and says nothing of it (fvcore warns). The
  products run all the same: whoever counts them is right.
- `0 (FLOPs/2: r)`: DeepSpeed reports no MACs; half its FLOPs are r times the truth.
- `crash: E`: a valid program raises E when profiled, and runs without.
- `n/a`: the counter does not measure a backward pass. calflops does not either: it takes three
  times the forward.
- Anything else is explained in its row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="print a document")
    parser.add_argument("--only", default="", help="probes with this in their name")
    options = parser.parse_args()
    names = installed()
    chosen = [p for p in PROBES if options.only in p.name]
    read = {name: dict(zip(map(id, chosen), readings(name, chosen), strict=True)) for name in names}
    cells = {
        id(p): {name: ratio(read[name][id(p)], p.macs) for name in names} for p in chosen
    }
    if options.markdown:
        print("# One-operator probes\n")
        print("Made by `python benchmarks/probes.py --markdown`.", end=" ")
        print(", ".join(f"{k} {v}" for k, v in versions().items()) + "; CPU.\n")
        print(LEGEND + "\n")
    for group, probes in GROUPS.items():
        rows = [p for p in probes if id(p) in cells]
        if rows:
            print(f"## {group}\n" if options.markdown else group)
            print(_table(rows, cells, names, options.markdown) + "\n")
    totals = exact(names, list(cells.values()))
    print("## Exact rows\n" if options.markdown else "Exact rows")
    print(_as(options.markdown, [list(totals.values())], list(totals)))
    wrong = [p.name for p in chosen if cells[id(p)]["dispatch_flops"] != "1"]
    for name in wrong:
        print(f"dispatch_flops differs from the truth: {name}", file=sys.stderr)
    return 1 if wrong else 0


def _table(
    probes: list[Probe], cells: dict[int, dict[str, str]], names: list[str], markdown: bool
) -> str:
    rows = []
    for probe in probes:
        found = cells[id(probe)]
        why = probe.note if any(map(needs_words, found.values())) else ""
        if any(map(needs_words, found.values())) and not why:
            why = "**not explained yet**"
        rows.append([f"`{probe.name}`", probe.truth, *(_bold(found[n]) for n in names), why])
    return _as(markdown, rows, ["call", "truth", *names, "who is right and why"])


def _bold(cell: str) -> str:
    return "**1**" if cell == "1" else cell


def _as(markdown: bool, rows: list[list[str]], headers: list[str]) -> str:
    return tabulate(
        rows, headers, tablefmt="github" if markdown else "simple", disable_numparse=True
    )


if __name__ == "__main__":
    raise SystemExit(main())
