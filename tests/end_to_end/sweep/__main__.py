"""Cover torch's operator database: ``python -m tests.end_to_end.sweep [share [samples]]``."""

from __future__ import annotations

import sys

from .opdb import coverage_report, coverage_text


def main(arguments: list[str]) -> int:
    """Print the report; 1 if an overload is unknown or a result changed."""
    share = float(arguments[0]) if arguments else 1.0
    at_most = int(arguments[1]) if len(arguments) > 1 else None
    report = coverage_report(share, at_most)
    print(coverage_text(report))
    return 1 if report.unknown or report.errors or report.changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
