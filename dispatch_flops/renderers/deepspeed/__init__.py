"""DeepSpeed's printed profile, followed by what it lacks: operators and conventions."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis.latency import latency_of
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import table
from dispatch_flops.renderers.deepspeed import aggregated, detailed, summary
from dispatch_flops.renderers.text import RULE, heading, one_line
from dispatch_flops.units import flops_text, macs_text, seconds_text

_COUNTING = (
    "1 MAC is one multiply-accumulate of a matmul, convolution or attention, and 2 flops; "
    "bias, normalisation, activation, softmax and other arithmetic are flops, not MACs; "
    "views, copies, indexing and random numbers are free (0)."
)
_ATTENTION = {
    "full": "the full Sq x Sk rectangle is counted, causal or not",
    "half": "of causal attention only the part that the mask keeps is counted",
}


def render(
    profile: Profile,
    *,
    profile_step: int = 1,
    module_depth: int = -1,
    top_modules: int = 1,
    detailed: bool = True,
    fold: bool = False,
) -> str:
    """Summary, aggregated and detailed profile in DeepSpeed's format, then the operators.

    Args:
        profile_step: the step that the heading names.
        module_depth: deepest level of the aggregated and detailed parts; -1 shows all.
        top_modules: classes per depth in the aggregated part.
        detailed: whether to show the module tree.
        fold: whether runs of identical siblings in the tree are one entry with their sums.
    """
    parts = [
        summary.render(profile, profile_step=profile_step),
        "",
        heading("Aggregated Profile per GPU", 29),
        aggregated.render(profile, module_depth=module_depth, top_modules=top_modules),
    ]
    if detailed:
        parts += ["", heading("Detailed Profile per GPU", 30)]
        parts += [_detailed(profile, module_depth, fold)]
    parts += [RULE, "", heading("Operators per GPU", 30), *_conventions(profile), ""]
    parts += [table.operator_table(profile), *_uncounted(profile), RULE]
    return "\n".join(parts)


def _detailed(profile: Profile, module_depth: int, folded: bool) -> str:
    return detailed.render(profile, module_depth=module_depth, folded=folded)


def _uncounted(profile: Profile) -> Iterator[str]:
    if profile.is_lower_bound:
        yield ""
        yield "These operators have no known cost, so numbers marked >= are lower bounds:"
        yield table.uncounted_table(profile)


def _conventions(profile: Profile) -> Iterator[str]:
    """What the numbers are numbers of: said once, for the whole printout."""
    yield f"Scope: {', '.join(_scope(profile))}."
    attention = _ATTENTION.get(profile.run.causal, f"causal = {one_line(profile.run.causal)}")
    yield f"Counting: {_COUNTING}"
    yield f"Attention: {attention}."
    yield f"Latency: {', '.join(_latency(profile))}."
    outside = profile.outside.total()
    if outside.flops:
        yield (
            f"Outside the model (loss, optimizer, other code): {macs_text(outside.macs)}, "
            f"{flops_text(outside.flops)}; in the operator table, not in the module tree."
        )
    yield from (f"Note: {one_line(note)}" for note in profile.notes)


def _latency(profile: Profile) -> Iterator[str]:
    timing = profile.timing
    if timing.method is not None:
        yield one_line(timing.method)
    elif timing.latency("forward") is None and latency_of(profile.root) is None:
        yield "not measured"
    else:
        yield "measured, in a way that was not recorded"
    if timing.repeats > 1:
        yield f"{timing.repeats} runs"
    if timing.spread_s is not None:
        yield f"spread {seconds_text(timing.spread_s)}"
    if timing.resolution_s is not None:
        least = f"{seconds_text(timing.resolution_s)} for every module call"
        if timing.operator_resolution_s is not None:
            least += f" and {seconds_text(timing.operator_resolution_s)} for every operator"
        varied = ", or runs vary by more" if timing.repeats > 1 else ""
        yield f"~ marks what is not exact to 10 %: it takes less than {least} in it{varied}"


def _scope(profile: Profile) -> Iterator[str]:
    scope = profile.run
    yield f"this rank ({scope.rank} of {scope.world_size})" if scope.world_size else "this rank"
    name = f" ({one_line(scope.device_name)})" if scope.device_name else ""
    yield f"device {one_line(scope.device)}{name}"
    if scope.torch_version:
        yield f"torch {one_line(scope.torch_version)}"
    yield f"phases {' + '.join(phases_of(profile)) or 'none'}"
