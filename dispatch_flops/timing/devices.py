"""Clocks and events of the devices on which a program computes.

An accelerator runs kernels after the call that launched them has returned. Its time is measured
between two events on its stream, or between two synchronizations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dispatch_flops.counting.placement import Placement
from dispatch_flops.errors import ConfigError

Now = Callable[[], float]  # returns seconds on some clock
Stamp = Callable[[], Any]  # records an event and returns it


def checked_clock(now: Now) -> Now:
    """Return the clock; raise ConfigError if it is not a function."""
    if not callable(now):
        raise ConfigError(
            f"now={now!r:.60}: pass a function that returns seconds, such as time.perf_counter"
        )
    return now


@dataclass(frozen=True, slots=True)
class Devices(Placement):
    """The devices of a program's tensors, with their clocks and events."""

    def is_capturing(self) -> bool:
        """Return True during the capture of a CUDA graph: nothing runs, and no wait is allowed."""
        if not self.accelerators:
            return False
        module = torch.get_device_module(self.accelerators[0])
        return bool(getattr(module, "is_current_stream_capturing", bool)())

    def synchronize(self) -> None:
        """Wait until the accelerators are idle, except during the capture of a CUDA graph."""
        if not self.is_capturing():
            for device in self.accelerators:
                torch.accelerator.synchronize(device)

    def clock(self) -> Now:
        """Return a clock that synchronizes the accelerators at every reading."""
        if not self.accelerators:
            return time.perf_counter

        def synchronized() -> float:
            self.synchronize()
            return time.perf_counter()

        return synchronized

    def events(self) -> Stamp | None:
        """Return a function that records an event on the accelerator; None if ``clock`` is needed.

        The clock is needed on the CPU, on several accelerators (events of different devices cannot
        be compared) and on accelerators whose events do not take a stream. The function returns
        None instead of an event during the capture of a CUDA graph.
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
    """Return the seconds between two events that have completed; 0 if one is None."""
    return 0.0 if start is None or end is None else float(start.elapsed_time(end)) / 1e3
