"""Peaks that one thread notes while another releases a block: what was in use adds up to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops import FlopCounterMode
from dispatch_flops.counting.thread_state import ModulePhase
from dispatch_flops.memory.blocks import Blocks, ModulePeak


@pytest.mark.parametrize("memory", [True, "timeline"])
def test_peak_that_is_noted_before_the_role_of_a_released_block_is_known(
    monkeypatch: pytest.MonkeyPatch, memory: Any
) -> None:
    """Finding the role calls functions, where CPython may go on in another thread."""
    role_of, kept = Blocks._role_of, []

    def interrupted(blocks: Blocks, block: Any, *, is_over: bool) -> Any:
        if not kept:
            kept.append(torch.zeros(11, 1000))
        return role_of(blocks, block, is_over=is_over)

    with FlopCounterMode(display=False, memory=memory) as counter:
        first = torch.zeros(7, 1000)
        monkeypatch.setattr(Blocks, "_role_of", interrupted)
        del first
        monkeypatch.undo()
    counter.profile.check()
    assert counter.profile.memory is not None
    assert counter.profile.memory.peak_bytes == 4 * (7 + 11) * 1000


def test_peak_that_is_noted_between_those_of_two_phases() -> None:
    """A block that was released before a peak was noted is not part of it."""
    blocks, kept = Blocks(1), []
    device = blocks.on(torch.device("cpu"))
    forward, backward = (
        device.module_peak(ModulePhase("", phase)) for phase in ("forward", "backward")
    )

    def allocate(peak: ModulePeak, size: int) -> torch.Tensor:
        tensor = torch.zeros(size, dtype=torch.uint8)
        blocks.allocated(tensor.untyped_storage(), peak)
        peak.note(device.now, None, blocks.allocations)
        return tensor

    class Interrupted(list[Any]):
        def append(self, released: Any) -> None:
            super().append(released)
            kept.append(allocate(backward, 500))

    first = allocate(forward, 70)
    kept.append(allocate(backward, 3))
    device.peaks[0].released = Interrupted()
    del first
    sizes = [[block.size for block, _ in peak.released] for peak in device.peaks]
    assert sizes == [[70], []]
    assert [peak.bytes for peak in device.peaks] == [70, 3 + 500]
