"""The second of DeepSpeed's three parts: the heaviest module classes at each depth."""

from __future__ import annotations

from collections.abc import Callable

from dispatch_flops.analysis.figures import Figures, Key, by_depth, top, walk_with_depth
from dispatch_flops.analysis.latency import inexact_latencies
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.deepspeed.units import (
    duration_to_string,
    macs_to_string,
    params_to_string,
)
from dispatch_flops.renderers.text import about, at_least
from dispatch_flops.renderers.view import View

_COLUMNS: tuple[tuple[str, Key, Callable[[Figures, bool], str]], ...] = (
    ("params     ", "params", lambda f, _: params_to_string(f.params)),
    ("MACs       ", "macs", lambda f, _: at_least(macs_to_string(f.cost.macs), f.lower_bound)),
    (
        "fwd latency",
        "latency",
        lambda f, inexact: about(duration_to_string(f.latency_s), inexact),
    ),
)


def render(profile: Profile, view: View | None = None) -> str:
    """Return the heaviest classes at each depth, each with the sum of its modules there.

    All numbers are of the forward pass, as DeepSpeed's are. ``~`` marks a latency with a part that
    may be off by more than 10 %.

    view: ``depth`` and ``top``.
    """
    view = view or View()
    levels = by_depth(profile.root, "forward")
    if view.depth is not None:
        levels = levels[: view.depth + 1]
    fqns = inexact_latencies(profile.root, profile.timing)
    inexact = {
        (depth, node.class_name)
        for node, depth in walk_with_depth(profile.root)
        if node.fqn in fqns
    }
    most = 1 if view.top is None else view.top
    lines = [
        f"Top {most} modules in terms of params, MACs or fwd latency at different model depths:"
    ]
    for depth, classes in enumerate(levels):
        lines.append(f"depth {depth}:")
        for label, key, text in _COLUMNS:
            heaviest = top(classes, key, most)
            shown = {name: text(f, (depth, name) in inexact) for name, f in heaviest}
            lines.append(f"    {label} - {shown}")
    return "\n".join(lines)
