"""Profiling one optimizer step of a training loop."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops import StepProfiler, _torch
from dispatch_flops.errors import (
    AlreadyActiveError,
    ConfigError,
    NotProfiledError,
    TargetError,
    UncountedWarning,
)
from dispatch_flops.profilers import training
from tests.helpers.interrupting import TooLateError, interrupted_at

B, IN, OUT = 3, 5, 7


FORWARD = B * IN * OUT


def started(**config: Any) -> tuple[nn.Linear, torch.optim.Optimizer, StepProfiler]:
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"enabled": True, "output_file": "/dev/null"} | config
    return model, optimizer, StepProfiler(model, optimizer, config)


def is_anything_on() -> bool:
    return bool(_get_current_dispatch_mode_stack()) or bool(_global_forward_hooks)


def loop(config: Any, *, steps: int = 4, micro_batches: int = 1) -> StepProfiler:
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = StepProfiler(model, optimizer, config)
    for _ in range(steps):
        for micro_batch in range(micro_batches):
            with profiler.step(samples=B):
                model(torch.ones(B, IN)).sum().backward()
                if micro_batch == micro_batches - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    return profiler


def test_step_profiler_profiles_the_configured_step_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = loop({"enabled": True, "profile_step": 3})
    profile = profiler.profile
    assert profile.root.total("forward").macs == FORWARD
    assert profile.root.total("backward").macs == FORWARD  # the input needs no gradient
    assert profile.total("optimizer").flops == 2 * (IN * OUT + OUT)  # p += -lr * grad
    assert profiler.steps_done == 4
    out = capsys.readouterr().out
    assert out.count("Profile Summary at step 3:") == 1
    for label in ("bwd latency", "step latency", "iter latency", "samples/second"):
        assert label in out


def test_step_profiler_with_micro_batches_profiles_them_as_one_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = loop({"enabled": True, "profile_step": 2}, micro_batches=4)
    assert profiler.profile.root.total("forward").macs == 4 * FORWARD
    assert profiler.profile.run.batch_size == 4 * B
    assert profiler.profile.root.calls == 4
    assert profiler.steps_done == 4
    assert capsys.readouterr().out.count("Profile Summary") == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copy_of_a_step_profiler_begins_the_step_that_is_not_over_anew(copied: Any) -> None:
    model, _, profiler = started()
    with profiler.step(samples=B):
        model(torch.ones(B, IN))
        other = copied(profiler)
    profiler.close()  # copy.copy's has the same optimizer
    with other.step(samples=B):
        other._model(torch.ones(B, IN)).sum().backward()
        other._optimizer.step()
    assert other.profile.root.total("forward").macs == FORWARD
    assert other.profile.run.batch_size == B
    assert (profiler.steps_done, other.steps_done) == (0, 1)


def test_step_profiler_times_backward_and_step() -> None:
    timing = loop({"enabled": True, "output_file": "/dev/null"}).profile.timing
    assert timing.latency("backward") is not None and timing.latency("backward") > 0
    assert timing.latency("optimizer") is not None and timing.latency("optimizer") > 0


def test_step_profiler_when_disabled_profiles_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = loop({"enabled": False})
    assert capsys.readouterr().out == ""
    with pytest.raises(NotProfiledError, match="`enabled` is false in the configuration"):
        _ = profiler.profile


def test_step_profiler_after_an_exception_leaves_no_mode_or_hook() -> None:
    _, optimizer, profiler = started()
    with pytest.raises(ValueError, match="user"), profiler.step():
        raise ValueError("user")
    assert not is_anything_on()
    assert not optimizer._optimizer_step_post_hooks


def test_step_profiler_without_an_optimizer_raises_target_error() -> None:
    with pytest.raises(TargetError, match="Optimizer"):
        StepProfiler(nn.Linear(2, 3), object(), {})  # type: ignore[arg-type]


def test_optimizer_step_outside_the_block_ends_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer, profiler = started(profile_step=2, output_file=None)
    for _ in range(4):
        with profiler.step(samples=B):
            model(torch.ones(B, IN)).sum().backward()
        assert not is_anything_on()
        optimizer.step()
    assert profiler.steps_done == 4
    assert profiler.profile.root.total("forward").macs == FORWARD
    assert profiler.profile.total("optimizer").flops == 0
    assert "outside the step() block" in profiler.profile.notes[-1]
    assert capsys.readouterr().out.count("Profile Summary at step 2:") == 1


def test_code_between_micro_batches_is_not_profiled() -> None:
    model, optimizer, profiler = started()
    for micro_batch in range(3):
        with profiler.step(samples=B):
            model(torch.ones(B, IN)).sum().backward()
            if micro_batch == 2:
                optimizer.step()
        assert not is_anything_on()
        model(torch.ones(100, IN))  # an evaluation
    assert profiler.profile.root.total("forward").macs == 3 * FORWARD
    assert profiler.profile.root.calls == 3
    assert profiler.profile.run.batch_size == 3 * B


def test_step_profiler_closed_within_a_step_leaves_no_hook() -> None:
    profiler = loop({"enabled": True, "profile_step": 5}, steps=4)
    with profiler.step():
        pass
    assert not is_anything_on()
    with pytest.raises(NotProfiledError, match="step 5 is not over yet; 4 are done"):
        profiler.profile  # noqa: B018
    assert profiler._optimizer._optimizer_step_post_hooks
    profiler.close()
    assert not profiler._optimizer._optimizer_step_post_hooks


def test_output_file_that_cannot_be_written_is_only_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = {"enabled": True, "output_file": str(tmp_path / "file" / "profile.txt")}
    with pytest.warns(UserWarning, match="printed instead"):
        assert loop(config).steps_done == 4
    assert "Profile Summary" in capsys.readouterr().out


def test_optimizer_that_holds_another_ends_the_step_by_it() -> None:
    """As accelerate's does, which is an Optimizer without an Optimizer's own state."""

    class Holding(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.optimizer.step()

    model = nn.Linear(IN, OUT)
    optimizer = Holding(torch.optim.SGD(model.parameters(), lr=0.1))
    profiler = StepProfiler(model, optimizer, {"enabled": True, "output_file": "/dev/null"})
    with profiler.step():
        model(torch.ones(B, IN)).sum().backward()
        optimizer.step()
    assert profiler.profile.total("optimizer").flops == 2 * (IN * OUT + OUT)
    assert not optimizer.optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    "samples", [-1, True, 2.0, "2", torch.tensor(2.0), torch.ones(2), np.float32(2)]
)
def test_samples_that_are_not_a_count_raise_config_error(samples: Any) -> None:
    _, _, profiler = started()
    with pytest.raises(ConfigError, match="samples="), profiler.step(samples=samples):
        raise AssertionError("the block has begun")
    assert not is_anything_on()


@pytest.mark.parametrize("samples", [B, torch.tensor(B), np.int64(B)])
def test_samples_of_any_integer_type_become_an_int(samples: Any) -> None:
    model, optimizer, profiler = started()
    with profiler.step(samples=samples):
        model(torch.ones(B, IN)).sum().backward()
        optimizer.step()
    assert profiler.profile.run.batch_size == B
    assert type(profiler.profile.run.batch_size) is int


@pytest.mark.parametrize("samples", [(B, None), (None, B)])
def test_samples_unknown_in_one_block_leave_the_batch_size_unknown(
    samples: tuple[int | None, ...],
) -> None:
    model, optimizer, profiler = started()
    for count in samples:
        with profiler.step(samples=count):
            model(torch.ones(B, IN)).sum().backward()
    optimizer.step()
    assert profiler.profile.root.calls == 2
    assert profiler.profile.run.batch_size is None


def test_block_within_a_block_raises_and_the_outer_one_continues() -> None:
    model, optimizer, profiler = started()
    with profiler.step(samples=B):
        model(torch.ones(B, IN)).sum().backward()
        with pytest.raises(AlreadyActiveError, match="leave it first"), profiler.step(samples=B):
            raise AssertionError("the block has begun")
        model(torch.ones(B, IN)).sum().backward()
        optimizer.step()
    assert profiler.profile.root.total("forward").macs == 2 * FORWARD
    assert profiler.profile.run.batch_size == B
    assert profiler.steps_done == 1


@torch.library.custom_op("dispatch_flops_training::unpriced", mutates_args=())
def unpriced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_step_profiler_with_warnings_as_errors_raises_the_users_exception_first() -> None:
    """pytest makes errors of them here."""
    model, optimizer, profiler = started()
    with pytest.raises(KeyError, match="user"), profiler.step(samples=B):
        unpriced(model(torch.ones(B, IN)).detach())
        raise KeyError("user")
    assert not is_anything_on()
    assert not optimizer._optimizer_step_post_hooks
    with pytest.raises(UncountedWarning, match="unpriced"), profiler.step(samples=B):
        unpriced(model(torch.ones(B, IN)).detach()).sum()
        optimizer.step()
    assert not is_anything_on()
    assert not optimizer._optimizer_step_post_hooks
    assert profiler.steps_done == 1
    assert profiler.profile.root.total("forward").macs == FORWARD
    with profiler.step(samples=B):
        optimizer.step()
    assert profiler.steps_done == 2


def test_step_that_is_dropped_does_not_warn() -> None:
    model, _, profiler = started()
    with profiler.step():
        unpriced(model(torch.ones(B, IN)).detach())
    profiler.close()
    assert not is_anything_on()


@pytest.mark.parametrize("profile_step", [1, 2])
def test_optimizer_step_before_an_exception_is_counted_as_a_step(profile_step: int) -> None:
    model, optimizer, profiler = started(profile_step=profile_step)
    for fails in (True, False):
        with contextlib.suppress(KeyError), profiler.step(samples=B):
            model(torch.ones(B, IN)).sum().backward()
            optimizer.step()
            if fails:
                raise KeyError("user")
    assert profiler.steps_done == 2
    if profile_step == 1:
        with pytest.raises(NotProfiledError, match="step 1 was not profiled to its end"):
            _ = profiler.profile
    else:
        assert profiler.profile.root.total("forward").macs == FORWARD


class Sharpness(torch.optim.Optimizer):
    """SAM: its two half steps are methods of its own, the second of which steps the base."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)

    def first_step(self) -> None:
        self.zero_grad()

    def second_step(self) -> None:
        self.base_optimizer.step()
        self.zero_grad()


def test_optimizer_whose_base_steps_ends_the_step_by_it() -> None:
    model = nn.Linear(IN, OUT)
    optimizer = Sharpness(model.parameters())
    config = {"enabled": True, "profile_step": 2, "output_file": "/dev/null"}
    profiler = StepProfiler(model, optimizer, config)
    for _ in range(3):
        with profiler.step(samples=B):
            model(torch.ones(B, IN)).sum().backward()
            optimizer.first_step()
            model(torch.ones(B, IN)).sum().backward()
            optimizer.second_step()
    assert profiler.steps_done == 3
    assert profiler.profile.root.total("forward").macs == 2 * FORWARD
    assert profiler.profile.total("optimizer").flops == 2 * (IN * OUT + OUT)
    assert not optimizer.base_optimizer._optimizer_step_post_hooks


def test_step_of_another_optimizer_warns_once_and_continues_the_step() -> None:
    model, given, profiler = started()
    other = torch.optim.Adagrad(model.parameters())

    def block() -> None:
        with profiler.step(samples=B):
            model(torch.ones(B, IN)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            other.step()

    with pytest.warns(UserWarning, match="^Adagrad stepped in step 1, but the SGD"):
        block()
    block()
    with profiler.step(samples=B):
        model(torch.ones(B, IN)).sum().backward()
        given.step()
    assert profiler.steps_done == 1
    assert profiler.profile.root.total("forward").macs == 3 * FORWARD


def test_step_skipped_by_a_grad_scaler_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, profiler = started(output_file=None)
    scaler = torch.amp.GradScaler("cpu")
    for value in (float("inf"), float("inf"), 1.0, 1.0):
        for micro_batch in range(2):
            with profiler.step(samples=B):
                scaler.scale(model(torch.full((B, IN), value)).sum()).backward()
                if micro_batch:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
    assert profiler.steps_done == 2
    assert profiler.profile.root.total("forward").macs == 2 * FORWARD
    assert profiler.profile.run.batch_size == 2 * B
    assert profiler.profile.total("optimizer").flops > 0
    assert "skipped by the GradScaler before this one: 2" in capsys.readouterr().out


def scaled_loop(*values: float, between: bool) -> StepProfiler:
    """One block a step; gradients are unscaled in it, and the optimizer steps there or after it."""
    model, optimizer, profiler = started(output_file=None)
    scaler = torch.amp.GradScaler("cpu")
    for value in values:
        with profiler.step(samples=B):
            scaler.scale(model(torch.full((B, IN), value)).sum()).backward()
            scaler.unscale_(optimizer)
            if not between:
                scaler.step(optimizer)
        if between:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return profiler


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("skipped", [0, 2])
def test_gradients_unscaled_in_a_block_may_step_in_it_or_after_it(
    between: bool, skipped: int, capsys: pytest.CaptureFixture[str]
) -> None:
    profiler = scaled_loop(*([float("inf")] * skipped), 1.0, 1.0, between=between)
    assert profiler.steps_done == 2
    assert profiler.profile.root.total("forward").macs == FORWARD
    assert profiler.profile.run.batch_size == B
    out = capsys.readouterr().out
    assert ("skipped by the GradScaler" in out) is bool(skipped)
    assert ("stepped outside the step() block" in out) is between


def test_scaled_step_of_another_optimizer_is_not_a_skipped_step() -> None:
    models = nn.ModuleList([nn.Linear(IN, OUT), nn.Linear(IN, OUT)])
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    profiler = StepProfiler(models, optimizers[1], {"enabled": True})
    with pytest.warns(UserWarning, match="SGD stepped in step 1"):
        for model, optimizer in zip(models, optimizers, strict=True):
            with profiler.step(samples=B):
                scaler.scale(model(torch.ones(B, IN)).sum()).backward()
                scaler.step(optimizer)
    assert profiler.profile.root.total("forward").macs == 2 * FORWARD


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TooLateError])
def test_step_interrupted_at_any_line_leaves_no_hooks(error: type[BaseException]) -> None:
    model = nn.Linear(3, 5)
    optimizer = torch.optim.SGD(model.parameters())
    before, after = _torch.step_hooks(optimizer)

    def is_of_profiler(frame: FrameType) -> bool:
        return frame.f_code.co_filename == training.__file__

    for moment in range(1000):
        profiler = StepProfiler(model, optimizer, {"enabled": True, "profile_step": 2})
        with (
            contextlib.suppress(error),
            interrupted_at(moment, is_of_profiler, error) as hits,
            profiler.step(),
        ):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        if not hits:
            break
        assert not before and not after, moment
    assert 20 < moment < 1000
