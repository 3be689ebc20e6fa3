"""Profiling one step of a loop that somebody else runs, and timing the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops.errors import ConfigError, NotProfiledError
from dispatch_flops.hardware import Machine
from dispatch_flops.integrations.step_watch import StepWatch

B, IN, OUT = 3, 5, 7
MACS = B * IN * OUT  # of the forward, and of the weight's gradient; the input needs none
TICK = 0.25
SECONDS = 3 * TICK  # between the clock's first two readings

# forward: MACs and bias; sum over B*OUT; backward: MACs, and the bias's gradient over B rows
MODEL_FLOPS = (2 * MACS + B * OUT) + (B * OUT - 1) + 2 * MACS + (B - 1) * OUT
OPTIMIZER_FLOPS = 2 * (IN * OUT + OUT)  # p += -lr * grad


class Clock:
    """1, 4, 9, ... ticks: any two readings but the first are further apart."""

    readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return TICK * self.readings**2


def watched(steps: int, *args: Any, **options: Any) -> StepWatch:
    watch = StepWatch(*args, now=Clock(), **options)
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        watch.begin(model)
        model(torch.ones(B, IN)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.end(batch_size=B, world_size=1)
    watch.finish()
    return watch


def test_the_step_asked_for_is_profiled_and_the_next_is_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch = watched(5, 3)
    profile = watch.profile.check()
    assert profile.root.total("forward").macs == profile.root.total("backward").macs == MACS
    assert profile.root.calls == 1
    assert profile.scope.step == 3
    assert profile.scope.batch_size == B
    assert profile.timing.iteration_s == SECONDS
    assert watch.steps_done == 5
    out = capsys.readouterr().out
    assert out.count("Profile Summary at step 3:") == 1
    assert "iter latency is that of step 4, which ran without the profiler" in out
    rate = next(line for line in out.splitlines() if line.startswith("samples/second"))
    assert rate.split()[-1] == str(B / SECONDS)


def test_utilisation_is_of_the_next_steps_time(capsys: pytest.CaptureFixture[str]) -> None:
    peak = 1e6
    machine = Machine(name="toy", flops_per_s={"float32": peak}, source="made up")
    watch = watched(2, 1, machine=machine)
    assert watch.profile.model_total().flops == MODEL_FLOPS
    assert watch.mfu == pytest.approx(MODEL_FLOPS / peak / SECONDS)
    assert watch.hfu == pytest.approx((MODEL_FLOPS + OPTIMIZER_FLOPS) / peak / SECONDS)
    out = capsys.readouterr().out
    assert f"MFU {MODEL_FLOPS / peak / SECONDS:.2%}" in out
    assert "of toy's dense peak (made up)" in out


def test_an_unknown_machine_has_no_utilisation(capsys: pytest.CaptureFixture[str]) -> None:
    watch = watched(2, 1)
    assert watch.mfu is watch.hfu is None
    assert "MFU" not in capsys.readouterr().out


def test_without_a_next_step_it_is_printed_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine(name="toy", flops_per_s={"float32": 1.0})
    watch = watched(2, 2, machine=machine)
    assert not any("ran without the profiler" in note for note in watch.profile.notes)
    assert watch.mfu is watch.hfu is None
    assert capsys.readouterr().out.count("Profile Summary at step 2:") == 1


def test_a_step_that_never_came(capsys: pytest.CaptureFixture[str]) -> None:
    watch = watched(2, 3)
    with pytest.raises(NotProfiledError, match="step 3 is not over yet; 2 are done"):
        _ = watch.profile
    assert not capsys.readouterr().out


def test_the_configuration_says_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.txt"
    section = {"enabled": True, "profile_step": 2, "detailed": False, "output_file": str(path)}
    watch = watched(3, config={"flops_profiler": section})
    assert watch.config.profile_step == 2
    assert "Summary at step 2:" in path.read_text()
    assert "Detailed Profile" not in path.read_text()
    assert not capsys.readouterr().out


def test_a_configuration_that_is_off_profiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    watch = watched(3, 1, {"enabled": False})
    with pytest.raises(NotProfiledError):
        _ = watch.profile
    assert not capsys.readouterr().out


@pytest.mark.parametrize("step", [0, True, "2"])
def test_a_wrong_step_is_refused(step: Any) -> None:
    with pytest.raises(ConfigError, match="profile_step"):
        StepWatch(step)


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    watch = StepWatch(1)
    model = nn.Linear(IN, OUT)
    watch.begin(model)
    model(torch.ones(B, IN))
    watch.end(silent=True, rank=1, world_size=2)
    watch.finish()
    assert watch.profile.scope.rank == 1
    assert watch.profile.root.total().macs == MACS
    assert not capsys.readouterr().out


def test_close_leaves_nothing_running() -> None:
    watch = StepWatch(1)
    watch.begin(nn.Linear(IN, OUT))
    assert _get_current_dispatch_mode_stack()
    watch.close()
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks
