"""Remarks below the tables: what is not in the numbers, and what else a reader should know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dispatch_flops.analysis.latency import inexact_latencies, inexact_phases
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.explanations import (
    OF_WHAT_WAS_COUNTED,
    attention_counting,
    outside_text,
)
from dispatch_flops.renderers.table import uncounted_rows
from dispatch_flops.renderers.text import first_names, one_line
from dispatch_flops.units import calls_text


def remarks(profile: Profile) -> Iterator[str]:
    """Yield one line per remark."""
    uncounted = list(uncounted_rows(profile))
    if uncounted:
        listed = [f"{op} ({calls_text(calls)}: {why})" for op, calls, why in uncounted]
        bounds = f"numbers marked >= are lower bounds, and {OF_WHAT_WAS_COUNTED}"
        yield f"Not counted, so that {bounds}: {_some(listed)}."
    if outside := outside_text(profile):
        yield f"{outside}."
    unused = [fqn or profile.root.class_name for fqn in profile.uncalled_modules()]
    if unused:
        yield f"Took no part in the run: {_some(unused)}."
    free = sorted({op.op for op in profile.op_totals() if op.kind == "free"})
    if free:
        yield f"Free (views, copies, indexing, random numbers): {_some(free)}."
    if (profile.run.causal, profile.run.target) != ("full", "cpu"):
        yield f"Attention: {attention_counting(profile.run)}."
    if inexact_phases(profile) or inexact_latencies(profile.root, profile.timing):
        yield "~ latency may be off by more than 10 %."
    yield from (f"Note: {one_line(note)}" for note in profile.notes)


def _some(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    return first_names([*map(one_line, names)])
