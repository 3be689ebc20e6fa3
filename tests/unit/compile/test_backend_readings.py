"""Readings of a counting backend, compared to products of sizes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopMeter, Machine, overridden
from dispatch_flops.compile import CountingBackend, counting_backend
from dispatch_flops.errors import ConfigError, UncountedWarning

pytestmark = pytest.mark.slow

IN, OUT = 5, 7
TOY = Machine(name="toy", flops_per_s={"float32": 1e9}, source="made up")


def forward(rows: int) -> int:
    return 2 * rows * IN * OUT


def make(**options: Any) -> tuple[CountingBackend, Any]:
    """Return a backend whose steps take 1, 2, 3, ... seconds, and a compiled model."""
    model = nn.Linear(IN, OUT, bias=False)
    backend = counting_backend("aot_eager", model, machine=TOY, **options)
    times = iter(step * (step + 1) / 2 for step in range(1, 100))
    backend._now = lambda: next(times)  # type: ignore[method-assign]
    backend._last_step_s = 0.0
    return backend, torch.compile(model, backend=backend, dynamic=False)


def run(backend: CountingBackend, compiled: Any, rows: list[int], runs: int = 1) -> None:
    with torch.no_grad():
        for count in rows:
            for _ in range(runs):
                compiled(torch.ones(count, IN))
            backend.step(samples=runs * count, tokens=10 * runs * count)


def test_readings_are_of_the_last_step_a_window_and_the_run() -> None:
    """Steps 1 and 3 compile: rates are of the others."""
    backend, compiled = make(window=2)
    assert backend.run.flops_per_s is backend.mfu is backend.tokens_per_s is None
    run(backend, compiled, [2, 2, 11, 2, 11], runs=3)
    assert backend.steps_done == 5
    assert backend.total_flops == backend.model_flops == 3 * forward(3 * 2 + 2 * 11)
    assert backend.total_flops == backend.total().flops
    assert backend.last_step.total_flops == 3 * forward(11)
    assert backend.last_step.flops_per_s == 3 * forward(11) / 5
    assert backend.window.total_flops == 3 * forward(2 + 11)
    assert backend.window.tokens_per_s == 30 * (2 + 11) / (4 + 5)
    assert backend.run.timed_steps == 3
    assert backend.run.samples == 3 * (3 * 2 + 2 * 11)
    assert backend.flops_per_s == 3 * forward(2 + 2 + 11) / (2 + 4 + 5)
    assert backend.mfu == backend.hfu == pytest.approx(3 * forward(2 + 2 + 11) / 11 / 1e9)
    assert backend.run.costs["forward"].macs == backend.total().macs
    assert not backend.is_estimate
    assert repr(backend).startswith(
        f"<CountingBackend of 2 graphs: 5 steps, {backend.total_flops} FLOPs, "
    )


def test_phases_of_a_training_step_are_told_apart() -> None:
    backend, compiled = make()
    for _ in range(2):
        compiled(torch.ones(3, IN)).sum().backward()
        step = backend.step()
    costs = backend.last_step.costs
    assert costs["forward"].macs == costs["backward"].macs == 3 * IN * OUT
    assert {phase: costs[phase] for phase in step.costs} == step.costs


def test_resumed_run_continues_the_totals() -> None:
    backend, compiled = make()
    run(backend, compiled, [2, 2, 11])
    saved = json.loads(json.dumps(backend.state_dict()))
    resumed, compiled = make()
    resumed.load_state_dict(saved)
    assert resumed.run == backend.run
    run(resumed, compiled, [2, 2])
    assert resumed.total_flops == forward(5 * 2 - 2 + 11)
    assert (resumed.steps_done, resumed.run.timed_steps) == (5, 2)


def test_step_has_the_cost_by_the_formulas_that_apply_when_it_ends() -> None:
    backend, compiled = make()
    found = []
    run(backend, compiled, [2])
    with overridden({torch.ops.aten.mm: lambda *args, out, **_: 17 * out.numel()}):
        run(backend, compiled, [2])
        found.append(backend.last_step.total_flops)
        assert backend.total().flops == 2 * 17 * 2 * OUT
    run(backend, compiled, [2])
    found.append(backend.last_step.total_flops)
    assert found == [17 * 2 * OUT, forward(2)]
    assert backend.total_flops == 2 * forward(2) + 17 * 2 * OUT
    assert backend.total().flops == 3 * forward(2)


def test_operator_without_a_cost_makes_readings_lower_bounds() -> None:
    backend = counting_backend("aot_eager")

    @torch.compile(backend=backend)
    def product(x: torch.Tensor) -> torch.Tensor:
        return torch._dynamo.disable(lambda t: t @ t)(x @ x)

    for _ in range(2):
        product(torch.ones(3, 3))
        with pytest.warns(UncountedWarning) if not backend.steps_done else torch.no_grad():
            step = backend.step()
    assert backend.last_step.uncounted == step.uncounted
    assert set(backend.run.uncounted.values()) == {2}
    assert backend.run.is_lower_bound
    assert backend.total_flops == 2 * 2 * 3 * 3 * 3


def test_interface_is_that_of_the_meter() -> None:
    meter = FlopMeter(nn.Linear(IN, OUT))
    backend, _ = make()
    names = {name for name in dir(meter) if not name.startswith("_")}
    only_of_the_meter = {"start", "stop", "note_batch", "note_size", "verify_every", "is_timed"}
    assert names - only_of_the_meter <= set(dir(backend))


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="window=0"):
        counting_backend("aot_eager", window=0)
    with pytest.raises(ConfigError, match="tokens=-3"):
        make()[0].step(tokens=-3)
