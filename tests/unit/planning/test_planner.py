"""Plans of a small network whose memory, FLOPs and times are products of its sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import Machine, plan
from dispatch_flops.analysis.planned import Plan, PlannedStep
from dispatch_flops.errors import ConfigError, TargetError
from dispatch_flops.renderers import plan_table
from tests.helpers.profiling import TORCH

IN, OUT, F32 = 256, 384, 4  # multiples of the 512 bytes that blocks are rounded to
WEIGHT = IN * OUT
PEAK, BANDWIDTH = 1e9, 1e7
MACHINE = Machine(
    name="test", flops_per_s={"float32": PEAK}, bytes_per_s=BANDWIDTH, memory_bytes=10e6
)


def linear(batch: int, **_: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Linear(IN, OUT, bias=False), (torch.ones(batch, IN),)


def stack(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    layers = [
        nn.Sequential(nn.Linear(IN, IN), nn.Tanh(), nn.Linear(IN, IN), nn.Tanh()) for _ in range(5)
    ]
    return nn.Sequential(*layers), (torch.ones(batch, IN),)


def only(planned: Plan) -> PlannedStep:
    (step,) = planned.steps
    return step


def test_plan_of_a_step_has_the_memory_of_its_parts() -> None:
    step = only(plan(linear, MACHINE, sizes={"batch": 128}, optimizer="adamw", search_batch=False))
    held = step.memory_by_role
    assert held["parameters"] == held["gradients"] == WEIGHT * F32
    steps = 512 if TORCH < (2, 12) else 0  # 2.11 counts steps on the default device, in a block
    assert held["optimizer state"] == 2 * WEIGHT * F32 + steps
    assert step.peak_bytes == sum(held.values())
    assert step.fits and step.headroom_bytes == 10e6 - step.peak_bytes


def test_plan_without_an_optimizer_is_a_forward_pass() -> None:
    step = only(plan(linear, MACHINE, sizes={"batch": 3}, optimizer=None, search_batch=False))
    assert step.peak_bytes == (WEIGHT + 3 * IN + 3 * OUT) * F32
    assert step.profile.total().macs == 3 * WEIGHT
    assert not step.profile.total("backward").flops


def test_bounds_are_the_roofline_of_a_product() -> None:
    step = only(plan(linear, MACHINE, sizes={"batch": 3}, optimizer=None, search_batch=False))
    computing = 2 * 3 * WEIGHT / PEAK
    moving = F32 * (WEIGHT + 3 * IN + 3 * OUT) / BANDWIDTH
    bounds = step.bounds
    assert bounds.compute_s == pytest.approx(computing)
    assert bounds.fused_s == pytest.approx(computing)
    assert bounds.least_s == bounds.serial_s == pytest.approx(moving)
    assert bounds.bound == "memory"
    assert bounds.mfu_ceiling == (pytest.approx(computing / moving), pytest.approx(1.0))
    assert step.samples == 3 and step.tokens is None
    assert step.samples_per_s == (pytest.approx(3 / moving), pytest.approx(3 / computing))


@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_model_is_in_training_where_the_step_has_an_optimizer(optimizer: str | None) -> None:
    model = nn.Linear(IN, OUT, device="meta")
    model.register_forward_hook(lambda module, *_: modes.append(module.training))
    modes: list[bool] = []
    planned = plan(
        lambda: (model, (torch.ones(3, IN),)), MACHINE, optimizer=optimizer, search_batch=False,
        host_s_per_operator=2.5e-6,
    )  # fmt: skip
    assert set(modes) == {optimizer is not None}
    assert "adds the host's 2.5 us for each operator" in " ".join(planned.assumptions)
    said = any(text.startswith("sgd updates one parameter") for text in planned.assumptions)
    assert said is (optimizer is not None)


def test_host_cost_of_each_operator_widens_the_range() -> None:
    step = only(
        plan(
            linear, MACHINE, sizes={"batch": 3}, optimizer=None, search_batch=False,
            host_s_per_operator=7.0,
        )
    )  # fmt: skip
    assert step.bounds.operators == 1
    assert step.bounds.serial_s == pytest.approx(step.bounds.least_s + 7.0)


def test_largest_batch_is_the_last_one_that_fits() -> None:
    step = only(plan(linear, MACHINE, sizes={"batch": 5}, optimizer=None))
    fixed, each = WEIGHT * F32, (IN + OUT) * F32
    assert step.largest_batch == (10_000_000 - fixed) // each


def test_largest_batch_is_at_least_the_last_one_that_was_searched() -> None:
    machine = Machine(name="huge", memory_bytes=1e18)
    planned = plan(linear, machine, sizes={"batch": 5}, optimizer=None)
    assert only(planned).largest_batch == 2**20
    (row,) = (line for line in plan_table.render(planned).splitlines() if "largest batch" in line)
    assert row.split()[-2:] == [">=", str(2**20)]


def test_largest_batch_of_a_model_that_does_not_fit_is_0() -> None:
    machine = Machine(name="small", memory_bytes=float(WEIGHT * F32))
    step = only(plan(linear, machine, sizes={"batch": 2}, optimizer=None))
    assert step.largest_batch == 0 and step.fits is False
    assert step.bounds.least_s is None


def test_plan_takes_every_combination_of_sizes() -> None:
    planned = plan(linear, MACHINE, sizes={"batch": [1, 2], "other": [3, 4]}, search_batch=False)
    assert [dict(step.sizes) for step in planned.steps] == [
        {"batch": 1, "other": 3}, {"batch": 1, "other": 4},
        {"batch": 2, "other": 3}, {"batch": 2, "other": 4},
    ]  # fmt: skip


def test_checkpoint_recomputes_and_holds_fewer_activations() -> None:
    kept, recomputed = (
        only(plan(stack, MACHINE, sizes={"batch": 4096}, checkpoint=checkpoint, search_batch=False))
        for checkpoint in (False, True)
    )
    assert not kept.profile.total("recompute").flops
    assert recomputed.profile.total("recompute").flops > 0
    backward = [step.profile.memory.peak("backward") for step in (kept, recomputed)]
    assert backward[1].peak_bytes < backward[0].peak_bytes
    assert kept.profile.model_total() == recomputed.profile.model_total()


def test_dtype_halves_the_parameters() -> None:
    step = only(plan(linear, MACHINE, sizes={"batch": 1}, dtype=torch.bfloat16, search_batch=False))
    assert step.memory_by_role["parameters"] == 2 * WEIGHT


def test_value_that_the_model_reads_is_1() -> None:
    class Reading(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if (x == 0).all() else x

    step = only(
        plan(
            lambda batch: (Reading(IN, OUT, bias=False), (torch.ones(batch, IN),)),
            MACHINE, sizes={"batch": 3}, search_batch=False,
        )
    )  # fmt: skip
    assert step.profile.total("forward").macs == 3 * WEIGHT


def test_token_ids_give_tokens() -> None:
    def build(batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return nn.Embedding(11, 7), (torch.ones(batch, 13, dtype=torch.long),)

    step = only(plan(build, MACHINE, sizes={"batch": 2}, search_batch=False))
    assert (step.samples, step.tokens) == (2, 26)


@pytest.mark.parametrize(
    ("build", "options", "error", "message"),
    [
        (linear, {"machine": "abacus"}, ConfigError, "machine='abacus' is unknown"),
        (nn.Linear(7, 11), {}, ConfigError, "build is of type Linear; pass a function"),
        (linear, {"sizes": [3]}, ConfigError, "pass a dict of names and values"),
        (linear, {"dtype": "bf16"}, ConfigError, "dtype='bf16': pass a dtype of torch"),
        (linear, {"optimizer": "lion"}, ConfigError, "optimizer='lion': choose one of adamw"),
        (linear, {"optimizer": ["sgd"]}, ConfigError, r"optimizer=\['sgd'\]: choose one of"),
        (linear, {"host_s_per_operator": -1}, ConfigError, "=-1: pass seconds of 0 or more"),
        (linear, {"host_s_per_operator": "5us"}, ConfigError, "='5us': pass seconds of 0 or more"),
        (linear, {"sizes": {"batch": []}}, ConfigError, "at least one value"),
        (lambda batch: 3, {}, TargetError, "return a pair of the model and its inputs"),
        (linear, {"checkpoint": True}, TargetError, "no stack of equal layers"),
        (
            lambda batch: (nn.Identity(), (torch.ones(batch),)),
            {"optimizer": "sgd"},
            TargetError,
            "no parameter of the model requires a gradient; plan it without an optimizer",
        ),
        (
            lambda batch: (nn.Linear(7, 11).requires_grad_(False), (torch.ones(batch, 7),)),
            {"mesh": {"dp": 2}},
            TargetError,
            "no parameter of the model requires a gradient; plan it without an optimizer",
        ),
    ],
)
def test_plan_of_unusable_arguments_says_what_to_do(build, options, error, message: str) -> None:
    arguments = {"machine": MACHINE, "sizes": {"batch": 1}, "search_batch": False, **options}
    with pytest.raises(error, match=message):
        plan(build, **arguments)


@pytest.mark.parametrize("mesh", [None, {"dp": 2}])
def test_model_in_use_is_refused_and_not_changed(mesh: dict[str, int] | None) -> None:
    model = nn.Linear(3, 5).eval()
    before = model.weight.detach().clone()
    with pytest.raises(TargetError, match="parameter 'weight' is on cpu; make the model in build"):
        plan(lambda: (model, (torch.ones(2, 3, device="cpu"),)), MACHINE, mesh=mesh)
    assert not model.training
    assert torch.equal(model.weight, before)


class LossAndFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5, bias=False)
        self.features = nn.Linear(3, 7, bias=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(x).sum(1), "features": self.features(x)}


def test_backward_starts_at_the_loss_of_a_dict() -> None:
    step = only(plan(lambda: (LossAndFeatures(), (torch.ones(2, 3),)), MACHINE))
    assert step.profile.total("backward").macs == 2 * 3 * 5


def test_table_of_a_plan_has_a_column_for_each_choice_and_the_assumptions() -> None:
    planned = plan(linear, MACHINE, sizes={"batch": [5, 6]}, optimizer=None)
    text = plan_table.render(planned)
    assert "batch=5" in text and "batch=6" in text
    largest = (10_000_000 - WEIGHT * F32) // ((IN + OUT) * F32)
    row = next(line for line in text.splitlines() if line.startswith("largest batch that fits"))
    assert row.split()[-2:] == [str(largest)] * 2
    assert "Assumptions:" in text and "causal attention is counted in full" in text


def test_plan_says_which_figures_of_the_machine_are_missing() -> None:
    def told(machine: Machine, **options: Any) -> str:
        planned = plan(linear, machine, sizes={"batch": 3}, search_batch=False, **options)
        return " ".join(planned.assumptions)

    without_float32 = replace(MACHINE, flops_per_s={"bfloat16": PEAK})
    assert "no peak of test is known for float32" in told(without_float32)
    assert "no peak of test is known for float32" in told(without_float32, mesh={"dp": 2})
    assert "bandwidth (bytes_per_s) of test" in told(replace(MACHINE, bytes_per_s=None))
    assert "not known" not in told(MACHINE)
