"""Profiling one step of another framework's loop, and timing the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops.analysis.latency import latency_of, measured_seconds
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import ConfigError, NotProfiledError, UncountedWarning
from dispatch_flops.integrations.callback import StepCallback, rows_of
from dispatch_flops.profile import Profile
from dispatch_flops.units import fraction_text, seconds_text

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


def after_steps(steps: int, *args: Any, **options: Any) -> StepCallback:
    return run(StepCallback(*args, now=Clock(), **options), *[[B]] * steps)


def run(callback: StepCallback, *steps: list[int]) -> StepCallback:
    """Each step has micro-batches of so many rows."""
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for micro_batches in steps:
        callback.begin(model)
        for rows in micro_batches:
            x = torch.ones(rows, IN)
            callback.add_batch({"n": 1, "x": x})
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        callback.end(world_size=1)
    callback.finish()
    return callback


def test_callback_profiles_the_given_step_and_times_the_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback = after_steps(5, 3)
    profile = callback.profile.check()
    assert profile.root.total("forward").macs == profile.root.total("backward").macs == MACS
    assert profile.root.calls == 1
    assert profile.run.step == 3
    assert profile.run.batch_size == B
    assert profile.timing.iteration_s == SECONDS
    assert callback.steps_done == 5
    out = capsys.readouterr().out
    assert "the whole iteration is that of step 4, without the profiler" in out
    assert f"Step     3, {B} samples, {B / SECONDS:g} samples/s" in out
    assert "DeepSpeed" not in out  # this program does not use it


def test_times_of_two_steps_are_never_combined(capsys: pytest.CaptureFixture[str]) -> None:
    """The timed step takes 2 ns: less than the profiled one's passes."""
    readings = iter(range(1, 1_000))
    callback = StepCallback(1, now=lambda: 2e-9 * next(readings))
    profile = run(callback, [B], [B]).profile
    timing = profile.timing
    forward_s, backward_s = latency_of(profile.root), timing.latency("backward")
    assert forward_s is not None and backward_s is not None and timing.iteration_s is not None
    assert timing.iteration_s < forward_s
    assert timing.iteration_step == 2
    out = capsys.readouterr().out
    assert f"{seconds_text(timing.iteration_s)} (whole iteration of step 2, without the" in out
    assert "the whole iteration is of all that ran" not in out
    assert measured_seconds(profile)[1] == "whole iteration of step 2, without the profiler"
    assert Profile.from_json(profile.to_json()) == profile


def test_utilisation_is_based_on_the_duration_of_the_next_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peak = 1e6
    machine = Machine(name="toy", flops_per_s={"float32": peak}, source="made up")
    callback = after_steps(2, 1, machine=machine)
    assert callback.profile.model_total().flops == MODEL_FLOPS
    assert callback.mfu == pytest.approx(MODEL_FLOPS / peak / SECONDS)
    assert callback.hfu == pytest.approx((MODEL_FLOPS + OPTIMIZER_FLOPS) / peak / SECONDS)
    out = capsys.readouterr().out
    assert f"MFU      {fraction_text(MODEL_FLOPS / peak / SECONDS)}, HFU" in out
    assert " of toy" in out


def test_step_in_which_the_clock_is_set_back_is_not_the_timed_one() -> None:
    readings = iter([10.0, 7.0, 20.0, 24.0])  # of the beginning and the end of two steps
    callback = StepCallback(1, now=lambda: next(readings))
    timing = run(callback, [B], [B], [B]).profile.timing
    assert (timing.iteration_s, timing.iteration_step) == (24.0 - 20.0, 3)


def test_utilisation_on_an_unknown_machine_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    callback = after_steps(2, 1)
    assert callback.mfu is callback.hfu is None
    assert "MFU" not in capsys.readouterr().out


def test_profile_without_a_next_step_is_printed_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine = Machine(name="toy", flops_per_s={"float32": 1.0})
    callback = after_steps(2, 2, machine=machine)
    assert not any("ran without the profiler" in note for note in callback.profile.notes)
    assert callback.mfu is callback.hfu is None
    assert capsys.readouterr().out.count("Step     2") == 1


def test_step_that_was_never_reached_is_told_at_the_end_and_where_its_profile_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.warns(UserWarning, match="step 3 was never reached: training ended after 2"):
        callback = after_steps(2, 3)
    callback.finish()  # tells it once
    with pytest.raises(NotProfiledError, match="step 3 was never reached: training ended after 2"):
        _ = callback.profile
    with pytest.raises(NotProfiledError, match="step 3 is not over yet; 0 are done"):
        _ = StepCallback(3).profile
    assert not capsys.readouterr().out


