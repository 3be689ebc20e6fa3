"""Measured peaks of a device."""

from __future__ import annotations

import pytest

from dispatch_flops.errors import TargetError
from dispatch_flops.timing.peaks import measure_machine


def test_measure_machine_of_meta_raises() -> None:
    with pytest.raises(TargetError, match="meta"):
        measure_machine("meta")
