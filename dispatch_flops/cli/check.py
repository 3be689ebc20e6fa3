"""The command ``check``: whether a saved profile stays within limits."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dispatch_flops.analysis.diff import CONVENTIONS, diff, differences
from dispatch_flops.analysis.latency import latency_of, phase_seconds
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.cli.arguments import (
    Commands,
    add_command,
    add_phase_option,
    add_profile_argument,
)
from dispatch_flops.cli.exit_codes import CHECK_FAILED, OK
from dispatch_flops.cli.output import emit
from dispatch_flops.cli.show import load_profile
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.profile.cost import Phase
from dispatch_flops.profile.seconds import timed_phase
from dispatch_flops.renderers import View, diff_table
from dispatch_flops.units import (
    Number,
    bytes_text,
    flops_text,
    macs_text,
    params_text,
    parse_count,
    seconds_text,
)

_EPILOG = """\
Limits apply to the whole run: the model and the operators outside it, in every profiled phase.
A limit on what was not profiled, such as on the backward pass of a forward, fails.
If an operator has no known cost, its MACs, FLOPs and bytes are lower bounds; so is memory if a
kernel's workspace is not known. The check then fails unless --allow-uncounted is given.

examples:
  dispatch-flops check profile.json --max-macs 4.2G --max-params 30M
  dispatch-flops check profile.json --baseline main.json --tolerance 1%
  dispatch-flops check profile.json --max-latency 5ms --max-flops 8.4e9 --phase forward
