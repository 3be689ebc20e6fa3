"""The second of DeepSpeed's three parts: the heaviest module classes at each depth."""

from __future__ import annotations

from collections.abc import Callable

from dispatch_flops.analysis.figures import Figures, Key, by_depth, top
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.deepspeed.units import (
    duration_to_string,
    macs_to_string,
    params_to_string,
)
from dispatch_flops.renderers.text import at_least

_COLUMNS: tuple[tuple[str, Key, Callable[[Figures], str]], ...] = (
    ("params     ", "params", lambda f: params_to_string(f.params)),
    ("MACs       ", "macs", lambda f: at_least(macs_to_string(f.cost.macs), f.lower_bound)),
    ("fwd latency", "latency", lambda f: duration_to_string(f.latency_s)),
)


def render(profile: Profile, *, module_depth: int = -1, top_modules: int = 1) -> str:
    """The top classes of the depths 0 to ``module_depth``, or of all depths if it is -1.

    Modules of one class at one depth are added up. Forward numbers, as DeepSpeed's.
    """
    levels = by_depth(profile.root, "forward")
    if module_depth >= 0:
        levels = levels[: module_depth + 1]
    lines = [
        f"Top {top_modules} modules in terms of params, MACs or fwd latency "
        "at different model depths:"
    ]
    for depth, classes in enumerate(levels):
        lines.append(f"depth {depth}:")
        for label, key, text in _COLUMNS:
            shown = {name: text(f) for name, f in top(classes, key, top_modules)}
            lines.append(f"    {label} - {shown}")
    return "\n".join(lines)
