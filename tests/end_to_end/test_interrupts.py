"""A KeyboardInterrupt at any moment leaves nothing behind."""

from __future__ import annotations

import signal

import pytest

from tests.helpers.interpreters import run_python
from tests.helpers.paths import REPOSITORY

ALARMS = 400

SCRIPT = """
import random, signal, sys, time
import torch
from torch import nn
import torch._dynamo
from dispatch_flops import FlopCounterMode
from tests.helpers.untouched import process_state

model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(20)]), torch.ones(2, 8)

def interrupt(*_):
    raise KeyboardInterrupt

def count():
    with FlopCounterMode(model, display=False):
        model(x).sum().backward()

signal.signal(signal.SIGALRM, interrupt)
taken = 1.0
for _ in range(10):  # what torch imports late is there now
    begun = time.perf_counter()
    count()
    taken = min(taken, time.perf_counter() - begun)
torch.ops.aten.promote_types
draw, interrupted, before = random.Random(0), 0, process_state()
for _ in range(int(sys.argv[1])):
    try:
        signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 1.2 * taken))
        count()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    after = process_state()
    changed = [key for key in after if after[key] != before.get(key)]
    assert not changed, changed
print(interrupted)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an interval timer")
def test_counter_interrupted_at_random_moments_leaves_nothing(
    request: pytest.FixtureRequest,
) -> None:
    alarms = 2000 if request.config.getoption("--whole", default=False) else ALARMS
    done = run_python("-c", SCRIPT, str(alarms), cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > alarms / 4  # the rest came before or after the counter
