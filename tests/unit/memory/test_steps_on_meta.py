"""Steps of optimizers on the meta device that are to be as on CUDA: over lists of tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode
from dispatch_flops.planning.training_step import count_step
from dispatch_flops.profile import MemoryProfile
from dispatch_flops.profilers.training_step import profile_training_step

LAYERS, WIDTH = 5, 64
LAYER = WIDTH * WIDTH * 4  # a multiple of 512, to which plans round
Optimizer = type[torch.optim.Optimizer]


def model_on(device: str) -> nn.Module:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(LAYERS))
    return nn.Sequential(*layers)


def memory_of_step(cls: Optimizer, device: str, target: Any, **options: Any) -> MemoryProfile:
    model = model_on(device)
    optimizer = cls(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    x = torch.ones(1, WIDTH, device=device)
    with FlopCounterMode(model, display=False, memory=True, target=target) as counter:
        model(x).sum().backward()
        optimizer.step()
    assert counter.profile.memory is not None
    return counter.profile.memory


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.SGD, {"weight_decay": 0.1}),
        (torch.optim.SGD, {"maximize": True}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ],
)
def test_step_over_single_tensors_is_approximate_for_target_cuda(
    cls: Optimizer, options: dict[str, Any]
) -> None:
    found = memory_of_step(cls, "meta", "cuda", **options)
    assert found.decomposed == (f"{cls.__name__}.step",)
    in_lists = memory_of_step(cls, "meta", "cuda", foreach=True, **options)
    assert found.peak_bytes != in_lists.peak_bytes


@pytest.mark.parametrize("options", [{}, {"momentum": 0.9}], ids=str)
def test_step_that_works_in_place_takes_as_much_in_lists_of_tensors(
    options: dict[str, Any],
) -> None:
    """Parameters, gradients and the momentum; the inputs, results and their gradients are gone."""
    found = memory_of_step(torch.optim.SGD, "meta", "cuda", **options)
    in_lists = memory_of_step(torch.optim.SGD, "meta", "cuda", foreach=True, **options)
    assert found.decomposed == ()
    held = (2 + len(options)) * LAYERS * LAYER
    assert found.by_role("optimizer") == in_lists.by_role("optimizer")
    assert sum(found.by_role("optimizer").values()) == held + WIDTH * 4  # and the input


@pytest.mark.parametrize(
    ("device", "target", "options"),
    [
        ("meta", "cpu", {}),
        ("cpu", "cuda", {}),
        ("meta", "cuda", {"foreach": True}),
        ("meta", "cuda", {"foreach": False}),  # so it will be on CUDA
    ],
)
def test_other_steps_are_exact(device: str, target: Any, options: dict[str, Any]) -> None:
    assert memory_of_step(torch.optim.AdamW, device, target, **options).decomposed == ()


def test_step_over_fake_tensors_is_exact_if_it_is_fused() -> None:
    with FakeTensorMode():
        found = [
            memory_of_step(torch.optim.AdamW, "cpu", "cuda", **options).decomposed
            for options in ({}, {"fused": True})
        ]
    assert found == [("AdamW.step",), ()]


def test_step_is_exact_if_it_is_differentiable() -> None:
    """It takes one tensor at a time on CUDA, too."""
    weights = [torch.ones(WIDTH, device="meta", requires_grad=True).clone() for _ in range(2)]
    for weight in weights:
        weight.retain_grad()
        weight.grad = torch.ones(WIDTH, device="meta")
    optimizer = torch.optim.SGD(weights, weight_decay=0.1, differentiable=True)
    with FlopCounterMode(display=False, memory=True, target="cuda") as counter:
        optimizer.step()
    assert counter.profile.memory is not None
    assert counter.profile.memory.decomposed == ()


def test_step_over_one_parameter_is_exact() -> None:
    assert decomposed_by_step(nn.Linear(WIDTH, WIDTH, bias=False, device="meta")) == ()


def decomposed_by_step(model: nn.Module) -> tuple[str, ...]:
    optimizer = torch.optim.AdamW(model.parameters())
    with FlopCounterMode(model, display=False, memory=True, target="cuda") as counter:
        model(torch.ones(1, WIDTH, device="meta")).sum().backward()
        optimizer.step()
    assert counter.profile.memory is not None
    return counter.profile.memory.decomposed


def test_plan_of_a_step_on_cuda_takes_all_tensors_at_once() -> None:
    """Parameters, gradients, two moments, and the square roots of all second moments."""
    x = torch.ones(1, WIDTH, device="meta")
    step = count_step(
        model_on("meta"), (x,), {}, optimizer="adamw", causal="full", target="cuda"
    ).memory
    assert step is not None and not step.is_approximate
    assert step.devices[0].peak_bytes == (4 + 1) * LAYERS * LAYER + 512  # and the input


def test_training_step_on_meta_for_cuda_takes_all_tensors_at_once() -> None:
    x = torch.ones(1, WIDTH)
    memory = profile_training_step(
        model_on("meta"), [x], optimizer="adamw", device="meta", target="cuda", memory=True
    ).memory
    assert memory is not None and not memory.is_approximate
    assert memory.devices[0].peak_bytes == (4 + 1) * LAYERS * LAYER + WIDTH * 4


class Parameter(nn.Parameter):
    """Of a class that torch's optimizers take one at a time on CUDA, too."""


def model_of_own_parameters() -> nn.Module:
    model = model_on("meta")
    for layer in model.children():
        layer.weight = Parameter(torch.ones(WIDTH, WIDTH, device="meta"))
    return model


def test_parameters_of_an_own_class_are_taken_one_at_a_time_as_on_cuda() -> None:
    x = torch.ones(1, WIDTH, device="meta")
    made = [
        count_step(
            model_of_own_parameters(), (x,), {}, optimizer="adamw", causal="full", target=target
        ).memory
        for target in ("cpu", "cuda")
    ]  # fmt: skip
    on_cpu, on_cuda = made
    assert on_cpu is not None and on_cuda is not None
    assert on_cuda.devices[0].peak_bytes == on_cpu.devices[0].peak_bytes
    assert on_cuda.decomposed == ()


def test_step_over_parameters_of_an_own_class_is_exact() -> None:
    assert decomposed_by_step(model_of_own_parameters()) == ()
