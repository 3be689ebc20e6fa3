"""What the numbers mean, in sentences that several formats print."""

from __future__ import annotations

from dispatch_flops.profile import Profile, RunInfo
from dispatch_flops.renderers.text import at_least, one_line
from dispatch_flops.units import flops_text, macs_text

_MAC = (
    "1 MAC is one multiply-accumulate of a matmul, convolution or attention, and counts as "
    "2 FLOPs. "
)
OF_WHAT_WAS_COUNTED = "shares are of what was counted"  # of a profile that is a lower bound
_COUNTING = {
    "all": "Bias, normalisation, activation, softmax and other arithmetic are FLOPs, not MACs. "
    "Views, copies, indexing and random numbers are free (0).",
    "contractions": "Bias, normalisation, activation, softmax and other arithmetic count 0 here.",
}
_ATTENTION = {
    "full": "the full Sq x Sk rectangle is counted, causal or not",
    "half": "only the part of causal attention that the mask keeps is counted",
}


def counting(flops: str) -> str:
    """Return what a MAC and a FLOP are; ``flops`` is that of the profile's ``RunInfo``."""
    return _MAC + _COUNTING.get(flops, f"flops = {one_line(flops)}")


def attention_counting(run: RunInfo) -> str:
    """Return how attention is counted in a run."""
    counted = _ATTENTION.get(run.causal, f"causal = {one_line(run.causal)}")
    if run.target == "cpu":
        return counted
    return f"{counted}; without data, the kernel that {one_line(run.target)} would choose"


def outside_text(profile: Profile) -> str:
    """Return what ran outside the model, with its MACs and FLOPs; "" where nothing has a cost."""
    outside, is_bound = profile.outside.total(), profile.outside.is_lower_bound
    if not (outside.flops or is_bound):
        return ""
    macs = f"{at_least(macs_text(outside.macs), is_bound)}, " if outside.macs else ""
    flops = at_least(flops_text(outside.flops), is_bound)
    of = "loss, optimizer, other code"
    root = profile.root
    if root.active_params and not (root.calls or root.is_several_models):
        of = f"no call of it was seen: its methods, {of}"
    return f"Outside the model ({of}): {macs}{flops}"
