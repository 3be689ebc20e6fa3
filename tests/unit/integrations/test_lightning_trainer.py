"""The Lightning callback under the real trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import NotProfiledError

pytest.importorskip("lightning")
import lightning
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy

from dispatch_flops.integrations.lightning import FlopsCallback
from dispatch_flops.timing.passes import operator_seconds

pytestmark = pytest.mark.filterwarnings("default")  # Lightning warns of its own dependencies

B, IN, OUT, MICRO = 3, 5, 7, 4
FORWARD = B * IN * OUT
TOY = Machine(name="toy", flops_per_s={"float32": 1e9}, source="made up")


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Take back the rank that Lightning sets: a Trainer of transformers would join its group."""
    with mock.patch.dict(os.environ):
        yield


class Net(lightning.LightningModule):
    def __init__(self, *, manual: bool = False, fail_in: int = -1) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)
        self.automatic_optimization = not manual
        self.fail_in = fail_in

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_in:
            raise KeyError("as told")
        loss = self.layer(batch["x"]).square().mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if (batch_idx + 1) % MICRO == 0:
                self.optimizers().step()
                self.optimizers().zero_grad()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_in(folder: Path, **options: Any) -> Any:
    """Return a trainer of one epoch on the CPU, which shows and keeps nothing of its own."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    one_epoch = {"accelerator": "cpu", "devices": 1, "max_epochs": 1}
    return lightning.Trainer(**{**one_epoch, **quiet, **options}, default_root_dir=folder)


def fit(callback: FlopsCallback, model: Net, path: Path, *, steps: int = 4) -> None:
    manual = not model.automatic_optimization
    trainer = trainer_in(path, accumulate_grad_batches=1 if manual else MICRO, callbacks=[callback])
    data = [{"x": torch.ones(IN)} for _ in range(steps * MICRO * B)]
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=B))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks


@pytest.mark.parametrize("manual", [False, True])
def test_batches_of_a_step_are_profiled_as_one(
    manual: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = FlopsCallback(profile_step=2, machine=TOY)
    fit(callback, Net(manual=manual), tmp_path)
    profile = callback.profile.check()
    assert profile.node("layer").calls == MICRO
    assert profile.root.total("forward").macs == MICRO * FORWARD
    assert profile.root.total("backward").macs == MICRO * FORWARD  # the input needs no gradient
    assert profile.total("optimizer").flops >= 2 * (IN * OUT + OUT)
    assert profile.run.batch_size == MICRO * B
    assert profile.run.world_size == 1
    assert profile.timing.iteration_s is not None
    # Lightning gives every step a closure, which may run forward and backward: operators count.
    assert profile.timing.latency("optimizer") == operator_seconds(profile, "optimizer") is not None
    least_s = profile.model_total().flops / 1e9
    assert callback.mfu == pytest.approx(least_s / profile.timing.iteration_s)
    out = capsys.readouterr().out
    assert out.count("Step     2") == out.count("\nStep ") == 1
    assert "of toy" in out


def test_profile_of_the_last_step_is_printed_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = FlopsCallback(profile_step=2, machine=TOY)
    fit(callback, Net(), tmp_path, steps=2)
    assert callback.mfu is callback.hfu is None
    assert capsys.readouterr().out.count("Step     2") == 1


def test_exception_in_the_step_leaves_no_mode_or_hook(tmp_path: Path) -> None:
    callback = FlopsCallback(profile_step=2)
    with pytest.raises(KeyError, match="as told"):
        fit(callback, Net(fail_in=MICRO + 1), tmp_path)
    with pytest.raises(NotProfiledError):
        _ = callback.profile


def test_second_fit_is_profiled_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = FlopsCallback(profile_step=2, machine=TOY)
    fit(callback, Net(), tmp_path)
    first = callback.profile
    fit(callback, Net(), tmp_path)
    assert callback.profile is not first
    assert callback.profile.run.batch_size == MICRO * B
    assert capsys.readouterr().out.count("Step     2") == 2


class Words(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, IN)
        self.layer = nn.Linear(IN, OUT, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(self.embedding(batch["input_ids"])).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logged(Logger):
    """Logger that keeps what it is given."""

    name, version = "kept", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(metrics)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore them."""


