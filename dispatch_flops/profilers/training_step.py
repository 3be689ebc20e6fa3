"""Profile one training step of a model: forward, loss, backward and the optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from dispatch_flops import _torch
from dispatch_flops.errors import TargetError
from dispatch_flops.profile import Profile, StepTiming
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.inputs import bind_inputs, loss_in, requiring_gradient
from dispatch_flops.profilers.isolation import isolated
from dispatch_flops.profilers.model import UNTIMED
from dispatch_flops.timing.devices import Devices
from dispatch_flops.timing.latencies import time_calls

OptimizerName = Literal["adamw", "adam", "sgd"]
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}
WHOLE_STEPS = "whole steps without the dispatch mode"


def profile_training_step(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: OptimizerName = "sgd",
    mode: str = "forward",
    device: str | None = None,
    warm_up: int = 1,
    repeats: int = 1,
    notify: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> Profile:
    """Return the profile of a training step, in training mode and with a new optimizer.

        profile_training_step(torch.nn.Linear(3, 5), [torch.ones(2, 3)], optimizer="adamw")

    The loss is the output's ``loss`` if it has one, else the sum of all outputs. The step sets
    the gradients to zero, and runs forward, loss, backward and the optimizer. Steps change the
    parameters. Each has run once before it is timed or counted, so that the optimizer has its
    state.

    model, args, kwargs, mode, device, warm_up, repeats: see ``profile_model``.
    notify: is told what runs next. options: further ones of ``FlopCounterMode``.

    The latency is that of the whole step. Raises TargetError if the loss does not depend on a
    parameter.
    """
    with isolated(model, on_meta=device == "meta"):
        model.train()
        # With backward, so that the step's own ends at the inputs.
        calls = bind_inputs(model, None, args, kwargs, mode=mode, backward=True, device=device)
        devices = Devices.at("meta") if device == "meta" else Devices.of(model.modules())
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise TargetError("--train: the model has no parameter that requires a gradient")
        is_as_on_cuda = device == "meta" and options.get("target") == "cuda"
        steps = make_optimizer(optimizer, trained, as_on_cuda=is_as_on_cuda)

        def run_step() -> None:
            steps.zero_grad()
            loss_of(calls.forward()).backward()
            steps.step()

        for number in range(max(warm_up, 1)):
            notify(f"warm-up step {number + 1} of {max(warm_up, 1)}")
            run_step()
        timing = UNTIMED
        if devices.computes:
            notify(f"timing {repeats} steps" if repeats > 1 else "timing a step")
            seconds, spread_s = time_calls(run_step, repeats, devices.clock())
            timing = StepTiming(
                iteration_s=seconds, spread_s=spread_s, repeats=repeats, method=WHOLE_STEPS
            )
        notify("counting a step")
        counter = FlopCounterMode(model, display=False, **options)
        with counter:
            run_step()
    profile = counter.profile
    run = dataclasses.replace(
        profile.run, device=devices.type, device_name=devices.name, **calls.facts
    )
    return dataclasses.replace(profile, run=run, timing=timing)


def make_optimizer(
    name: str, params: Sequence[nn.Parameter], *, as_on_cuda: bool
) -> torch.optim.Optimizer:
    """Return an optimizer of torch with its defaults.

    name: of those in ``OPTIMIZERS``.
    as_on_cuda: its steps are over lists of tensors on every device, as torch's default is on CUDA.
        Lists of DTensors and others are not possible there, either. Parameters of a class of the
        program's own are taken one at a time.
    """
    is_of_one_class = len(set(map(type, params))) == 1
    is_over_lists = as_on_cuda and is_of_one_class and _torch.are_taken_in_lists(params)
    return OPTIMIZERS[name](params, lr=1e-3, foreach=True if is_over_lists else None)


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss that a model's output holds, else the sum of its outputs.

    Raises TargetError if no output requires a gradient.
    """
    loss = loss_in(output)
    if loss is not None:
        return loss.sum()
    sums = [tensor.sum() for tensor in requiring_gradient(output, "omit --train")]
    whole = sums[0]
    for part in sums[1:]:
        whole = whole + part
    return whole
