"""A Trainer's callback that profiles one optimizer step."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops.analysis.machines import Machine
from dispatch_flops.errors import NotProfiledError

pytest.importorskip("transformers")
from dispatch_flops.integrations.transformers import FlopsCallback

pytestmark = pytest.mark.slow

B, IN, OUT, MICRO = 3, 5, 7, 4
FORWARD = B * IN * OUT
TOY = Machine(name="toy", flops_per_s={"float32": 1e9}, source="made up")


class Net(nn.Module):
    """One layer, with the loss that a Trainer asks a model for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def check(callback: FlopsCallback, out: str, step: int) -> None:
    profile = callback.profile.check()
    assert profile.root.calls == MICRO
    assert profile.root.total("forward").macs == MICRO * FORWARD
    assert profile.root.total("backward").macs == MICRO * FORWARD  # the input needs no gradient
    assert profile.total("optimizer").flops > 0
    assert profile.run.batch_size == MICRO * B
    assert profile.run.world_size == 1
    assert profile.timing.iteration_s is not None and profile.timing.iteration_s > 0
    least_s = profile.model_total().flops / 1e9
    assert callback.mfu == pytest.approx(least_s / profile.timing.iteration_s)
    assert out.count(f"Step     {step}") == out.count("\nStep ") == 1
    assert "of toy" in out


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()
    assert not torch.nn.modules.module._global_forward_hooks


def loop(callback: FlopsCallback, steps: int, fail_in: int = 0) -> None:
    """What a Trainer runs and calls, in its order."""
    args = SimpleNamespace(process_index=0, world_size=1)
    state = SimpleNamespace(
        is_world_process_zero=True, num_input_tokens_seen=0, global_step=0, stateful_callbacks={}
    )
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def call(event: str) -> None:
        getattr(callback, event)(args, state, None, **known)

    call("on_init_end")
    call("on_train_begin")
    call("on_epoch_begin")
    for step in range(1, steps + 1):
        for micro_batch in range(MICRO):
            if micro_batch == 0:
                call("on_step_begin")
            if step == fail_in:
                raise KeyboardInterrupt
            (model(torch.ones(B, IN))["loss"] / MICRO).backward()
            if micro_batch < MICRO - 1:
                call("on_substep_end")
        call("on_pre_optimizer_step")
        optimizer.step()
        call("on_optimizer_step")
        optimizer.zero_grad()
        call("on_step_end")
    call("on_epoch_end")
    call("on_train_end")


def test_micro_batches_are_profiled_as_one_step(capsys: pytest.CaptureFixture[str]) -> None:
    callback = FlopsCallback(profile_step=2, machine=TOY)
    loop(callback, 4)
    check(callback, capsys.readouterr().out, 2)


def test_second_run_is_profiled_anew(capsys: pytest.CaptureFixture[str]) -> None:
    callback = FlopsCallback(profile_step=2, machine=TOY)
    with pytest.warns(UserWarning, match="step 2 was never reached"):
        loop(callback, 1)
    with pytest.raises(NotProfiledError, match="step 2 was never reached: training ended after 1"):
        _ = callback.mfu
    for _ in range(2):
        loop(callback, 4)
        check(callback, capsys.readouterr().out, 2)


def test_callback_with_a_step_and_a_configuration_is_enabled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback = FlopsCallback(2, {"detailed": False}, TOY)
    loop(callback, 4)
    check(callback, capsys.readouterr().out, 2)


def test_exception_in_the_step_leaves_no_mode_or_hook() -> None:
    for profile_step in (1, 2):  # in the step that is timed, and in the one that is profiled
        with FlopsCallback(profile_step) as callback, pytest.raises(KeyboardInterrupt):
            loop(callback, 4, fail_in=2)
        assert callback._hook is None


def test_new_run_drops_an_unfinished_step(capsys: pytest.CaptureFixture[str]) -> None:
    callback = FlopsCallback(profile_step=3, machine=TOY)
    with pytest.raises(KeyboardInterrupt):
        loop(callback, 4, fail_in=3)
    assert _get_current_dispatch_mode_stack()
    loop(callback, 4)
    check(callback, capsys.readouterr().out, 3)


needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="a Trainer needs accelerate"
)


def train(
    callback: Any,
    path: Path,
    rows: int,
    model: Net,
    *,
    resumed: Path | None = None,
    **options: Any,
) -> None:
    """A real Trainer, on so many rows an epoch."""
    from transformers import Trainer, TrainingArguments

    defaults: dict[str, Any] = {
        "per_device_train_batch_size": B,
        "gradient_accumulation_steps": MICRO,
        "save_strategy": "no",
    }
    arguments = TrainingArguments(
        output_dir=str(path),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(defaults | options),
    )
    data = [{"x": torch.ones(IN)} for _ in range(rows)]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resumed and str(resumed))
    assert not model._forward_pre_hooks


@needs_accelerate
def test_real_trainer_profiles_the_given_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = FlopsCallback(config={"enabled": True, "profile_step": 2}, machine=TOY)
    train(callback, tmp_path, 4 * MICRO * B, Net(), max_steps=4)
    check(callback, capsys.readouterr().out, 2)
    clipped = callback.profile.node("<outside>.gradient clipping")
    assert clipped.total("optimizer").flops > 0


@needs_accelerate
@pytest.mark.parametrize(
    ("profile_step", "samples", "timed"),
    [(1, MICRO * B, 3), (2, B + 1, 4), (3, MICRO * B, None), (4, B + 1, None)],
)
def test_shorter_last_step_of_an_epoch_is_not_timed(
    profile_step: int,
    samples: int,
    timed: int | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two epochs of two steps: one whole, and one of a micro-batch of B rows and one of 1."""
    callback = FlopsCallback(profile_step, machine=TOY)
    train(callback, tmp_path, MICRO * B + B + 1, Net(), num_train_epochs=2)
    profile = callback.profile
    assert profile.run.batch_size == samples
    assert profile.root.total("forward").macs == samples * IN * OUT
    assert (callback.mfu is None) is (timed is None)
    out = capsys.readouterr().out
    assert out.count("\nStep ") == 1
    assert (f"the whole iteration is that of step {timed}," in out) is (timed is not None)


class Small(Net):
    """Holds no more than so many rows."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(x) > B:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().forward(x)


@needs_accelerate
def test_batch_size_found_by_the_trainer_is_stated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = FlopsCallback(1, machine=TOY)
    options = {"per_device_train_batch_size": 4 * B, "gradient_accumulation_steps": 1}
    train(callback, tmp_path, 5 * 4 * B, Small(), max_steps=4, auto_find_batch_size=True, **options)
    samples = callback.profile.run.batch_size
    assert samples is not None and samples <= B
    assert callback.profile.root.total("forward").macs == samples * IN * OUT
    assert callback.steps_done == 4
    assert callback.profile.timing.iteration_s is not None


@needs_accelerate
def test_model_compiled_by_the_trainer_is_profiled(tmp_path: Path) -> None:
    callback = FlopsCallback(2, {"output_file": str(tmp_path / "profile.txt")}, TOY)
    options = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 4}
    train(callback, tmp_path, 4 * MICRO * B, Net(), **options)
    check(callback, (tmp_path / "profile.txt").read_text(), 2)


class Logger:
    """A callback that keeps what the Trainer's loggers are given."""

    def __new__(cls) -> Any:
        from transformers import TrainerCallback

        def on_log(
            self: Any, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
        ) -> None:
            self.seen.append(dict(logs))

        return type("Logger", (TrainerCallback,), {"seen": [], "on_log": on_log})()


