"""Readings of a meter on all ranks of a real process group."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from dispatch_flops import FlopMeter, Machine
from dispatch_flops.counting import meter_reading
from dispatch_flops.counting.meter_reading import MeterReading
from tests.helpers.clocks import Ticks
from tests.helpers.ranks import run_on_ranks

IN, OUT = 3, 5
TOY = Machine(name="toy", flops_per_s={"float32": 1e9}, source="made up")


def forward(rows: int) -> int:
    return 2 * rows * IN * OUT


def uneven_steps() -> Any:
    """Three steps on each rank: rank r has 2 + r rows, and its steps take 1 + 3 * r seconds."""
    rank = distributed.get_rank()
    model, rows = nn.Linear(IN, OUT, bias=False), 2 + rank
    ticks = itertools.count()
    meter = FlopMeter(model, machine=TOY, now=lambda: next(ticks) * (1.0 + 3 * rank))
    with torch.no_grad():
        for _ in range(3):
            with meter.step(samples=rows, tokens=10 * rows):
                model(torch.ones(rows, IN))
        if rank == 1:  # a step more, which rank 0 does not have
            with meter.step(samples=rows):
                model(torch.ones(rows, IN))
    own, run, window = meter.run, meter.run.over_ranks(), meter.window.over_ranks()
    return own, run, window


def shapes_of_their_own() -> Any:
    """Steps of a second and 2 rows; rank 1 counts three, because it meets a new shape in each."""
    rank, clock = distributed.get_rank(), Ticks()
    model = nn.Linear(IN, OUT, bias=False)
    meter, found = FlopMeter(model, machine=TOY, now=clock), []
    for rows in (2, 3, 4, 2, 2, 2) if rank else (2,) * 6:
        x = torch.ones(rows, IN)
        with torch.no_grad(), meter.step(tokens=rows, inputs=(x,)):
            model(x)
            clock.now += 1.0
        found.append(meter.run.over_ranks())
    return found


@pytest.mark.slow
def test_reading_over_ranks_sums_uneven_ranks(tmp_path: Path) -> None:
    ran = run_on_ranks(__file__, ["uneven_steps", "shapes_of_their_own"], 2, tmp_path)
    results = ran.of("uneven_steps")
    own: list[MeterReading] = [result[0] for result in results]
    assert [one.total_flops for one in own] == [3 * forward(2), 4 * forward(3)]
    for _, run, window in results:
        assert run.total_flops == window.total_flops == 3 * forward(2) + 4 * forward(3)
        assert run.samples == 3 * 2 + 4 * 3
        assert run.tokens == 10 * 3 * (2 + 3)
        assert (run.steps, run.timed_steps, run.devices) == (4, 3, 2)
        # The first step of each rank was counted. Rank 1 was the slowest, with three others.
        assert run.seconds == 3 * (1 + 3)
        timed = 3 * forward(2) + 3 * forward(3)  # rank 0 timed two, whose mean counts three times
        assert run.flops_per_s == pytest.approx(timed / run.seconds)
        assert run.tokens_per_s == pytest.approx(10 * (3 * 2 + 2 * 3) / run.seconds)
        assert run.mfu == pytest.approx(timed / (2 * run.seconds) / 1e9)
    for readings in ran.of("shapes_of_their_own"):
        for early in readings[:3]:  # rank 1 has timed no step yet
            assert early.flops_per_s is early.mfu is early.tokens_per_s is None
        for later in readings[3:]:
            assert later.flops_per_s == 2 * forward(2)
            assert later.tokens_per_s == 2 * 2
            assert later.mfu == pytest.approx(forward(2) / 1e9)
        assert readings[-1].total_flops == 10 * forward(2) + forward(3) + forward(4)
        assert (readings[-1].timed_steps, readings[-1].seconds) == (5, 5.0)


@pytest.mark.parametrize(("errors", "expected"), [((3.0, 4.0), 5.0), ((3.0, None), None)])
def test_errors_of_ranks_are_independent(
    errors: tuple[float | None, ...], expected: float | None
) -> None:
    readings = [MeterReading(is_estimate=True, standard_error=error) for error in errors]
    assert meter_reading._sum_of_ranks(readings).standard_error == expected
