"""The readings that every meter of steps has: its last step, a window and the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from dispatch_flops.analysis.machines import Machine, check_machine, find
from dispatch_flops.counting.meter_reading import MeterReading
from dispatch_flops.counting.meter_totals import MeterTotals, Part
from dispatch_flops.counting.placement import Placement
from dispatch_flops.errors import ConfigError


class MeteredRun(ABC):
    """Totals, rates and utilisation over steps.

    machine: machine whose peaks MFU and HFU refer to; None for that of the model's device.
    window: number of steps of the reading ``window``.

    Raises ConfigError for a wrong machine or window.
    """

    def __init__(self, machine: Machine | None, window: int) -> None:
        check_machine(machine)
        check_steps("window", window, least=1)
        self._given_machine = machine
        self._totals = MeterTotals(window)

    @abstractmethod
    def _parts(self) -> Iterable[Part]:
        """Return everything that steps have consisted of."""

    @abstractmethod
    def _all_modules(self) -> Iterable[nn.Module]:
        """Return the modules whose device is that of the run."""

    @property
    def machine(self) -> Machine | None:
        """The machine that MFU and HFU refer to; None if it is not known."""
        if self._given_machine is not None:
            return self._given_machine
        return find(Placement.of(self._all_modules()).name)

    @property
    def last_step(self) -> MeterReading:
        """The last step."""
        return self._totals.reading_of(list(self._totals.recent)[-1:], self.machine)

    @property
    def window(self) -> MeterReading:
        """The last steps, as many as ``window`` at construction."""
        return self._totals.reading_of(self._totals.recent, self.machine)

    @property
    def run(self) -> MeterReading:
        """All steps, with those of the run that was resumed."""
        return self._totals.reading(self._parts(), self.machine)

    @property
    def steps_done(self) -> int:
        """Number of steps that ended without an exception."""
        return self._totals.steps

    @property
    def total_flops(self) -> int:
        """FLOPs of all phases of all steps."""
        return self.run.total_flops

    @property
    def model_flops(self) -> int:
        """FLOPs of forward and backward of all steps."""
        return self.run.model_flops

    @property
    def flops_per_s(self) -> float | None:
        """FLOP/s of the run; rates and utilisations are those of ``MeterReading``."""
        return self.run.flops_per_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the run."""
        return self.run.tokens_per_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation of the run."""
        return self.run.mfu

    @property
    def hfu(self) -> float | None:
        """Hardware FLOPs utilisation of the run."""
        return self.run.hfu

    @property
    def is_estimate(self) -> bool:
        """True if ``total_flops`` is not exact."""
        return self.run.is_estimate

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the run, as data that JSON can hold."""
        return self._totals.state_dict(self._parts())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a run.

        state: what ``state_dict`` of that run's meter returned. Raises ConfigError for other data.
        """
        self._totals.load_state_dict(state)
        self._forget_parts()

    @abstractmethod
    def _forget_parts(self) -> None:
        """Forget what steps have consisted of."""


def check_steps(name: str, value: Any, *, least: int) -> None:
    """Raise ConfigError if ``value`` is not a number of steps."""
    if type(value) is not int or value < least:
        raise ConfigError(
            f"{name}={value!r:.60}: pass a number of steps, an int of {least} or more"
        )
