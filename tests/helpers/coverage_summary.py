"""Coverage by room of the package, for the end of a test run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import coverage

import dispatch_flops

PACKAGE = Path(dispatch_flops.__file__).parent


def coverage_lines() -> Iterator[str]:
    """Yield a line per room with its statements and their covered share, and one for all."""
    measured = coverage.Coverage()
    measured.load()
    statements: Counter[str] = Counter()
    missing: Counter[str] = Counter()
    for name in measured.get_data().measured_files():
        room = Path(name).relative_to(PACKAGE).parts[0]
        _, lines, _, not_run, _ = measured.analysis2(name)
        for row in (room, "total"):
            statements[row] += len(lines)
            missing[row] += len(not_run)
    for row in sorted(statements, key=lambda row: (row == "total", row)):
        covered = 1 - missing[row] / statements[row] if statements[row] else 1.0
        yield f"{row:<16} {statements[row]:>6} statements {covered:>7.1%} covered"
