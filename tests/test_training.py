"""Profiling one step of a loop, and the configuration that asks for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops import StepProfiler
from dispatch_flops.config import FlopsProfilerConfig
from dispatch_flops.errors import ConfigError, NotProfiledError, TargetError

B, IN, OUT = 3, 5, 7
FORWARD = B * IN * OUT


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


def test_the_step_asked_for_is_profiled_once(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_micro_batches_are_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = loop({"enabled": True, "profile_step": 2}, micro_batches=4)
    assert profiler.profile.root.total("forward").macs == 4 * FORWARD
    assert profiler.profile.scope.batch_size == 4 * B
    assert profiler.profile.root.calls == 4
    assert profiler.steps_done == 4
    assert capsys.readouterr().out.count("Profile Summary") == 1


def test_parts_of_the_step_take_time() -> None:
    timing = loop({"enabled": True, "output_file": "/dev/null"}).profile.timing
    assert timing.backward_s is not None and timing.backward_s > 0
    assert timing.step_s is not None and timing.step_s > 0


def test_disabled_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    profiler = loop({"enabled": False})
    assert capsys.readouterr().out == ""
    with pytest.raises(NotProfiledError, match="step 1 is not over"):
        _ = profiler.profile


def test_an_exception_in_the_step_leaves_nothing_on() -> None:
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = StepProfiler(model, optimizer, {"enabled": True})
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    with pytest.raises(ValueError, match="user"), profiler.step():
        raise ValueError("user")
    assert _get_current_dispatch_mode_stack() == []
    assert not optimizer._optimizer_step_post_hooks


def test_the_optimizer_must_be_one() -> None:
    with pytest.raises(TargetError, match="Optimizer"):
        StepProfiler(nn.Linear(2, 3), object(), {})  # type: ignore[arg-type]


# -- configuration --------------------------------------------------------------------------------


def test_a_section_a_whole_configuration_and_a_file(tmp_path: Path) -> None:
    section = {"enabled": True, "profile_step": 7, "output_file": None}
    whole = {"train_batch_size": 8, "flops_profiler": section}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(whole))
    expected = FlopsProfilerConfig(enabled=True, profile_step=7)
    for source in (section, whole, file, str(file), expected):
        assert FlopsProfilerConfig.load(source) == expected


def test_defaults_are_deepspeeds() -> None:
    assert FlopsProfilerConfig.load({}) == FlopsProfilerConfig(
        enabled=False,
        profile_step=1,
        module_depth=-1,
        top_modules=1,
        detailed=True,
        output_file=None,
        recompute_fwd_factor=0.0,
    )


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"flops_profiler": {"enabel": True}}, "enabel"),
        ({"enabled": "yes"}, "enabled must be bool"),
        ({"enabled": True, "profile_step": True}, "profile_step must be int"),
        ({"enabled": True, "profile_step": 0}, "profile_step must be at least 1"),
        ({"enabled": True, "output_file": 3}, "output_file must be str or null"),
        ({"recompute_fwd_factor": float("nan")}, "recompute_fwd_factor must be at least 0"),
        ({"recompute_fwd_factor": float("inf")}, "recompute_fwd_factor must be at least 0"),
        ({"flops_profiler": []}, "must be an object"),
        ({"train_batch_size": 8}, "no section"),
        (3, "not int"),
        ("/nowhere/ds.json", "/nowhere/ds.json"),
    ],
)
def test_what_is_wrong_is_named(source: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FlopsProfilerConfig.load(source)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        FlopsProfilerConfig.load(file)


def is_anything_on() -> bool:
    return bool(_get_current_dispatch_mode_stack()) or bool(_global_forward_hooks)


def test_an_optimizer_that_steps_outside_the_block_ends_the_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = StepProfiler(model, optimizer, {"enabled": True, "profile_step": 2})
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


def test_what_runs_between_micro_batches_is_not_of_the_step() -> None:
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    profiler = StepProfiler(model, optimizer, {"enabled": True, "output_file": "/dev/null"})
    for micro_batch in range(3):
        with profiler.step(samples=B):
            model(torch.ones(B, IN)).sum().backward()
            if micro_batch == 2:
                optimizer.step()
        assert not is_anything_on()
        model(torch.ones(100, IN))  # an evaluation
    assert profiler.profile.root.total("forward").macs == 3 * FORWARD
    assert profiler.profile.root.calls == 3
    assert profiler.profile.scope.batch_size == 3 * B


def test_a_loop_that_ends_within_a_step_leaves_nothing_on() -> None:
    profiler = loop({"enabled": True, "profile_step": 5}, steps=4)
    with profiler.step():
        pass
    assert not is_anything_on()
    with pytest.raises(NotProfiledError, match="step 5 is not over yet; 4 are done"):
        profiler.profile  # noqa: B018
    assert profiler._optimizer._optimizer_step_post_hooks
    profiler.close()
    assert not profiler._optimizer._optimizer_step_post_hooks


def test_a_file_that_cannot_be_written_ends_no_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    config = {"enabled": True, "output_file": str(tmp_path / "file" / "profile.txt")}
    with pytest.warns(UserWarning, match="printed instead"):
        assert loop(config).steps_done == 4
    assert "Profile Summary" in capsys.readouterr().out


def test_an_optimizer_that_holds_the_one_that_steps() -> None:
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


def test_a_block_works_on_no_less_than_nothing() -> None:
    model = nn.Linear(IN, OUT)
    profiler = StepProfiler(model, torch.optim.SGD(model.parameters()), {"enabled": True})
    with pytest.raises(ConfigError, match="samples=-1"), profiler.step(samples=-1):
        pass


def test_what_a_grad_scaler_skips_is_no_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    profiler = StepProfiler(model, optimizer, {"enabled": True})
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
    assert profiler.profile.scope.batch_size == 2 * B
    assert profiler.profile.total("optimizer").flops > 0
    assert "skipped by the GradScaler: 2" in capsys.readouterr().out
