"""The Lightning callback under a simulated trainer; Lightning need not be installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import ConfigError, NotProfiledError

B, IN, OUT, MICRO = 3, 5, 7, 4
FORWARD = B * IN * OUT
OURS = "dispatch_flops.integrations.lightning"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``FlopsCallback``, on a base class of our own where Lightning is not installed."""
    if importlib.util.find_spec("lightning") is None:
        for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["lightning.pytorch.callbacks"].Callback = type("Callback", (), {})
        monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield importlib.import_module(OURS).FlopsCallback
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks


class Net(nn.Module):
    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)
        self.logged: list[tuple[str, float]] = []

    def log(self, name: str, value: float) -> None:
        self.logged.append((name, value))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean() / MICRO
        loss.backward()
        return loss


def fit(
    callback: Any,
    steps: int,
    *,
    fail_in: int = -1,
    resumed_at: int = 0,
    rows: list[int] | None = None,
    log_every: int = 1,
    optimizers: int = 1,
) -> Net:
    """Lightning's order of hooks: the last batch of a step runs inside ``optimizer.step``."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SimpleNamespace(
        global_step=resumed_at,
        is_global_zero=True,
        global_rank=0,
        world_size=1,
        _logger_connector=SimpleNamespace(should_update_logs=False),
    )
    rows = [B] * (steps * MICRO) if rows is None else rows
    try:
        callback.on_train_start(trainer, model)
        for index in range(steps * MICRO):
            batch = {"x": torch.ones(rows[index], IN)}
            callback.on_train_batch_start(trainer, model, batch, index)
            if index == fail_in:
                raise KeyError("as told")
            if index % MICRO == MICRO - 1:
                optimizer.step(lambda batch=batch: model.training_step(batch["x"]))
                optimizer.zero_grad()
                trainer.global_step += optimizers
            else:
                model.training_step(batch["x"])
            trainer._logger_connector.should_update_logs = (index // MICRO + 1) % log_every == 0
            callback.on_train_batch_end(trainer, model, None, batch, index)
        callback.on_train_end(trainer, model)
    except KeyError as error:
        callback.on_exception(trainer, model, error)
        raise
    return model


@pytest.mark.parametrize("resumed_at", [0, 100])
def test_batches_of_a_step_are_profiled_as_one(
    make: Callable[..., Any], resumed_at: int, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = make(profile_step=2)
    fit(callback, 4, resumed_at=resumed_at)
    profile = callback.profile.check()
    assert profile.node("layer").calls == MICRO
    assert profile.root.total("forward").macs == MICRO * FORWARD
    assert profile.root.total("backward").macs == MICRO * FORWARD  # the input needs no gradient
    assert profile.total("optimizer").flops == 2 * (IN * OUT + OUT)  # p += -lr * grad
    assert profile.run.batch_size == MICRO * B
    assert profile.timing.iteration_s is not None
    # The step runs forward and backward of the last batch: its own time is its operators'.
    updates = [op.latency_s for op in profile.op_totals() if op.phase == "optimizer"]
    assert profile.timing.latency("optimizer") == pytest.approx(
        sum(seconds or 0.0 for seconds in updates)
    )
    assert capsys.readouterr().out.count("Step     2") == 1


def test_exception_in_the_step_leaves_no_mode_or_hook(make: Callable[..., Any]) -> None:
    callback = make(profile_step=2)
    with pytest.raises(KeyError):
        fit(callback, 4, fail_in=MICRO + 1)
    with pytest.raises(NotProfiledError):
        _ = callback.profile


def test_shorter_step_is_not_timed(
    make: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    callback = make(profile_step=1)
    fit(callback, 3, rows=[B] * (2 * MICRO - 1) + [1] + [B] * MICRO)
    assert callback.profile.timing.iteration_s is not None
    assert "the whole iteration is that of step 3" in capsys.readouterr().out


def test_second_fit_is_profiled_anew(
    make: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    callback = make(profile_step=2)
    with pytest.warns(UserWarning, match="step 2 was never reached"):
        fit(callback, 1)
    with pytest.raises(NotProfiledError, match="step 2 was never reached: training ended after 1"):
        _ = callback.profile
    fit(callback, 3)
    assert callback.steps_done == 3
    first = callback.profile
    fit(callback, 3)
    assert callback.profile is not first
    assert capsys.readouterr().out.count("Step     2") == 2


def test_every_step_is_logged_with_the_cost_of_its_batches(make: Callable[..., Any]) -> None:
    """Lightning does not call the module: the batches tell one step from another."""
    callback = make(every_step=True, machine=Machine(name="toy", flops_per_s={"float32": 1e9}))
    rows = [B] * (4 * MICRO) + ([B] * (MICRO - 1) + [1]) * 2
    model = fit(callback, 6, rows=rows)
    assert callback.meter.steps_done == 6
    assert callback.meter.run.model_total.macs == 2 * sum(rows) * IN * OUT
    assert callback.meter.run.costs["optimizer"].flops == 6 * 2 * (IN * OUT + OUT)
    assert callback.meter.run.timed_steps == 4  # the first of each size is counted
    assert not callback.meter.is_estimate
    logged = [value for name, value in model.logged if name == "model_flops"]
    assert len(logged) == 6
    assert logged[-1] == callback.meter.model_flops
    assert {name for name, _ in model.logged} == {"mfu", "model_flops", "flops_per_s"}


def test_totals_of_a_checkpoint_that_was_tested_are_not_those_of_the_next_fit(
    make: Callable[..., Any],
) -> None:
    callback = make(every_step=True)
    fit(callback, 2)
    saved = callback.state_dict()
    callback.setup(None, None, stage="test")
    callback.load_state_dict(saved)
    callback.setup(None, None, stage="fit")
    fit(callback, 3)
    assert callback.meter.steps_done == 3


def test_resumed_totals_are_in_checkpoints_from_before_the_first_step_on(
    make: Callable[..., Any],
) -> None:
    first, second = make(every_step=True), make(every_step=True)
    fit(first, 2)
    second.setup(None, None, stage="fit")
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    fit(second, 3)
    assert second.meter.steps_done == 2 + 3


def test_damaged_totals_of_a_checkpoint_are_refused_before_the_first_step(
    make: Callable[..., Any],
) -> None:
    first, second = make(every_step=True), make(every_step=True)
    fit(first, 2)
    with pytest.raises(ConfigError, match="the state of a meter is damaged"):
        second.load_state_dict({**first.state_dict(), "steps": "two"})


def test_figures_are_those_of_the_step_that_the_trainer_logs(make: Callable[..., Any]) -> None:
    """It logs every third batch that steps, and ``global_step`` rises by two in each."""
    model = fit(make(every_step=True), 6, log_every=3, optimizers=2)
    logged = [value for name, value in model.logged if name == "model_flops"]
    assert [value / logged[0] for value in logged] == [1, 1, 3, 3, 3, 6]


def test_exception_drops_the_metered_step(make: Callable[..., Any]) -> None:
    callback = make(every_step=True)
    with pytest.raises(KeyError):
        fit(callback, 4, fail_in=MICRO + 1)
    assert callback.meter.steps_done == 1


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_import_without_the_framework_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ours = f"dispatch_flops.integrations.{name}"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    for missing in (name, f"{name}.pytorch", f"{name}.pytorch.callbacks", f"pytorch_{name}"):
        monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"needs \w+: pip install 'dispatch-flops\[{name}\]'"):
        importlib.import_module(ours)
