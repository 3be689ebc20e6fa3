"""Lines above the module tree: totals, time, utilisation, and what the run was."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis.efficiency import machine_of
from dispatch_flops.analysis.figures import total_figures
from dispatch_flops.analysis.headline import Headline, headline
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.communication import communication_text
from dispatch_flops.renderers.memory_table import memory_text
from dispatch_flops.renderers.run_facts import inputs_text, mode_text
from dispatch_flops.renderers.text import about, at_least, one_line
from dispatch_flops.units import (
    bytes_text,
    count_text,
    flops_per_s_text,
    flops_text,
    fraction_text,
    macs_text,
    params_text,
    ratio,
    seconds_text,
)

LABEL = 9  # characters of the longest label and two spaces


def headline_lines(profile: Profile, machine: Machine | None = None) -> Iterator[str]:
    """Yield the lines, each a label and its text; what is not known has no line.

    machine: whose peaks the run is compared with; None takes the profile's device, if its peaks
        are known.
    """
    machine = machine_of(profile, machine)
    top = headline(profile, machine)
    yield _totals(profile, top)
    for label, text in (
        ("Step", step_text(profile)),
        ("FLOPs", phases_text(profile) if len(phases_of(profile)) > 1 else ""),
        ("Time", _time(profile, top)),
        ("MFU", _utilisation(top, machine)),
        *run_lines(profile),
    ):
        if text:
            yield f"{label:<{LABEL}}{text}"


def run_lines(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield label and text of memory and communication, and of what the run was, where known."""
    for label, text in (
        ("Memory", memory_text(profile)),
        ("Comm", communication_text(profile)),
        ("Inputs", inputs_text(profile.run) if profile.run.inputs is not None else ""),
        ("Mode", mode_text(profile.run) if profile.run.grad_mode is not None else ""),
        ("Device", _device(profile)),
    ):
        if text:
            yield label, text


def _totals(profile: Profile, top: Headline) -> str:
    bound = top.lower_bound
    figures = (
        _parameters(profile),
        at_least(macs_text(top.macs), bound),
        at_least(flops_text(top.hardware_flops), bound),
        f"{at_least(bytes_text(top.bytes_total), bound)} moved",
    )
    return f"{one_line(profile.root.class_name)}: {', '.join(figures)}"


def _parameters(profile: Profile) -> str:
    text = f"{params_text(profile.total_params)} parameters"
    if profile.local_params == profile.total_params:
        return text
    return f"{text} ({params_text(profile.local_params)} on this rank)"


def step_text(profile: Profile) -> str:
    """Return the number of the step and its samples, if it is one of a training loop; else ""."""
    run = profile.run
    if run.batch_size is None:
        return str(run.step) if run.step > 1 else ""
    per_s = ratio(run.batch_size, profile.timing.iteration_s)
    rate = "" if per_s is None else f", {per_s:.4g} samples/s"
    return f"{run.step}, {run.batch_size} samples{rate}"


def phases_text(profile: Profile) -> str:
    """Return the FLOPs of each phase that ran: ``forward 537.6 K, backward >= 811.2 K``."""
    figures = {phase: total_figures(profile, phase) for phase in phases_of(profile)}
    return ", ".join(
        f"{phase} {at_least(count_text(part.cost.flops), part.lower_bound)}"
        for phase, part in figures.items()
    )


def _time(profile: Profile, top: Headline) -> str:
    if top.seconds is None:
        return ""
    timing = profile.timing
    seconds = about(seconds_text(top.seconds), top.seconds_are_inexact)
    spread = f" ± {seconds_text(timing.spread_s)}" if timing.spread_s is not None else ""
    runs = f", median of {timing.repeats} runs" if timing.repeats > 1 else ""
    rate = at_least(flops_per_s_text(ratio(top.hardware_flops, top.seconds)), top.lower_bound)
    return f"{seconds}{spread} ({top.seconds_of}{runs}), {rate}"


def _utilisation(top: Headline, machine: Machine | None) -> str:
    if machine is None:
        return ""
    if top.mfu is None:
        return f"n/a of {machine.name}: {top.why_no_mfu}"
    mfu = at_least(fraction_text(top.mfu), top.mfu_is_lower_bound)
    hfu = ""
    if top.hfu is not None and top.hfu != top.mfu:
        hfu = f", HFU {at_least(fraction_text(top.hfu), top.hfu_is_lower_bound)}"
    unknown = f"; HFU n/a: {top.why_no_hfu}" if top.why_no_hfu else ""
    warning = f"; {top.warning}" if top.warning else ""
    return f"{mfu}{hfu} of {machine.name}{unknown}{warning}"


def _device(profile: Profile) -> str:
    run = profile.run
    name = f" ({one_line(run.device_name)})" if run.device_name else ""
    torch = f", torch {one_line(run.torch_version)}" if run.torch_version else ""
    rank = f", rank {run.rank} of {run.world_size}" if run.world_size else ""
    return f"{one_line(run.device)}{name}{torch}{rank}"
