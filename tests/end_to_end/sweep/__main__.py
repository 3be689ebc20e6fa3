"""Report how much of torch's operator database is covered.

``python -m tests.end_to_end.sweep [EVERY]`` runs one sample in EVERY of a case, at most 16; by
default all of them.
"""

from __future__ import annotations

import sys

from tests.end_to_end.sweep.opdb import coverage_report, coverage_text


def main(arguments: list[str]) -> int:
    """Print the report; return 1 if an overload is unknown or a result changed."""
    report = coverage_report(every=int(arguments[0]) if arguments else 1)
    print(coverage_text(report))
    return 1 if report.unknown or report.errors or report.changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
