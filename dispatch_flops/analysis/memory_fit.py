"""Whether what a device needs fits into its memory."""

from __future__ import annotations

from dispatch_flops.analysis.machines import Machine

LARGEST_SEARCHED = 2**20  # where the search of the largest batch that fits ends


class MemoryFit:
    """Base of what is planned on a device.

    peak_bytes: the most memory that it allocates; None where memory was not followed.
    """

    __slots__ = ()
    machine: Machine
    largest_batch: int | None

    @property
    def peak_bytes(self) -> int | None:
        raise NotImplementedError

    @property
    def headroom_bytes(self) -> float | None:
        """Memory of the device less the peak; None where one of them is unknown."""
        capacity, peak = self.machine.memory_bytes, self.peak_bytes
        return None if capacity is None or peak is None else capacity - peak

    @property
    def fits(self) -> bool | None:
        """True if the peak is within the device's memory; None where one of them is unknown."""
        return None if self.headroom_bytes is None else self.headroom_bytes >= 0

    @property
    def largest_batch_is_lower_bound(self) -> bool:
        """True if the largest batch that was searched fits: larger ones may fit as well."""
        return self.largest_batch is not None and self.largest_batch >= LARGEST_SEARCHED
