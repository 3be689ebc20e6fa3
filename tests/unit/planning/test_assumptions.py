"""What plans say of the peaks of memory that they are based on."""

from __future__ import annotations

from dispatch_flops.analysis import Machine
from dispatch_flops.analysis.machines import Link
from dispatch_flops.planning.assumptions import of_communication, of_memory
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
    assert bound == (
        "memory is a lower bound: an unknown workspace is allocated by kernels of "
        "aten.convolution.default"
    )


def test_latency_of_links_is_stated_or_said_to_be_left_out() -> None:
    inner = Link(bytes_per_s=17e9, latency_s=3e-6, name="inner")
    machine = Machine(name="mine", node_link=inner, network_link=Link(bytes_per_s=5e9))
    links, *_ = of_communication(machine)
    assert "within: inner, 17 GB/s, 3 us;" in links
    assert links.endswith("between, of each device: 5 GB/s, latency not known, left out")


def test_latency_of_zero_is_a_known_one() -> None:
    links, *_ = of_communication(Machine(name="mine", node_link=Link(bytes_per_s=7e9, latency_s=0)))
    assert "within: 7 GB/s, 0 us;" in links
