"""The counter changes no result of torch's operator and module databases and knows every operator.

One sample in eight of every case by default, at most 16; all of them with ``--whole``.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.end_to_end.sweep.opdb import (
    Case,
    Outcome,
    cases_by_name,
    compare_devices,
    examine,
    observe,
)
from tests.end_to_end.sweep.sampling import EIGHTH
from tests.helpers.profiling import TORCH
from tests.helpers.untouched import EmptyMode

pytestmark = pytest.mark.slow

CASES = cases_by_name()
each_operator = pytest.mark.parametrize(
    "cases", CASES.values(), ids=[f"{kind}-{name}" for kind, name in CASES]
)


@pytest.fixture
def every(request: pytest.FixtureRequest) -> int:
    """One sample in how many runs."""
    return 1 if request.config.getoption("--whole") else EIGHTH


@each_operator
def test_operator_under_the_counter_gives_the_same_bits(cases: list[Case], every: int) -> None:
    """Same bits, exceptions and random state as under an empty mode or none; nothing unknown."""
    for case in cases:
        report = examine(case, every=every)
        assert not report.changed
        assert not report.errors
        assert not report.unknown


@each_operator
def test_operator_on_meta_and_in_inference_mode_counts_the_same(
    cases: list[Case], every: int
) -> None:
    """Counts depend on shapes, not on the device or the grad mode."""
    if TORCH < (2, 13) and cases[0].name in ("quantile", "nanquantile"):
        pytest.skip("this torch compares q with 0 and 1, where there is data")
    for case in cases:
        if case.kind == "op" and case.variant == "function" and case.dtype == torch.float32:
            assert not compare_devices(case, every=every).changed


def test_databases_hold_the_operators_that_matter_most() -> None:
    assert len(CASES) > 700
    for name in ("addmm", "nn_functional_conv2d", "linalg_svd", "fft_fft", "softmax"):
        assert ("op", name) in CASES
    assert ("module", "nn.TransformerEncoderLayer") in CASES


class NextAfter(TorchDispatchMode):
    """A mode that changes products by their last bit."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        return torch.nextafter(out, out + 1) if func is torch.ops.aten.mul.Tensor else out


def test_observe_sees_a_changed_bit_and_the_type_of_an_error() -> None:
    def program() -> torch.Tensor:
        return torch.ones(3) * torch.ones(3)

    def failing() -> torch.Tensor:
        raise ValueError

    assert observe(program, EmptyMode)[0] == observe(program, EmptyMode)[0]
    assert observe(program, EmptyMode)[0] != observe(program, NextAfter)[0]
    assert observe(failing, EmptyMode)[0] == Outcome(error="ValueError")


def test_observe_sees_a_consumed_random_number() -> None:
    """A program that draws one more number leaves another random state."""
    quiet, _ = observe(lambda: torch.ones(1), EmptyMode)
    drawing, _ = observe(lambda: (torch.rand(1), torch.ones(1))[1], EmptyMode)
    assert quiet != drawing
