"""Profiling one step of a loop that somebody else runs, and timing the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import ConfigError, NotProfiledError, UncountedWarning
from dispatch_flops.integrations.callback import StepWatch, rows_of

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
    return run(StepWatch(*args, now=Clock(), **options), *[[B]] * steps)


def run(watch: StepWatch, *steps: list[int]) -> StepWatch:
    """Each step has micro-batches of so many rows."""
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batches in steps:
        watch.begin(model)
        for rows in micro_batches:
            x = torch.ones(rows, IN)
            watch.add_batch({"n": 1, "x": x})
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.end(world_size=1)
    watch.finish()
    return watch


def test_the_step_asked_for_is_profiled_and_the_next_is_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch = watched(5, 3)
    profile = watch.profile.check()
    assert profile.root.total("forward").macs == profile.root.total("backward").macs == MACS
    assert profile.root.calls == 1
    assert profile.run.step == 3
    assert profile.run.batch_size == B
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
    with pytest.raises(NotProfiledError, match="step 3 never came: training ended after 2"):
        _ = watch.profile
    with pytest.raises(NotProfiledError, match="step 3 is not over yet; 0 are done"):
        _ = StepWatch(3).profile
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
    with pytest.raises(NotProfiledError, match="`enabled` is false in the configuration"):
        _ = watch.profile
    assert not capsys.readouterr().out


def test_a_step_that_is_asked_for_is_enabled_unless_the_configuration_says_no() -> None:
    assert StepWatch(2, {"detailed": False}).config.enabled
    assert StepWatch().config.enabled
    assert not StepWatch(2, {"enabled": False}).config.enabled
    assert not StepWatch(config={"profile_step": 2}).config.enabled


TOY = Machine(name="toy", flops_per_s={"float32": 1e6})


@pytest.mark.parametrize(
    ("others", "timed"),
    [
        ([[2], [B], [B]], 3),
        ([[1, 2], [2], [B]], 4),
        ([[B, B], [B]], 3),
        ([[2], [B, B], [1, 2]], None),
    ],
)
def test_the_step_that_is_timed_has_the_size_of_the_one_profiled(
    others: list[list[int]], timed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = run(watch := StepWatch(1, machine=TOY, now=Clock()), [B], *others).profile
    out = capsys.readouterr().out
    assert out.count("Profile Summary at step 1:") == 1
    if timed is None:
        assert watch.mfu is watch.hfu is None
        assert "which ran without the profiler" not in out
    else:
        # a reading at each begin, and one at the end: the last two are 2n - 1 ticks apart
        assert profile.timing.iteration_s == TICK * (2 * timed - 1)
        assert f"iter latency is that of step {timed}, which ran without" in out


def test_micro_batches_are_one_step() -> None:
    profile = run(StepWatch(1), [B, 2]).profile
    assert profile.run.batch_size == B + 2
    assert profile.root.calls == 2


def test_a_second_run_is_watched_like_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    watch = run(StepWatch(2), [B], [B], [B])
    for rows in (B + 1, B + 2):
        watch.reset()
        assert watch.steps_done == 0
        with pytest.raises(NotProfiledError, match="step 2 is not over yet; 0 are done"):
            _ = watch.profile
        run(watch, [B], [rows], [rows])
        assert watch.profile.run.batch_size == rows
        assert watch.profile.timing.iteration_s is not None
    assert capsys.readouterr().out.count("Profile Summary at step 2:") == 3


def test_a_run_too_short_is_no_part_of_the_next() -> None:
    watch = run(StepWatch(2), [B])
    watch.reset()
    run(watch, [1], [2], [2])
    assert watch.profile.run.batch_size == 2


def test_rows_of_a_batch() -> None:
    two = torch.ones(2, 3)
    assert rows_of(two) == rows_of([two, 1]) == rows_of({"a": 1, "b": (two,)}) == 2
    assert rows_of("text") is rows_of(torch.tensor(1.0)) is rows_of([]) is rows_of(object()) is None


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
    assert watch.profile.run.rank == 1
    assert watch.profile.root.total().macs == MACS
    assert not capsys.readouterr().out


@torch.library.custom_op("dispatch_flops_watch::unpriced", mutates_args=())
def unpriced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_a_warning_that_is_an_error_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    watch, model = StepWatch(1), nn.Linear(IN, OUT)
    watch.begin(model)
    unpriced(model(torch.ones(B, IN)).detach())
    with pytest.raises(UncountedWarning, match="unpriced"):
        watch.end()
    assert not _get_current_dispatch_mode_stack()
    assert not watch.at_work
    watch.finish()
    assert watch.profile.root.total().macs == MACS
    assert capsys.readouterr().out.count("Profile Summary at step 1:") == 1


def test_what_is_dropped_is_not_warned_of() -> None:
    watch, model = StepWatch(1), nn.Linear(IN, OUT)
    watch.begin(model)
    unpriced(model(torch.ones(B, IN)).detach())
    watch.close()
    assert not _get_current_dispatch_mode_stack()


def test_close_leaves_nothing_running() -> None:
    watch = StepWatch(1)
    watch.begin(nn.Linear(IN, OUT))
    assert _get_current_dispatch_mode_stack()
    watch.close()
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks
