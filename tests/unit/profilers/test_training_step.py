"""One training step of a model: forward, loss, backward and the optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.errors import TargetError
from dispatch_flops.profilers.training_step import loss_of, profile_training_step

B, D, H = 2, 3, 5
N = D * H  # parameters


class Net(nn.Module):
    """A layer without bias; the output holds a loss if ``kind`` says so."""

    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        self.layer = nn.Linear(D, H, bias=False)
        self.kind = kind
        self.modes: list[bool] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.modes.append(self.training)
        out = self.layer(x)
        if self.kind == "dict":
            return {"loss": out.square().sum(), "logits": out}
        return SimpleNamespace(loss=out.square().sum()) if self.kind == "object" else out


def test_backward_of_a_training_step_ends_at_the_inputs() -> None:
    given = torch.ones(B, D, requires_grad=True)
    profile = profile_training_step(Net(), [given.exp()])
    assert profile.total("backward").macs == 2 * B * D * H
    assert given.grad is None


def test_training_step_counts_all_phases() -> None:
    profile = profile_training_step(Net(), [torch.ones(B, D)])
    assert profile.total("forward").macs == B * D * H
    assert profile.total("backward").macs == B * D * H  # the input needs no gradient
    assert profile.total("optimizer").flops == 2 * N  # p += -lr * grad
    assert profile.outside.total("forward").flops == B * H - 1  # the sum
    assert profile.timing.iteration_s is not None
    assert profile.run.training is True


def test_training_step_runs_in_training_mode_and_restores_it() -> None:
    model = Net().eval()
    profile_training_step(model, [torch.ones(B, D)], warm_up=1, repeats=2)
    assert model.modes == [True] * (1 + 2 + 1)
    assert not model.training


def test_state_of_adamw_is_there_before_the_counted_step() -> None:
    profile = profile_training_step(Net(), [torch.ones(B, D)], optimizer="adamw", warm_up=0)
    (adamw,) = (node for node in profile.outside.children if node.class_name == "AdamW")
    assert not any("zeros_like" in op.op for op in adamw.ops)
    assert adamw.own("optimizer").flops > 2 * N


def test_step_of_adamw_is_that_of_adam_and_a_decay() -> None:
    x = [torch.ones(B, D)]
    adamw, adam = (
        profile_training_step(Net(), x, optimizer=name).total("optimizer").flops
        for name in ("adamw", "adam")
    )
    assert adamw - adam == N  # p *= 1 - lr * decay


@pytest.mark.parametrize("kind", ["dict", "object"])
def test_loss_of_the_model_is_used(kind: str) -> None:
    profile = profile_training_step(Net(kind), [torch.ones(B, D)])
    assert profile.root.own("forward").flops == B * H + B * H - 1  # square and sum
    assert profile.total("backward").macs == B * D * H


def test_training_step_on_the_meta_device_has_no_time() -> None:
    profile = profile_training_step(Net(), [torch.ones(B, D)], device="meta", optimizer="adamw")
    assert profile.total("backward").macs == B * D * H
    assert profile.timing.iteration_s is None


def test_training_step_tells_what_runs() -> None:
    told: list[str] = []
    profile_training_step(Net(), [torch.ones(B, D)], warm_up=2, repeats=3, notify=told.append)
    assert told == [
        "warm-up step 1 of 2",
        "warm-up step 2 of 2",
        "timing 3 steps",
        "counting a step",
    ]


def test_loss_is_the_sum_of_all_outputs_that_require_a_gradient() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    assert loss_of((a, [b], torch.ones(7))).item() == 2 + 6


def test_model_without_a_gradient_is_refused() -> None:
    with pytest.raises(TargetError, match="no parameter that requires a gradient"):
        profile_training_step(nn.ReLU(), [torch.ones(B, D)])
    with pytest.raises(TargetError, match="no output of the model requires a gradient"):
        loss_of(torch.ones(2))


def test_loss_without_a_gradient_is_no_loss() -> None:
    logits = torch.ones(2, 3, requires_grad=True)
    assert loss_of({"loss": torch.tensor(5.0), "logits": logits}).item() == 2 * 3
