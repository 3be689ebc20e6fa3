"""What the numbers mean, in sentences that several formats print."""

from __future__ import annotations

from dispatch_flops.profile import RunInfo
from dispatch_flops.renderers.text import one_line

_MAC = (
    "1 MAC is one multiply-accumulate of a matmul, convolution or attention, and counts as "
    "2 FLOPs. "
)
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
