"""Which steps a meter verifies, and what it reports and samples where costs vary."""

from __future__ import annotations

import math
import random
import statistics
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopMeter
from dispatch_flops.errors import ConfigError
from dispatch_flops.profilers.step_schedule import next_verified

B, IN, OUT = 2, 3, 7
CALL = 2 * B * IN * OUT


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(IN, OUT, bias=False)


class Routed(nn.Module):
    """Mixture of experts whose routing follows the data: all rows of a batch go to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(IN, 1, bias=False)
        self.large = nn.Linear(IN, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.large(x) if bool(x[0, 0] > 0) else self.small(x)


def test_routing_by_data_is_reported_once_and_sampled() -> None:
    """Steps 1 to 10 go to the large expert, 11 to 20 to the small one, and so on."""
    model = Routed()
    meter = FlopMeter(model, verify_every=10)
    goes_to_large = [step % 20 < 10 for step in range(100)]
    with torch.no_grad(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for is_large in goes_to_large:
            with meter.step():
                model(torch.full((B, IN), 1.0 if is_large else -1.0))
    assert {one.filename for one in found} == {__file__}
    texts = [
        str(one.message)
        for one in found
        if "same" in str(one.message) or "cost" in str(one.message)
    ]
    verified = {step for step in range(2, 21) if next_verified(step, 10, varies=False) == step}
    first = min(step for step in verified if step > 10)
    assert len(texts) == 1
    assert texts[0].startswith(
        f"step {first} has the signature of an earlier step and another cost"
    )
    assert meter.is_estimate
    costs = [2 * B * IN * (OUT if is_large else 1) + 1 for is_large in goes_to_large]
    sample = costs[first:]  # 10 times as often as every 10 steps
    counted = [costs[step - 1] for step in (1, *verified) if step <= first] + sample
    others = 100 - len(counted)
    assert meter.total_flops == sum(counted) + sum(sample) * others // len(sample)
    # The sum of the others differs from its expectation, and so does the mean of the sample.
    deviation, error = statistics.stdev(sample), meter.run.standard_error
    assert error == pytest.approx(deviation * math.sqrt(others + others**2 / len(sample)))
    assert f" {meter.total_flops} FLOPs ± {100 * error / meter.total_flops:.2f}%" in repr(meter)
    assert meter.window.standard_error == pytest.approx(error)
    assert meter.last_step.standard_error == 0  # it was counted


def test_run_whose_steps_are_all_counted_is_exact_where_the_cost_varies() -> None:
    model, expected = Routed(), 0
    meter = FlopMeter(model, verify_every=1, window=7)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is an estimate
        for step in range(20):
            is_large = step % 3 == 0
            with meter.step():
                model(torch.full((B, IN), 1.0 if is_large else -1.0))
            cost = 2 * B * IN * (OUT if is_large else 1) + 1
            expected += cost
            assert meter.last_step.total_flops == cost
            assert meter.total_flops == expected
    assert not meter.is_estimate
    # Of the last seven, 13 to 19, steps 15 and 18 are large.
    assert meter.window.total_flops == 7 * (2 * B * IN + 1) + 2 * 2 * B * IN * (OUT - 1)
    with pytest.warns(UserWarning, match="step 4 has the signature") as found:
        meter.verify_every = 0
        meter.verify_every = 3
    assert [one.filename for one in found] == [__file__]


def test_verified_step_that_costs_the_same_is_not_reported(model: nn.Module) -> None:
    meter = FlopMeter(model, verify_every=4)
    for _ in range(12):
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
    assert not meter.is_estimate
    assert meter.total_flops == 12 * CALL
    counted = {1, *(step for step in range(1, 13) if next_verified(step, 4, varies=False) == step)}
    assert {4, 8, 12} <= counted
    assert meter.run.timed_steps == 12 - len(counted)


RANDOM_STEPS = {865, 1138}  # of the first and the second 1,000
DIVISIBLE = (12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840)  # have many divisors
EARLY = tuple(sorted({*DIVISIBLE, *(number + 1 for number in DIVISIBLE)}))


def test_documents_name_the_early_steps() -> None:
    listed = f"{', '.join(map(str, DIVISIBLE))}, and the one after each"
    assert listed in " ".join(str(FlopMeter.__doc__).split())
    cookbook = Path(__file__).parents[3] / "benchmarks" / "cookbook.md"
    assert len(DIVISIBLE) == 11
    told = f"before that eleven early pairs are, from {EARLY[0]} and 13 to {EARLY[-2]} and 841"
    assert told in " ".join(cookbook.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("steps", "verified"),
    [
        (11, set()),
        (12, {12}),
        (120, {*EARLY[:11]}),
        (840, {*EARLY[:-1]}),
        (2000, {*EARLY, 1000, 2000, *RANDOM_STEPS}),
    ],
)
def test_run_that_is_short_is_verified_too(
    model: nn.Module, steps: int, verified: set[int]
) -> None:
    meter, counted = FlopMeter(model), set()
    with torch.no_grad():
        for step in range(1, steps + 1):
            with meter.step():
                model(torch.ones(B, IN))
            if not meter.last_step.timed_steps:
                counted.add(step)
    assert counted == {1, *verified}
    assert meter.total_flops == steps * CALL


def test_each_stretch_has_one_random_step() -> None:
    regular = {*range(20, 2001, 20), 12}
    verified = [step for step in range(1, 2001) if next_verified(step, 20, varies=False) == step]
    drawn = [step for step in range(1, 2001) if next_verified(step, 200, varies=True) == step]
    assert {*verified} >= regular
    assert len({(step - 1) // 20 for step in drawn}) == len(drawn) == 100
    assert {*verified} == regular | {*drawn}
    assert not any(
        next_verified(step, 0, varies=varies) == step for step in drawn for varies in (False, True)
    )


def test_verify_every_acts_at_once_where_it_is_changed(model: nn.Module) -> None:
    meter = FlopMeter(model, verify_every=0)
    counted = []
    for step in range(1, 12):
        if step == 5:
            meter.verify_every = 1
        if step == 8:
            meter.verify_every = 0
        before = meter.run.timed_steps
        with meter.step():
            model(torch.ones(B, IN))
        if meter.run.timed_steps == before:
            counted.append(step)
    assert counted == [1, 5, 6, 7]
    with pytest.raises(ConfigError, match="verify_every=-1"):
        meter.verify_every = -1


def test_random_steps_leave_the_program_its_random_numbers(model: nn.Module) -> None:
    random.seed(7)
    expected = [random.random() for _ in range(9)]
    random.seed(7)
    meter, found = FlopMeter(model, verify_every=3), []
    for _ in range(9):
        with meter.step(), torch.no_grad():
            model(torch.ones(B, IN))
            found.append(random.random())
    assert found == expected


@pytest.mark.parametrize("every", [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 30, 120])
@pytest.mark.parametrize("first", [0, 1])
def test_work_of_every_kth_step_is_found(model: nn.Module, every: int, first: int) -> None:
    """first: the program's number of its first step."""
    meter, average = FlopMeter(model), torch.ones(OUT)
    with warnings.catch_warnings(record=True) as found, torch.no_grad():
        warnings.simplefilter("always")
        for step in range(first, 841):
            with meter.step():
                model(torch.ones(B, IN))
                if step % every == 0:
                    average.exp()
    assert "another cost" in str(found[0].message)
    assert meter.is_estimate


