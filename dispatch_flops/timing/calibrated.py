"""Passes with the overhead that was calibrated for this machine."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.undo import UndoStack
from dispatch_flops.timing.calibration import call_overhead, event_gap_s, hook_overhead
from dispatch_flops.timing.devices import CPU, Devices, Now
from dispatch_flops.timing.module_timer import ModuleTimer
from dispatch_flops.timing.overhead import Overhead
from dispatch_flops.timing.passes import EventPass, HostPass
from dispatch_flops.timing.untimed import UntimedPass


def counting_pass(modules: Iterable[nn.Module]) -> UntimedPass:
    """Return the timed pass that is right where these modules compute.

    It is untimed where nothing computes, as on the meta device.
    """
    devices = Devices.of(modules)
    if not devices.computes:
        return UntimedPass()
    record_event = devices.events()
    if record_event is not None:
        gap_s = None if devices.is_capturing() else event_gap_s(devices)
        return EventPass(devices, record_event, gap_s)
    clock = devices.clock() if devices.accelerators else None
    return HostPass(Overhead(call_overhead(), clock))


class ModulePass:
    """A pass without a dispatch mode: while entered, it times modules by hooks alone.

        with ModulePass(ModuleNames([model]), devices=Devices.of(model.modules())) as timed:
            model(x)
        timed.seconds()["encoder.layer.0"]

    devices: where the modules compute. now: a clock other than theirs, whose hooks need no
    calibration. Modules of other threads are not followed.
    """

    def __init__(
        self, names: ModuleNames, *, devices: Devices = CPU, now: Now | None = None
    ) -> None:
        # Waiting for an accelerator and events have errors of their own, larger than the hooks'.
        is_host = now is None and not devices.accelerators
        self._timer = ModuleTimer(
            devices, now=now, hook_overhead=hook_overhead if is_host else None
        )
        self._tracker = Tracker(names, [self._timer])
        self._undo = UndoStack()

    def __enter__(self) -> ModulePass:
        try:
            self._tracker.start(self._undo)
        except BaseException:
            self._undo.run()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.run()  # or when it is freed, if an interrupt comes first

    def seconds(self) -> dict[str, float]:
        """Return ``{fqn: seconds}`` in forward, over all calls."""
        return self._timer.seconds()