def test_every_step_is_logged_and_totals_continue_after_a_checkpoint(tmp_path: Path) -> None:
    """Two steps, and from their checkpoint on four more, of which two are not counted."""
    length, checkpoint = 4, tmp_path / "two.ckpt"
    data = [{"input_ids": torch.arange(length)} for _ in range(7 * MICRO * B)]
    one = B * length * IN * OUT
    for steps in (2, 6):
        callback, logged = FlopsCallback(every_step=True, machine=TOY), Logged()
        trainer = trainer_in(
            tmp_path,
            max_epochs=None,
            max_steps=steps,
            accumulate_grad_batches=MICRO,
            callbacks=[callback],
            logger=logged,
            log_every_n_steps=1,
        )
        trainer.fit(
            Words(),
            torch.utils.data.DataLoader(data, batch_size=B),
            ckpt_path=checkpoint if steps == 6 else None,
        )
        trainer.save_checkpoint(checkpoint)
        assert callback.meter is not None
        # forward, and the gradients of the weight and of the embedding
        assert callback.meter.run.model_total.macs == steps * MICRO * 3 * one
        assert callback.meter.steps_done == steps
        assert callback.meter.run.tokens == steps * MICRO * B * length
        assert not callback.meter.is_estimate
    rows = [row for row in logged.rows if "model_flops" in row]
    assert rows[-1]["model_flops"] == callback.meter.model_flops
    assert {"mfu", "flops_per_s", "tokens_per_s"} <= set(rows[-1])


def test_batches_of_manual_optimization_that_do_not_step_log_the_steps_so_far(
    tmp_path: Path,
) -> None:
    """Batches 4, 8 and 12 step, and the trainer writes to its loggers after 3, 6, 9 and 12."""
    logged = Logged()
    trainer = trainer_in(
        tmp_path,
        callbacks=[FlopsCallback(every_step=True)],
        logger=logged,
        log_every_n_steps=MICRO - 1,
    )
    data = [{"x": torch.ones(IN)} for _ in range(3 * MICRO * B)]
    trainer.fit(Net(manual=True), torch.utils.data.DataLoader(data, batch_size=B))
    found = [row["model_flops"] for row in logged.rows if "model_flops" in row]
    assert [flops / found[0] for flops in found] == [1, 2, 3]


class Wide(Words):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(101, 991, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()


def test_loggers_are_given_all_digits_of_the_flops(tmp_path: Path) -> None:
    rows, logged = 103, Logged()
    trainer = trainer_in(
        tmp_path,
        callbacks=[FlopsCallback(every_step=True, machine=TOY)],
        logger=logged,
        log_every_n_steps=1,
    )
    trainer.fit(Wide(), torch.utils.data.DataLoader([torch.ones(101)] * rows, batch_size=rows))
    found = next(row["model_flops"] for row in logged.rows if "model_flops" in row)
    # forward, the gradient of the weight and the sum; Lightning divides the loss by 1
    expected = 2 * 2 * rows * 101 * 991 + (rows * 991 - 1) + 2
    assert found == expected != torch.tensor(expected, dtype=torch.float32).item()


def test_steps_of_a_wrapped_module_are_not_all_counted(tmp_path: Path) -> None:
    """Under DDP, Lightning calls the module in place of its method, with the batch's number."""
    steps, callback = 6, FlopsCallback(every_step=True, machine=TOY)
    trainer = trainer_in(
        tmp_path, strategy=DDPStrategy(process_group_backend="gloo"), callbacks=[callback]
    )
    data = [{"x": torch.ones(IN)} for _ in range(steps * B)]
    try:
        trainer.fit(Net(), torch.utils.data.DataLoader(data, batch_size=B))
    finally:
        torch.distributed.destroy_process_group()
    assert callback.meter is not None
    assert callback.meter.run.total.macs == steps * 2 * FORWARD
    assert callback.meter.run.timed_steps >= steps - 3


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch["x"])


def test_validation_within_some_steps_is_counted_in_these_alone(tmp_path: Path) -> None:
    """It follows batches 10 to 80; of these, 20, 40, 60 and 80 are the last of a step."""
    batches, every, of_validation = 80, 10, 2
    callback = FlopsCallback(every_step=True, machine=TOY)
    trainer = trainer_in(
        tmp_path, accumulate_grad_batches=MICRO, val_check_interval=every, callbacks=[callback]
    )
    train, validation = (
        torch.utils.data.DataLoader([{"x": torch.ones(IN)}] * (number * B), batch_size=B)
        for number in (batches, of_validation)
    )
    trainer.fit(Validated(), train, validation)
    within = [done for done in range(every, batches + 1, every) if done % MICRO]
    assert callback.meter is not None
    assert len(within) == 4
    # forward and the gradient of the weight; of a validation, forward alone
    assert callback.meter.run.total.macs == (2 * batches + of_validation * len(within)) * FORWARD
    assert not callback.meter.is_estimate
