"""DeepSpeed's printed profile in its three parts, followed by the operators and conventions."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis.latency import latency_of
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile
from dispatch_flops.profile.tree import is_int_of
from dispatch_flops.renderers import table
from dispatch_flops.renderers.deepspeed import aggregated, detailed, summary
from dispatch_flops.renderers.explanations import (
    OF_WHAT_WAS_COUNTED,
    attention_counting,
    counting,
    outside_text,
)
from dispatch_flops.renderers.run_facts import run_facts
from dispatch_flops.renderers.text import RULE, heading, one_line
from dispatch_flops.renderers.view import View
from dispatch_flops.units import seconds_text

__all__ = ["render"]


def render(profile: Profile, view: View | None = None) -> str:
    """Return summary, aggregated and detailed profile in DeepSpeed's format, then the operators.

    view: ``step``, ``depth``, ``top``, ``detailed``, ``fold`` and ``recompute_fwd_factor``.

    Example::

        print(deepspeed.render(profile, View(depth=1, top=3, detailed=False)))
    """
    view = view or View()
    parts = [summary.render(profile, view), ""]
    parts += [heading("Aggregated Profile per GPU", 29), aggregated.render(profile, view)]
    if view.detailed:
        parts += ["", heading("Detailed Profile per GPU", 30), detailed.render(profile, view)]
    parts += [RULE, "", heading("Operators per GPU", 30), *_conventions(profile), ""]
    parts += [table.render(profile, View(table="operators")), *_uncounted(profile), RULE]
    return "\n".join(parts)


def make_view(
    *,
    profile_step: int = 1,
    module_depth: int = -1,
    top_modules: int = 1,
    detailed: bool = True,
    fold: bool = False,
    recompute_fwd_factor: float = 0.0,
) -> View:
    """Return the view that DeepSpeed's own parameters describe; ``module_depth=-1`` shows all.

    Raises ConfigError for a step, depth or number of modules that is not an int, or too small.
    """
    numbers = (
        ("profile_step", profile_step, 0), ("module_depth", module_depth, -1),
        ("top_modules", top_modules, 1),
    )  # fmt: skip
    for name, value, least in numbers:
        if not is_int_of(least, value):
            raise ConfigError(f"{name}={value!r:.60}: pass an int of at least {least}")
    depth = None if module_depth < 0 else module_depth
    return View(
        step=profile_step,
        depth=depth,
        top=top_modules,
        detailed=detailed,
        fold=fold,
        recompute_fwd_factor=recompute_fwd_factor,
    )


def _uncounted(profile: Profile) -> Iterator[str]:
    if profile.is_lower_bound:
        yield ""
        yield (
            "These operators have no known cost, so numbers marked >= are lower bounds, and "
            f"{OF_WHAT_WAS_COUNTED}:"
        )
        yield table.render(profile, View(table="uncounted"))


def _conventions(profile: Profile) -> Iterator[str]:
    """Yield what the numbers cover and how they were taken, for the whole printout."""
    yield f"Scope: {', '.join(_scope(profile))}."
    yield from (f"{label}: {text}" for label, text in run_facts(profile.run))
    yield f"Counting: {counting(profile.run.flops)}"
    yield f"Attention: {attention_counting(profile.run)}."
    yield f"Latency: {', '.join(_latency(profile))}."
    if outside := outside_text(profile):
        yield f"{outside}; in the operator table, not in the module tree."
    yield from (f"Note: {one_line(note)}" for note in profile.notes)


def _latency(profile: Profile) -> Iterator[str]:
    timing = profile.timing
    if timing.method is not None:
        yield one_line(timing.method)
    elif timing.latency("forward") is None and latency_of(profile.root) is None:
        yield "not measured"
    else:
        yield "measured, method not recorded"
    if timing.repeats > 1:
        yield f"{timing.repeats} runs"
    if timing.spread_s is not None:
        yield f"spread {seconds_text(timing.spread_s)}"
    if timing.resolution_s is not None:
        resolution = f"{seconds_text(timing.resolution_s)} per module call"
        if timing.operator_resolution_s is not None:
            resolution += f" and {seconds_text(timing.operator_resolution_s)} per operator"
        varied = ", or runs vary by more" if timing.repeats > 1 else ""
        yield (
            "~ latency may be off by more than 10 %: "
            f"below the timer's resolution of {resolution}{varied}"
        )


def _scope(profile: Profile) -> Iterator[str]:
    run = profile.run
    yield f"this rank ({run.rank} of {run.world_size})" if run.world_size else "this rank"
    name = f" ({one_line(run.device_name)})" if run.device_name else ""
    yield f"device {one_line(run.device)}{name}"
    if run.torch_version and not run.python_version:  # else it is among the versions
        yield f"torch {one_line(run.torch_version)}"
    yield f"phases {' + '.join(phases_of(profile)) or 'none'}"
