"""One run of a counter: everything that is entered at its start and left at its end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from dispatch_flops import _torch
from dispatch_flops.counting.aggregation import Ledger
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.eager_stance import eager_stance
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.module_tracker import Tracker
from dispatch_flops.counting.opaque_modules import OpaqueModules
from dispatch_flops.counting.placement import run_info
from dispatch_flops.counting.profile_builder import Observed, build_profile
from dispatch_flops.errors import WrongThreadError
from dispatch_flops.operators import registry
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.profile import Profile
from dispatch_flops.profilers.isolation import garbage_collection_later
from dispatch_flops.timing.calibration import gap_s, unseen_of_calls
from dispatch_flops.timing.devices import Devices
from dispatch_flops.timing.overhead import OwnTime
from dispatch_flops.timing.passes import CountingPass, EventPass, HostPass


class Session:
    """One run of a counter, opened and closed as often as it pauses."""

    def __init__(
        self,
        roots: Sequence[nn.Module],
        conventions: Conventions,
        own_rules: Mapping[Any, registry.Rule],
        *,
        timed: bool,
    ) -> None:
        self._conventions = conventions
        self._names = ModuleNames(roots)
        self._ledger = Ledger()
        options: dict[str, Any] = {
            "conventions": conventions, "own_rules": own_rules, "on_full": self._fold
        }  # fmt: skip
        self._pass = _pass_on(self._names, options, timed=timed)
        self._tracker, self._mode = self._pass.tracker, self._pass.mode
        self._tracker.is_mode_on = self._is_on
        self._opaque = OpaqueModules(self._tracker, conventions, own_rules)
        self._undo = ExitStack()
        self._is_open = False
        self._thread = 0

    def open(self) -> None:
        if self._is_open:
            return
        with ExitStack() as undo:
            undo.enter_context(eager_stance())
            self._tracker.start()
            undo.callback(self._tracker.stop)
            undo.enter_context(self._opaque)
            self._mode.__enter__()  # type: ignore[no-untyped-call]
            undo.callback(self._mode.leave)
            undo.enter_context(self._pass.measuring())
            self._undo = undo.pop_all()
        self._is_open = True
        self._thread = threading.get_ident()

    def close(self) -> None:
        self.check_thread()
        self._is_open = False
        self._undo.close()

    def check_thread(self) -> None:
        """A mode is on in the thread that entered it, and can be left nowhere else."""
        if self._is_open and self._thread != threading.get_ident():
            raise WrongThreadError(
                "the counter was entered in another thread: leave it, stop it or pause it there"
            )

    def note_running(self, module: nn.Module) -> None:
        self._pass.note_running(module)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        if self._is_on() or not self._is_open:
            yield
            return
        self._tracker.join_thread(entered=True)
        try:
            with self._mode:
                yield
        finally:
            self._tracker.leave_thread()

    def profile(self) -> Profile:
        # A profile is many new objects, none of them garbage: looking for it would take longest.
        with self._pass.aside(), _torch.modes_disabled(), garbage_collection_later():
            self._pass.read()
            seen = Observed(
                calls=self._tracker.calls(),
                used_params=self._tracker.used_params(),
                tokens=self._tracker.tokens(),
                latency_s=self._pass.module_seconds(),
            )
            profile = build_profile(
                self._ledger.with_open(self._tracker.places()),
                self._names,
                seen,
                run_info(self._names.modules(), self._conventions),
                notes=tuple(self._mode.higher_order.notes),
            )
        return dataclasses.replace(profile, timing=self._pass.timing(profile))

    def _fold(self) -> None:
        self._pass.read()
        self._ledger.fold(self._tracker.join_thread().places.values())

    def _is_on(self) -> bool:
        return any(mode is self._mode for mode in _torch.modes_in_force())


def _pass_on(names: ModuleNames, mode_options: Mapping[str, Any], *, timed: bool) -> CountingPass:
    """The pass that is right where these modules compute."""
    devices = Devices.of(names.modules()) if timed else None  # which asks every module
    if devices is None or not devices.computes:
        tracker = Tracker(names)
        return CountingPass(tracker, CountingMode(tracker, **mode_options))
    record = devices.events()
    if record is not None:
        gap = None if devices.is_capturing() else gap_s(devices)
        return EventPass(names, devices, record, gap, mode_options)
    clock = devices.clock() if devices.accelerators else None
    return HostPass(names, OwnTime(*unseen_of_calls(), clock=clock), mode_options)