def test_callback_with_a_configuration_prints_as_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.txt"
    section = {"enabled": True, "profile_step": 2, "detailed": False, "output_file": str(path)}
    callback = after_steps(3, config={"flops_profiler": section})
    assert callback.config.profile_step == 2
    assert "Step     2, " in path.read_text()
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("section", "shown"),
    [({}, True), ({"detailed": False}, False), ({"module_depth": 0}, False)],
)
def test_callback_shows_submodules_as_the_configuration_says(
    section: dict[str, Any], shown: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = StepCallback(1, section)
    model = nn.Sequential(nn.Linear(IN, OUT))
    callback.begin(model)
    model(torch.ones(B, IN))
    callback.end()
    callback.finish()
    assert ("0 (Linear)" in capsys.readouterr().out) is shown


def test_callback_with_a_disabled_configuration_profiles_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback = after_steps(3, 1, {"enabled": False})
    with pytest.raises(NotProfiledError, match="`enabled` is false in the configuration"):
        _ = callback.profile
    assert not capsys.readouterr().out


@pytest.mark.parametrize("name", ["profile", "mfu", "hfu"])
def test_callback_of_every_step_says_where_its_figures_are(name: str) -> None:
    callback = StepCallback(every_step=True)
    with pytest.raises(NotProfiledError, match=r"`meter.window.mfu`; .* pass profile_step"):
        getattr(callback, name)


def test_callback_with_a_step_is_enabled_unless_the_configuration_disables_it() -> None:
    assert StepCallback(2, {"detailed": False}).config.enabled
    assert StepCallback().config.enabled
    assert not StepCallback(2, {"enabled": False}).config.enabled
    assert not StepCallback(config={"profile_step": 2}).config.enabled


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
def test_callback_times_the_next_step_of_the_profiled_size(
    others: list[list[int]], timed: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = run(callback := StepCallback(1, machine=TOY, now=Clock()), [B], *others).profile
    out = capsys.readouterr().out
    assert out.count("Step     1") == 1
    if timed is None:
        assert callback.mfu is callback.hfu is None
        assert "the whole iteration is that of" not in out
    else:
        # a reading at each begin, and one at the end: the last two are 2n - 1 ticks apart
        assert profile.timing.iteration_s == TICK * (2 * timed - 1)
        assert f"the whole iteration is that of step {timed}, without" in out


def test_micro_batches_are_profiled_as_one_step() -> None:
    profile = run(StepCallback(1), [B, 2]).profile
    assert profile.run.batch_size == B + 2
    assert profile.root.calls == 2


def test_second_run_after_reset_is_profiled_anew(capsys: pytest.CaptureFixture[str]) -> None:
    callback = run(StepCallback(2), [B], [B], [B])
    for rows in (B + 1, B + 2):
        callback.reset()
        assert callback.steps_done == 0
        with pytest.raises(NotProfiledError, match="step 2 is not over yet; 0 are done"):
            _ = callback.profile
        run(callback, [B], [rows], [rows])
        assert callback.profile.run.batch_size == rows
        assert callback.profile.timing.iteration_s is not None
    assert capsys.readouterr().out.count("Step     2") == 3


def test_run_that_was_too_short_does_not_affect_the_next() -> None:
    callback = StepCallback(2)
    with pytest.warns(UserWarning, match="step 2 was never reached: training ended after 1"):
        run(callback, [B])
    callback.reset()
    run(callback, [1], [2], [2])
    assert callback.profile.run.batch_size == 2


def test_rows_of_a_nested_batch_are_those_of_its_first_tensor() -> None:
    two = torch.ones(2, 3)
    assert rows_of(two) == rows_of([two, 1]) == rows_of({"a": 1, "b": (two,)}) == 2
    assert rows_of("text") is rows_of(torch.tensor(1.0)) is rows_of([]) is rows_of(object()) is None


@pytest.mark.parametrize("step", [0, True, "2"])
def test_callback_with_a_wrong_step_raises_config_error(step: Any) -> None:
    with pytest.raises(ConfigError, match="profile_step"):
        StepCallback(step)


@pytest.mark.parametrize("every_step", [False, True])
def test_callback_with_seconds_for_a_clock_raises_before_training(every_step: bool) -> None:
    with pytest.raises(ConfigError, match=r"now=2\.5: pass a function"):
        StepCallback(every_step=every_step, now=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("every_step", [False, True])
def test_callback_with_the_name_of_a_machine_raises_before_training(every_step: bool) -> None:
    with pytest.raises(ConfigError, match="machine='H100': pass a Machine"):
        StepCallback(machine="H100", every_step=every_step)  # type: ignore[arg-type]


def test_callback_on_another_rank_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    callback = StepCallback(1)
    model = nn.Linear(IN, OUT)
    callback.begin(model)
    model(torch.ones(B, IN))
    callback.end(silent=True, rank=1, world_size=2)
    callback.finish()
    assert callback.profile.run.rank == 1
    assert callback.profile.root.total().macs == MACS
    assert not capsys.readouterr().out


@torch.library.custom_op("dispatch_flops_callback::unpriced", mutates_args=())
def unpriced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_end_with_a_warning_as_error_keeps_the_profile(capsys: pytest.CaptureFixture[str]) -> None:
    callback, model = StepCallback(1), nn.Linear(IN, OUT)
    callback.begin(model)
    unpriced(model(torch.ones(B, IN)).detach())
    with pytest.raises(UncountedWarning, match="unpriced"):
        callback.end()
    assert not _get_current_dispatch_mode_stack()
    assert not callback.is_active
    callback.finish()
    assert callback.profile.root.total().macs == MACS
    assert capsys.readouterr().out.count("Linear: 42 parameters") == 1


def test_step_that_is_dropped_does_not_warn() -> None:
    callback, model = StepCallback(1), nn.Linear(IN, OUT)
    callback.begin(model)
    unpriced(model(torch.ones(B, IN)).detach())
    callback.close()
    assert not _get_current_dispatch_mode_stack()


def test_close_within_a_step_leaves_no_mode_or_hook() -> None:
    callback = StepCallback(1)
    callback.begin(nn.Linear(IN, OUT))
    assert _get_current_dispatch_mode_stack()
    callback.close()
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize(("profile_step", "timed"), [(None, 4), (3, 3)])
def test_rates_of_every_step_leave_out_the_profiled_step(
    profile_step: int | None, timed: int
) -> None:
    """The first of five steps is counted; the profiled one takes the profiler's time, too."""
    meter = after_steps(5, profile_step, every_step=True).meter
    assert meter is not None
    assert (meter.steps_done, meter.run.timed_steps) == (5, timed)
    assert meter.total_flops == 5 * (MODEL_FLOPS + OPTIMIZER_FLOPS)