@needs_accelerate
def test_every_step_is_logged_beside_the_loss(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, logger, callback = Net(), Logger(), FlopsCallback(every_step=True, machine=TOY)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        per_device_train_batch_size=B,
        gradient_accumulation_steps=MICRO,
        max_steps=6,
        logging_steps=2,
    )
    data = [{"x": torch.ones(IN)} for _ in range(6 * MICRO * B)]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[logger, callback])
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    seen = [row for row in logger.seen if "loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert callback.meter is not None
    assert callback.meter.run.model_total.macs == 6 * MICRO * 2 * FORWARD
    of_step = callback.meter.model_flops // 6
    assert [row["model_flops"] for row in rows] == [steps * of_step for steps in (2, 4, 6)]
    assert [row["model_flops"] for row in seen] == [row["model_flops"] for row in rows]
    assert all(row["mfu"] > 0 and row["flops_per_s"] > 0 for row in (*rows[1:], *seen[1:]))
    assert not callback.meter.is_estimate
    assert not model._forward_pre_hooks
    with pytest.raises(NotProfiledError):  # no step is profiled
        _ = callback.profile


@needs_accelerate
def test_every_step_of_a_compiled_model_is_followed(tmp_path: Path) -> None:
    """Each epoch ends with a smaller batch, a shape that is new in the middle of the run."""
    rows, epochs = 4 * B - 1, 3
    callback, model = FlopsCallback(every_step=True, machine=TOY), Net()
    options = {"torch_compile": True, "torch_compile_backend": "eager", "num_train_epochs": epochs}
    train(callback, tmp_path, rows, model, gradient_accumulation_steps=1, **options)
    assert callback.meter is not None
    assert callback.meter.run.samples == rows * epochs
    assert callback.meter.run.model_total.macs == rows * epochs * 2 * (FORWARD // B)
    assert callback.meter.run.timed_steps > 0
    assert not callback.meter.is_estimate
    assert not model._forward_pre_hooks


ROWS, LENGTH, PADDING = 2, 6, 1


def train_language_model(callback: FlopsCallback, path: Path, **options: Any) -> list[dict]:
    """Train a small GPT-2 on rows of which the last token is padding; return the Trainer's log."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    config = GPT2Config(vocab_size=97, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    arguments = TrainingArguments(
        output_dir=str(path),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=MICRO,
        logging_steps=1,
        save_steps=2,
        **options,
    )
    ids = torch.arange(LENGTH)
    row = {"input_ids": ids, "labels": ids, "attention_mask": (ids < LENGTH - PADDING).long()}
    trainer = Trainer(
        GPT2LMHeadModel(config),
        arguments,
        train_dataset=[row] * (8 * MICRO * ROWS),
        callbacks=[callback],
    )
    resumed = path / "checkpoint-2"
    trainer.train(resume_from_checkpoint=str(resumed) if resumed.exists() else None)
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.slow
@needs_accelerate
@pytest.mark.parametrize("counted", ["no", "all", "non_padding"])
def test_tokens_and_totals_of_a_resumed_run_are_logged(counted: str, tmp_path: Path) -> None:
    """Steps 1 and 2, and from the checkpoint on 3 and 4; or without it, four steps."""
    options = {"include_num_input_tokens_seen": counted}
    first = FlopsCallback(every_step=True)
    train_language_model(first, tmp_path, max_steps=2, **options)
    second = FlopsCallback(every_step=True, machine=TOY)
    log = train_language_model(second, tmp_path, max_steps=4, **options)
    whole = FlopsCallback(every_step=True)
    whole_log = train_language_model(whole, tmp_path / "whole", max_steps=4, **options)
    assert first.meter is not None and second.meter is not None and whole.meter is not None
    assert second.meter.total_flops == whole.meter.total_flops
    assert second.meter.total_flops > first.meter.total_flops > 0
    assert second.meter.steps_done == 4
    length = LENGTH - PADDING if counted == "non_padding" else LENGTH
    assert second.meter.run.tokens == whole.meter.run.tokens == 4 * MICRO * ROWS * length
    assert second.meter.run.samples == 4 * MICRO * ROWS
    flops = {row["step"]: row["model_flops"] for row in log}
    assert flops == {row["step"]: row["model_flops"] for row in whole_log}
    assert log[-1]["tokens_per_s"] == second.meter.window.tokens_per_s


@needs_accelerate
def test_second_run_without_a_checkpoint_begins_with_0(tmp_path: Path) -> None:
    callback = FlopsCallback(every_step=True)
    for _ in range(2):
        train(callback, tmp_path, 4 * MICRO * B, Net(), max_steps=2)
        assert callback.meter is not None and callback.meter.steps_done == 2
        assert callback.meter.run.samples == 2 * MICRO * B
        assert callback.meter.tokens_per_s is None  # the inputs are not ids


@needs_accelerate
@pytest.mark.parametrize("options", [{"every_step": True}, {"profile_step": 2}])
def test_run_resumed_from_a_checkpoint_without_the_callback_is_saved(
    options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import TrainerCallback

    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    train(TrainerCallback(), tmp_path, 4 * MICRO * B, Net(), max_steps=1, **saving)
    resumed = tmp_path / "checkpoint-1"
    callback = FlopsCallback(**options)
    train(callback, tmp_path, 4 * MICRO * B, Net(), resumed=resumed, max_steps=3, **saving)
    assert callback.steps_done == 2
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["stateful_callbacks"]["FlopsCallback"] == callback.state()


@pytest.mark.slow
@needs_accelerate
def test_callback_that_the_trainer_restores_continues_the_totals(tmp_path: Path) -> None:
    """The Trainer replaces the callback by one that it makes from the checkpoint."""
    options: dict[str, Any] = {"restore_callback_states_from_checkpoint": True}
    for steps in (2, 4):
        callback = FlopsCallback(every_step=True)
        log = train_language_model(callback, tmp_path, max_steps=steps, **options)
    assert [row["model_flops"] for row in log] == [n * log[0]["model_flops"] for n in (1, 2, 3, 4)]
    assert callback.meter is None  # another one was called
