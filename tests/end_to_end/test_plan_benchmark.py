"""The run of ``benchmarks.plan``: turns, least times and best readings."""

from __future__ import annotations

from itertools import count

import pytest

from benchmarks.plan import LEAST_ROUNDS, MODELS, best_of, measure
from dispatch_flops import Machine


def reading(peak: float, bandwidth: float, product: float) -> Machine:
    return Machine(
        name="cpu", flops_per_s={"float32": peak}, bytes_per_s=bandwidth,
        kernel_flops_per_s={"product": {"float32": product}}, source="me",
    )  # fmt: skip


def test_steps_take_turns_in_both_directions_with_a_reading_in_each_round() -> None:
    ran: list[str] = []
    steps = {name: lambda name=name: ran.append(name) for name in "abc"}

    def read() -> Machine:
        ran.append("|")
        return reading(1.0, 1.0, 1.0)

    measured = measure(steps, read, 0.0)
    assert "".join(ran).split("|")[1:] == ["abc", "cba"] * (LEAST_ROUNDS // 2) + ["abc"]
    assert measured.rounds == LEAST_ROUNDS


def test_measured_time_is_the_least_and_the_median_shows_other_load() -> None:
    now = 0.0
    durations = iter([5.0, 3.0, 2.0, 7.0, 4.0])

    def step() -> None:
        nonlocal now
        now += next(durations)

    measured = measure({"a": step}, lambda: reading(1.0, 1.0, 1.0), 0.0, clock=lambda: now)
    assert measured.least_s("a") == 2.0
    assert measured.unrest("a") == pytest.approx(4.0 / 2.0)


def test_rounds_go_on_until_the_time_is_over() -> None:
    ticks = count()
    measured = measure(
        {"a": lambda: None}, lambda: reading(1.0, 1.0, 1.0), 60.0, clock=lambda: float(next(ticks))
    )
    # Five rounds of two ticks after the first, and a third tick in each round up to the 60th.
    assert measured.rounds == LEAST_ROUNDS + 17


def test_best_of_takes_the_highest_of_each_peak() -> None:
    best = best_of([reading(3.0, 5.0, 7.0), reading(4.0, 2.0, 8.0)])
    assert (best.flops_per_s, best.bytes_per_s) == ({"float32": 4.0}, 5.0)
    assert best.kernel_flops_per_s == {"product": {"float32": 8.0}}


def test_a_dozen_models_are_measured() -> None:
    assert len(MODELS) == 12
