"""Timeline in Chrome's trace format, for Perfetto and chrome://tracing.

A profile has durations but no start times. Modules follow each other in the model's order, and
each spans its children.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dispatch_flops.analysis.figures import Figures, tree_figures
from dispatch_flops.analysis.latency import latency_of
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.renderers.run_facts import run_facts
from dispatch_flops.renderers.view import View
from dispatch_flops.units import ratio

__all__ = ["render"]

_MICROSECONDS = 1_000_000
_FLOPS_PER_MICROSECOND = 1_000_000

Event = dict[str, Any]


def render(profile: Profile, view: View | None = None) -> str:
    """Return the trace as JSON, with one track per phase.

    view: ``by`` is "latency", or "flops" where 1 us stands for 1 MFLOP. The default is latency if
        the model's forward pass was measured, else FLOPs.
        A module whose FLOPs exceed a float has no span. Costs that are lower bounds say so.

    Raises ConfigError for another ``by``.

    Example::

        Path("trace.json").write_text(chrome_trace.render(profile))  # open it in ui.perfetto.dev
    """
    by = (view or View()).by
    if by not in (None, "latency", "flops"):
        raise ConfigError(f'by={by!r:.60}: choose "latency" or "flops"')
    if by is None:
        by = "flops" if latency_of(profile.root) is None else "latency"
    name = f"{profile.root.class_name}, by {by} (synthetic layout: start times are not measured)"
    events: list[Event] = [_metadata("process_name", 0, name)]
    for track, phase in enumerate(phases_of(profile)):
        figures = tree_figures(profile.root, phase)
        width = _latency_us if by == "latency" else _flops_us
        spans = list(_spans(profile.root, figures, width, phase, track))
        if spans:
            events += [_metadata("thread_name", track, phase), *spans]
    facts = dict(run_facts(profile.run))
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(trace | ({"otherData": facts} if facts else {}))


def _latency_us(figures: Figures) -> float:
    return (figures.latency_s or 0.0) * _MICROSECONDS


def _flops_us(figures: Figures) -> float:
    return ratio(figures.cost.flops, _FLOPS_PER_MICROSECOND) or 0.0


def _spans(
    root: ModuleNode,
    figures: Mapping[str, Figures],
    width: Callable[[Figures], float],
    phase: Phase,
    track: int,
) -> Iterator[Event]:
    """Yield a span per module of a width above 0; a parent is at least as wide as its children."""
    widths: dict[str, float] = {}
    for node in reversed(list(root.walk())):
        below = sum(widths[child.fqn] for child in node.children)
        widths[node.fqn] = max(width(figures[node.fqn]), below)
    pending = [(root, 0.0)]
    while pending:
        node, start = pending.pop()
        if not widths[node.fqn]:
            continue
        yield _span(node, figures[node.fqn], start, widths[node.fqn], phase, track)
        later = []
        for child in node.children:
            later.append((child, start))
            start += widths[child.fqn]
        pending.extend(reversed(later))


def _span(
    node: ModuleNode, figures: Figures, start: float, width: float, phase: Phase, track: int
) -> Event:
    cost = figures.cost
    return {
        "name": f"{node.name}: {node.class_name}" if node.name else node.class_name,
        "cat": phase,
        "ph": "X",
        "ts": start,
        "dur": width,
        "pid": 0,
        "tid": track,
        "args": {
            "fqn": node.fqn,
            "calls": node.calls,
            "params": node.total_params,
            "macs": cost.macs,
            "flops": cost.flops,
            "bytes": cost.bytes_total,
            **({"is_lower_bound": True} if figures.lower_bound else {}),
        },
    }


def _metadata(kind: str, track: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": 0, "tid": track, "args": {"name": name}}