"""
_MOST_CHANGES = 10  # of modules, and of operators, that a baseline that is not kept lists


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """Figure that can be limited.

    value: its value in a profile, for one phase or for all (None).
    unknown: returns the operators that make it a lower bound, in one phase or in all.
    missing: what is not known of them.
    is_approximate: says whether these make it an approximation instead.
    """

    help: str
    label: str
    value: Callable[[Profile, Phase | None], Number | None]
    parse: Callable[[str], Number]
    text: Callable[[Number | None], str]
    unknown: Callable[[Profile, Phase | None], Sequence[str]] = lambda profile, phase: ()
    missing: str = "cost"
    is_approximate: Callable[[Profile], bool] = lambda profile: False

    def shown(self, value: Number, profile: Profile, phase: Phase | None) -> str:
        """Return the figure as text, marked with ``>=`` or ``~`` if it is not exact."""
        mark = "~ " if self.is_approximate(profile) else ">= "
        return f"{mark if self.unknown(profile, phase) else ''}{self.text(value)}"


def parse_seconds(text: str) -> float:
    """Parse ``"5ms"`` as 0.005; also ``1.5s``, ``300us``, ``4ns`` and ``0.2``.

    Raises ValueError for any other text.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(s|ms|us|ns|)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a time; write a time such as 5ms, 300us or 1.5s")
    return float(match[1]) * {"s": 1.0, "": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[match[2]]


def _latency_s(profile: Profile, phase: Phase | None) -> float | None:
    measured = phase_seconds(profile).get(phase or "forward")
    return latency_of(profile.root, phase or "forward") if measured is None else measured


def _uncounted(profile: Profile, phase: Phase | None) -> Sequence[str]:
    uncounted = (op for op in profile.op_totals() if op.uncounted and phase in (None, op.phase))
    return sorted({op.op for op in uncounted})


def _peak_bytes(profile: Profile, phase: Phase | None) -> int | None:
    peak = profile.memory.peak(phase) if profile.memory is not None else None
    return None if peak is None else peak.peak_bytes


def _operators_of_unknown_memory(profile: Profile, phase: Phase | None) -> Sequence[str]:
    memory = profile.memory
    return () if memory is None else (*memory.unseen, *memory.decomposed)


def parse_bytes(text: str) -> int:
    """Parse ``"80GiB"`` as 80 * 2**30; also ``80GB``, ``80G``, ``8e10`` and ``512 B``.

    Raises ValueError for any other text.
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([KMGTP])iB\s*", text)
    if match is None:
        return parse_count(re.sub(r"[Bb]\s*$", "", text))  # a count of 7B is 7 billion
    return int(float(match[1]) * 1024 ** (" KMGTP".index(match[2])))


_LIMITS = {
    "macs": _Limit(
        help="at most N multiply-accumulates, such as 4.2G",
        label="MACs",
        value=lambda profile, phase: profile.total(phase).macs,
        parse=parse_count,
        text=macs_text,
        unknown=_uncounted,
    ),
    "flops": _Limit(
        help="at most N floating-point operations, such as 8.4G or 8.4e9",
        label="FLOPs",
        value=lambda profile, phase: profile.total(phase).flops,
        parse=parse_count,
        text=flops_text,
        unknown=_uncounted,
    ),
    "bytes": _Limit(
        help="at most N bytes read and written, such as 1.5G",
        label="bytes",
        value=lambda profile, phase: profile.total(phase).bytes_total,
        parse=parse_bytes,
        text=bytes_text,
        unknown=_uncounted,
    ),
    "memory": _Limit(
        help="at most N bytes allocated at once, such as 80GiB; of a profile with --memory",
        label="memory",
        value=_peak_bytes,
        parse=parse_bytes,
        text=bytes_text,
        unknown=_operators_of_unknown_memory,
        missing="workspace",
        is_approximate=lambda profile: profile.memory is not None and profile.memory.is_approximate,
    ),
    "params": _Limit(
        help="at most N parameters, such as 30M",
        label="params",
        value=lambda profile, _: profile.total_params,
        parse=parse_count,
        text=params_text,
    ),
    "latency": _Limit(
        help="at most this latency of the forward pass (or of --phase), such as 5ms; a number "
        "alone is seconds",
        label="latency",
        value=_latency_s,
        parse=parse_seconds,
        text=seconds_text,
    ),
}


def add_check(commands: Commands) -> None:
    parser = add_command(commands, "check", "check a saved profile against limits", _EPILOG)
    add_profile_argument(parser)
    for name, entry in _LIMITS.items():
        parser.add_argument(f"--max-{name}", metavar="N", help=entry.help)
    for name, entry in _LIMITS.items():
        least = entry.help.replace("at most", "at least", 1)
        parser.add_argument(f"--min-{name}", metavar="N", help=least)
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="an earlier profile, saved as JSON: its MACs, FLOPs, bytes and parameters are limits, "
        "and its peak of memory if both have one",
    )
    parser.add_argument(
        "--tolerance",
        metavar="PERCENT",
        help="by how much the baseline may be exceeded, such as 1%% (default: 0)",
    )
    parser.add_argument(
        "--allow-uncounted",
        action="store_true",
        help="check lower bounds as if they were exact totals",
    )
    add_phase_option(parser)
    parser.set_defaults(run=run_check)


def run_check(options: Namespace) -> int:
    most, least = _parse_limits(options, "max"), _parse_limits(options, "min")
    tolerance = _parse_tolerance(options)
    if not most and not least and options.baseline is None:
        figures = ", --max-".join(_LIMITS)
        raise TargetError(
            f"no limit is given; add one of --max-{figures}, the same with --min-, or "
            "--baseline FILE"
        )
    profile = load_profile(options.file)
    phase, allow = options.phase, options.allow_uncounted
    violated = [*violations(profile, most, phase, allow), *_shortfalls(profile, least, phase)]
    names = list(dict.fromkeys((*most, *least)))
    if options.baseline is not None:
        baseline = load_profile(options.baseline)
        limits = _limits_of(baseline, profile, phase, tolerance)
        what = "the baseline of"
        if tolerance:
            what = f"the limit (the baseline plus {options.tolerance}) of"
        exceeded = [
            *_not_comparable(baseline, profile, phase),
            *violations(profile, limits, phase, allow, what=what),
        ]
        if exceeded:
            compared = dataclasses.replace(diff(baseline, profile, phase), differences=())
            view = View(top=_MOST_CHANGES)
            exceeded.append(f"\n{diff_table.render(compared, view, has_latency=False)}")
            exceeded.append(f"\nFor all changes, run {_diff_command(options)}")
        violated += exceeded
        names = list(dict.fromkeys((*names, *limits)))
    kept = f"within {'the limit' if len(names) == 1 else 'all limits'}: {', '.join(names)}"
    emit("\n".join(violated) if violated else kept)
    return CHECK_FAILED if violated else OK


def _diff_command(options: Namespace) -> str:
    restriction = [] if options.phase is None else ["--phase", options.phase]
    return shlex.join(["dispatch-flops", "diff", options.baseline, options.file, *restriction])


def _parse_limits(options: Namespace, bound: str) -> dict[str, Number]:
    limits: dict[str, Number] = {}
    for name, entry in _LIMITS.items():
        text = getattr(options, f"{bound}_{name}")
        if text is not None:
            try:
                limits[name] = entry.parse(text)
            except ValueError as error:
                raise TargetError(f"--{bound}-{name}: {error}") from None
    return limits


def _parse_tolerance(options: Namespace) -> Fraction:
    """Parse ``"1%"`` and ``"0.01"`` as a hundredth."""
    text = options.tolerance
    if text is None:
        return Fraction(0)
    if options.baseline is None:
        raise TargetError("--tolerance needs a baseline; add --baseline FILE")
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%?)\s*", text)
    if match is None:
        raise TargetError(f"--tolerance {text!r} is not a percentage; write one such as 1%")
    if not match[2] and Fraction(match[1]) >= 1:
        raise TargetError(
            f"--tolerance {text} has no unit; write {match[1]}% or a fraction below 1"
        )
    return Fraction(match[1]) / (100 if match[2] else 1)


def _limits_of(
    baseline: Profile, profile: Profile, phase: Phase | None, tolerance: Fraction
) -> dict[str, Number]:
    """Return the counts of the baseline with the tolerance; latencies never repeat exactly."""
    limits: dict[str, Number] = {}
    for name in ("macs", "flops", "bytes", "memory", "params"):
        value = _LIMITS[name].value(baseline, phase)
        if value is not None and _LIMITS[name].value(profile, phase) is not None:
            limits[name] = math.floor(value * (1 + tolerance))
    return limits


def _not_comparable(baseline: Profile, profile: Profile, phase: Phase | None) -> Iterator[str]:
    """Yield a line for each reason why counts below the baseline's may still be more work."""
    yield from differences(baseline, profile, CONVENTIONS)
    for known in phases_of(baseline) if phase is None else ():
        if not _is_profiled(profile, known):
            yield f"{known} was not profiled; cannot check the baseline, which has it"


def _shortfalls(profile: Profile, limits: dict[str, Number], phase: Phase | None) -> Iterator[str]:
    """Yield a line for each limit that the profile does not reach."""
    for name, limit in limits.items():
        entry = _LIMITS[name]
        limit_text = f"the limit of at least {entry.text(limit)}{_exact(limit)}"
        value = entry.value(profile, phase) if _is_profiled(profile, phase) else None
        if value is None:
            yield f"{entry.label}: not measured in this profile; cannot check {limit_text}"
        elif value < limit:
            shown = f"{entry.shown(value, profile, phase)}{_exact(value)}"
            yield f"{entry.label}: {shown} is below {limit_text}"


def violations(
    profile: Profile,
    limits: dict[str, Number],
    phase: Phase | None,
    allow_uncounted: bool,
    *,
    what: str = "the limit of",
) -> Iterator[str]:
    """Yield a line for each limit that the profile exceeds, or may exceed."""
    unprofiled = None if _is_profiled(profile, phase) else phase or "nothing ran: the model"
    for name, limit in limits.items():
        entry = _LIMITS[name]
        limit_text = f"{what} {entry.text(limit)}{_exact(limit)}"
        if unprofiled is not None:
            yield f"{entry.label}: {unprofiled} was not profiled; cannot check {limit_text}"
            continue
        value = entry.value(profile, phase)
        unknown = entry.unknown(profile, phase)
        if value is None:
            yield f"{entry.label}: not measured in this profile; cannot check {limit_text}"
        elif value > limit:
            shown = f"{entry.shown(value, profile, phase)}{_exact(value)}"
            yield f"{entry.label}: {shown} exceeds {limit_text}"
        elif unknown and not allow_uncounted:
            yield (
                f"{entry.label}: {entry.shown(value, profile, phase)} may exceed {limit_text}: no "
                f"{entry.missing} is known for {', '.join(unknown)}"
            )


def _is_profiled(profile: Profile, phase: Phase | None) -> bool:
    """Return whether the profile knows the phase; for None, whether anything ran.

    Recomputation runs within the backward pass, so a profile of that knows it, too.
    """
    known = {*phases_of(profile), *profile.timing.seconds}
    if profile.root.calls:  # even if no operator ran
        known.add("forward")
    return bool(known) if phase is None else not known.isdisjoint({phase, timed_phase(phase)})


def _exact(value: Number) -> str:
    return f" ({value:,})" if isinstance(value, int) and value >= 1000 else ""
