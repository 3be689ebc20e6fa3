"""The counter leaves torch's own operator and module databases as they are, and knows them all.

A few samples of every case by default, all of them with ``--whole-sweep``.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.end_to_end.sweep.opdb import (
    Case,
    EmptyMode,
    Outcome,
    all_cases,
    compare_places,
    examine,
    observe,
)
from tests.helpers.profiling import TORCH

SAMPLES = 2
SHARE = 0.5  # of the other dtypes and variants


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "operator" in metafunc.fixturenames:
        names = sorted({(case.kind, case.name) for case in all_cases()})
        metafunc.parametrize("operator", names, ids=[f"{kind}-{name}" for kind, name in names])


@pytest.fixture(scope="module")
def cases() -> dict[tuple[str, str], list[Case]]:
    found: dict[tuple[str, str], list[Case]] = {}
    for case in all_cases():
        found.setdefault((case.kind, case.name), []).append(case)
    return found


def test_operator(
    operator: tuple[str, str],
    cases: dict[tuple[str, str], list[Case]],
    request: pytest.FixtureRequest,
) -> None:
    """Same bits, same exceptions, same random state as under an empty mode; nothing unknown."""
    whole = request.config.getoption("--whole-sweep")
    at_most = None if whole else SAMPLES
    for case in cases[operator]:
        usual = case.dtype == torch.float32 and case.variant in ("function", "train")
        if not (whole or usual or case.in_share(SHARE)):
            continue
        report = examine(case, at_most=at_most)
        assert not report.changed
        assert not report.errors
        assert not report.unknown


def test_counts_on_meta_and_in_inference_mode(
    operator: tuple[str, str],
    cases: dict[tuple[str, str], list[Case]],
    request: pytest.FixtureRequest,
) -> None:
    """Shapes decide: neither memory nor the kind of grad mode does."""
    if TORCH < (2, 13) and operator[1] in ("quantile", "nanquantile"):
        pytest.skip("where there is data, this torch compares q with 0 and 1 besides")
    at_most = None if request.config.getoption("--whole-sweep") else 1
    for case in cases[operator]:
        if case.kind == "op" and case.variant == "function" and case.dtype == torch.float32:
            assert not compare_places(case, at_most=at_most).changed


def test_there_are_cases(cases: dict[tuple[str, str], list[Case]]) -> None:
    """The databases are there, with the operators that matter most."""
    assert len(cases) > 700
    for name in ("addmm", "nn_functional_conv2d", "linalg_svd", "fft_fft", "softmax"):
        assert ("op", name) in cases
    assert ("module", "nn.TransformerEncoderLayer") in cases


class Off(TorchDispatchMode):
    """A mode that does change results: by the last bit."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        return torch.nextafter(out, out + 1) if func is torch.ops.aten.mul.Tensor else out


def test_a_changed_bit_is_seen() -> None:
    """The comparison is of bits, and of errors by type."""

    def program() -> torch.Tensor:
        return torch.ones(3) * torch.ones(3)

    def failing() -> torch.Tensor:
        raise ValueError

    assert observe(program, EmptyMode)[0] == observe(program, EmptyMode)[0]
    assert observe(program, EmptyMode)[0] != observe(program, Off)[0]
    assert observe(failing, EmptyMode)[0] == Outcome(error="ValueError")


def test_consumed_random_numbers_are_seen() -> None:
    """A program that draws one number more leaves another random state."""
    quiet, _ = observe(lambda: torch.ones(1), EmptyMode)
    drawing, _ = observe(lambda: (torch.rand(1), torch.ones(1))[1], EmptyMode)
    assert quiet != drawing
