"""Clocks and events that are right on the devices where a program computes.

An accelerator goes on working after Python has given it its work: time there lies between two
events on its stream, or between two moments at which everything was waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_flops.counting.placement import Placement

Now = Callable[[], float]
Stamp = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Devices(Placement):
    """The devices of a program's tensors, with their clocks and events."""

    def is_capturing(self) -> bool:
        """True while a CUDA graph is captured: nothing runs, and nothing may be waited for."""
        if not self.accelerators:
            return False
        module = torch.get_device_module(self.accelerators[0])
        return bool(getattr(module, "is_current_stream_capturing", bool)())

    def synchronize(self) -> None:
        """Wait until the accelerators have done what they were given, if they may be waited for."""
        if not self.is_capturing():
            for device in self.accelerators:
                torch.accelerator.synchronize(device)

    def clock(self) -> Now:
        """Seconds on a clock that waits for the accelerators at every reading."""
        if not self.accelerators:
            return time.perf_counter

        def synchronized() -> float:
            self.synchronize()
            return time.perf_counter()

        return synchronized

    def events(self) -> Stamp | None:
        """Records an event on the one accelerator; None where only ``clock`` is right.

        That is on the CPU, on several accelerators (events of different devices cannot be
        compared) and on kinds whose events take no stream. While a CUDA graph is captured
        nothing runs, and there is no event.
        """
        if len(self.accelerators) != 1:
            return None
        (device,) = self.accelerators
        module = torch.get_device_module(device)
        if not hasattr(module, "Event") or not hasattr(module, "current_stream"):
            return None

        def record() -> Any:
            if self.is_capturing():
                return None
            event = module.Event(enable_timing=True)
            event.record(module.current_stream(device))
            return event

        return record


CPU = Devices()


def seconds_between(start: Any, end: Any) -> float:
    """Seconds between two events that are over; 0 where there was none to record."""
    return 0.0 if start is None or end is None else float(start.elapsed_time(end)) / 1e3
