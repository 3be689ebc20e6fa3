"""The sentence that names what ran without a known cost."""

from __future__ import annotations

from collections.abc import Mapping

from dispatch_flops.units import calls_text


def unknown_costs_text(calls: Mapping[str, int], errors: Mapping[str, str]) -> str:
    """Return ``"no cost is known for lib.op.default (2 calls): totals are lower bounds"``.

    calls: by the operator. errors: why the cost is not known, of those of which it is known why.
    """
    listed = ", ".join(
        f"{op} ({calls_text(number)}{'; ' + errors[op] if op in errors else ''})"
        for op, number in calls.items()
    )
    return f"no cost is known for {listed}: totals are lower bounds"
