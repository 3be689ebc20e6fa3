"""What plans say of the peaks of memory that they are based on."""

from __future__ import annotations

from dispatch_flops.planning.assumptions import of_memory
from dispatch_flops.profile import MemoryProfile

EXACT = MemoryProfile(devices=())
BOUND = MemoryProfile(devices=(), unseen=("aten.convolution.default",))
APPROXIMATE = MemoryProfile(devices=(), decomposed=("aten.lstm.input",))


def test_exact_peaks_are_neither_bounds_nor_approximate() -> None:
    (rounding,) = of_memory([EXACT, None])
    assert rounding.startswith("memory: blocks rounded to 512 bytes")


def test_peaks_that_are_not_exact_are_said_to_be() -> None:
    approximate, bound, _ = of_memory([EXACT, BOUND, APPROXIMATE])
    assert approximate.startswith("memory is approximate: aten.lstm.input ran on the meta device")
    assert bound == "memory is a lower bound: some kernels allocate an unknown workspace"
