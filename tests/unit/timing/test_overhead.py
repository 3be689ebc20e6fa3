"""Clock that excludes the profiler's overhead."""

from __future__ import annotations

import threading

import pytest

from dispatch_flops.timing.overhead import CallOverhead, Overhead
from tests.helpers.clocks import CLOCK

pytestmark = pytest.mark.usefixtures("host_clock")


def test_overhead_scales_its_unseen_part_with_the_seen_part() -> None:
    own = Overhead(CallOverhead(per_operator_s=2.0, per_module_s=6.0, reach_s=0.5))
    own.operator(seen_s=7.0, reach_s=0.25)  # never faster than calibrated
    assert own.seconds == 7.0 + 2.0
    own.operator(seen_s=0.0, reach_s=1.5)
    assert own.seconds == 9.0 + 2.0 * 3
    own.operator(seen_s=0.0, reach_s=None)  # unknown: as for the operator before
    assert own.seconds == 15.0 + 2.0 * 3
    begun = own.hook()
    CLOCK.now += 1.0
    own.hook_since(begun)
    assert own.seconds == 21.0 + 1.0 + 6.0 / 2 * 3
    own.operator(seen_s=0.0, reach_s=1e6)  # bounded: something else ran meanwhile
    assert own.seconds == 31.0 + 2.0 * 10


def test_overhead_of_one_thread_is_not_subtracted_in_another() -> None:
    own = Overhead(CallOverhead(per_operator_s=3.0))
    own.operator(seen_s=2.0, reach_s=None)
    elsewhere: list[float] = []
    thread = threading.Thread(target=lambda: elsewhere.append(own.seconds))
    thread.start()
    thread.join()
    assert (own.seconds, elsewhere) == (5.0, [0.0])
