"""The memory mode and torch's MemTracker in one process, until the interpreter has exited.

Both hold weak references with callbacks to the storages of tensors, and enter a dispatch mode.
Neither may disturb the other, in either order, one within the other, or while Python exits.
"""

from __future__ import annotations

import pytest

from tests.helpers.interpreters import run_python
from tests.helpers.paths import REPOSITORY

PROGRAM = """
import gc, sys, threading
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint
from dispatch_flops import FlopCounterMode

order, thread_count, threshold = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
gc.set_threshold(threshold)
kept, problems = [], []


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def use_both(model, x):
    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    def ours(run):
        counter = FlopCounterMode(model, display=False, memory=True)
        with counter:
            run()
        kept.append(counter)  # its weak references are there when Python exits
        return counter.profile.memory.peak_bytes

    def theirs(run):
        tracker = MemTracker()
        tracker.track_external(model)
        kept.append(tracker)
        with tracker:
            run()
        assert tracker.get_tracker_snapshot("peak")

    alone = ours(step)
    peaks = {alone}
    for letter in order:
        if letter == "o":
            peaks.add(ours(step))
        elif letter == "t":
            theirs(step)
        elif letter == "i":
            theirs(lambda: peaks.add(ours(step)))
        elif letter == "a":
            peaks.add(ours(lambda: theirs(step)))
    if len(peaks) > 1:
        problems.append((type(model).__name__, peaks))


def work():
    use_both(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.ones(7, 16))
    use_both(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.ones(2, 3, 9, 9))
    use_both(Checkpointed(), torch.ones(5, 16))


threads = [threading.Thread(target=work) for _ in range(thread_count)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if not threads:
    work()
assert not problems, problems
print("whole")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("order", "threads"), [("toia", 0), ("aiot", 1)])
def test_memory_mode_and_mem_tracker_share_a_process(order: str, threads: int) -> None:
    done = run_python("-c", PROGRAM, order, str(threads), "20", cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr
    assert "Traceback" not in done.stderr  # of a thread, or of a callback
