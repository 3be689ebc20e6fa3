"""A KeyboardInterrupt, or what a signal's handler raises, leaves nothing behind at any moment."""

from __future__ import annotations

import json
import signal

import pytest

from tests.helpers.interpreters import run_python
from tests.helpers.paths import REPOSITORY

ALARMS = 100
PROGRAMS = ["counter", "memory", "model_with_data", "model_on_meta", "meter", "training_step"]

SCRIPT = """
import gc, json, os, random, signal, sys, time, traceback
import torch
from torch import nn
import torch._dynamo
from dispatch_flops import FlopCounterMode, FlopMeter, StepProfiler, profile_model
from tests.helpers.interrupting import TooLateError
from tests.helpers.untouched import model_state, process_state

model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), torch.ones(2, 8)

ERRORS = KeyboardInterrupt, SystemExit, TooLateError
draw = random.Random()

def interrupt(*_):
    raise draw.choice(ERRORS)

def counter():
    with FlopCounterMode(model, display=False):
        model(x).sum().backward()

def memory():
    with FlopCounterMode(model, display=False, memory=True, latency=True):
        model(x).sum().backward()

def model_with_data():
    profile_model(model, args=[x], backward=True, warm_up=0)

def model_on_meta():
    profile_model(model, args=[x], backward=True, device="meta")

def meter():
    meter = FlopMeter(model)
    for rows in (1, 2, 1):
        with meter.step():
            model(x[:rows]).sum().backward()

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
CONFIG = {"enabled": True, "profile_step": 2, "output_file": os.devnull}

def training_step():
    profiler = StepProfiler(model, optimizer, CONFIG)
    for _ in range(3):
        with profiler.step():
            model(x).sum().backward()
            optimizer.step()

def state():
    # The program that is interrupted makes gradients, and steps of optimizers switch them off.
    model.zero_grad(set_to_none=True)
    torch.set_grad_enabled(True)
    hooks = [*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks]
    ours = {"collector": gc.isenabled(), "hooks of the optimizer": hooks}
    return process_state() | model_state(model) | ours

def count_interrupts(run, alarms):
    taken = 1.0
    for _ in range(10):  # what torch imports late is there now
        begun = time.perf_counter()
        run()
        taken = min(taken, time.perf_counter() - begun)
    draw.seed(0)
    interrupted, before = 0, state()
    for _ in range(alarms):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 1.2 * taken))
            run()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except ERRORS:
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        after = state()
        changed = [key for key in after if after[key] != before.get(key)]
        assert not changed, changed
    return interrupted

signal.signal(signal.SIGALRM, interrupt)
torch.ops.aten.promote_types
found = {}
for name in sys.argv[2:]:
    try:
        found[name] = count_interrupts(globals()[name], int(sys.argv[1])), None
    except BaseException:
        found[name] = 0, traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, tuple[int, str | None]]:
    """Return for each program how often it was interrupted, and its error."""
    done = run_python("-c", SCRIPT, str(alarms_of(request)), *PROGRAMS, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, tuple[int, str | None]] = json.loads(done.stdout)
    return found


def alarms_of(request: pytest.FixtureRequest) -> int:
    return 2000 if request.config.getoption("--whole", default=False) else ALARMS


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an interval timer")
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_interrupted_at_random_moments_leaves_nothing(
    program: str, results: dict[str, tuple[int, str | None]], request: pytest.FixtureRequest
) -> None:
    interrupted, error = results[program]
    assert error is None, error
    assert interrupted > alarms_of(request) / 4  # the rest came before or after the program