def test_estimate_is_not_biased_by_a_period(model: nn.Module) -> None:
    """The sample is one of 2 steps at random: 1,000 of 2,000, of which one in 10 costs more."""
    meter, extra = FlopMeter(model, verify_every=20), torch.ones(100 * CALL)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for step in range(1, 2001):
            with meter.step():
                model(torch.ones(B, IN))
                if step % 10 == 0:
                    extra + extra
    assert meter.is_estimate
    # The share of a sample of n has a standard deviation of sqrt(0.1 x 0.9 / n), 0.95 %. That of as
    # many others has, too, and half of the steps are others. The deviation that the sample has is
    # itself off by 4 %, (1 - 2 x 0.1) / (2 x sqrt(0.1 x 0.9 x n)), in two of three cases.
    expected = 2000 * 100 * CALL * 0.0095 * math.sqrt(2) / 2
    assert meter.run.standard_error == pytest.approx(expected, rel=0.1)
    assert abs(meter.total_flops / (2000 * CALL) - (1 + 0.1 * 100)) < 3 * 0.0095 * 100


def test_resumed_run_is_verified_at_the_steps_of_the_whole_run(model: nn.Module) -> None:
    def counted(meter: FlopMeter, steps: range) -> set[int]:
        found = set()
        for step in steps:
            with meter.step(), torch.no_grad():
                model(torch.ones(B, IN))
            if not meter.last_step.timed_steps:
                found.add(step)
        return found

    meter, resumed = FlopMeter(model, verify_every=50), FlopMeter(model, verify_every=50)
    first = counted(meter, range(1, 131))
    resumed.load_state_dict(meter.state_dict())
    assert counted(resumed, range(131, 301)) == counted(meter, range(131, 301)) | {131}
    # the first, 50 and 100, three at random, and steps 12 to 49, among which is one of the three
    assert len(first) == 1 + 2 + 3 + len(EARLY[:8]) - 1


@pytest.mark.parametrize("again", [None, 13, 14, 21])
def test_first_step_that_costs_more_is_counted_apart(model: nn.Module, again: int | None) -> None:
    """As one that fills a cache: step 12 costs less, and nine more tell that the first was special.

    If the work comes again in one of them, data may decide, and the cost varies.
    """
    meter = FlopMeter(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(1, 31):
            with meter.step():
                out = model(torch.ones(B, IN))
                if step in (1, again):
                    out.exp()
            assert meter.steps_done == step
            assert meter.is_estimate == (step in range(12, 21) or (step > 20 and again is not None))
    assert [str(one.message)[:8] for one in found] == ([f"step {again} "] if again else [])
    if again is None:
        assert meter.total_flops == 30 * CALL + B * OUT
        assert meter.window.total_flops == meter.total_flops
        assert meter.last_step.total_flops == CALL


def test_lengths_of_sequences_are_data_that_decide_the_cost() -> None:
    """Steps 1, 12 and 13 alone do not tell: the last two have the same number of rows."""

    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(IN, OUT, bias=False, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            return self.rnn(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))

    model = Packing()
    meter = FlopMeter(model)
    with torch.no_grad(), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for step in range(1, 21):
            lengths = torch.tensor([3, 1] if step % 5 == 1 else [3, 2])
            with meter.step():
                model(torch.ones(B, 3, IN), lengths)
    assert "step 16 has the signature of an earlier step" in str(found[0].message)
    assert meter.is_estimate


def test_work_before_the_first_step_of_each_shape_is_counted_apart() -> None:
    """A table that grows with the longest input so far."""

    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(IN, OUT, bias=False)
            self.table = torch.ones(0)

        def forward(self, x: torch.Tensor) -> Any:
            if len(self.table) < len(x):
                self.table = torch.ones(len(x)).exp()
            return self.linear(x)

    meter, rows = FlopMeter(Growing(), verify_every=5), (5, 11)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(80):
            with meter.step():
                meter._model(torch.ones(rows[step % 2], IN))
    assert not meter.is_estimate
    assert meter.total_flops == 40 * 2 * (5 + 11) * IN * OUT + 5 + 11
