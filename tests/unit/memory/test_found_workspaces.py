"""Kernels without a registered workspace, against the events of torch's allocator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch

from dispatch_flops import FlopCounterMode, _torch
from dispatch_flops.counting.plans import SHARED_PLANS
from dispatch_flops.memory import found_workspaces, kernel_allocations
from dispatch_flops.profile import MemoryProfile
from tests.helpers.allocator import allocations

ROWS, COLUMNS = 67, 31
ELEMENTS = ROWS * COLUMNS
NUMBERS = 16  # bytes of the numbers that a kernel makes tensors of

X = torch.ones(ROWS, COLUMNS)
DOUBLES, HALVES, WHOLE = X.double(), X.bfloat16(), X.long()
MASK = torch.ones(ROWS, 1, dtype=torch.long)
CALLS: dict[str, Callable[[], object]] = {
    "product with a mask": lambda: X * MASK,
    "product in place": lambda: X.mul_(MASK),
    "half precision in place": lambda: HALVES.add_(X),
    "sum of halves and floats": lambda: HALVES + X,
    "sum of floats and doubles": lambda: X + DOUBLES,
    "comparison": lambda: X > WHOLE,
    "choice": lambda: torch.where(MASK > 0, X, DOUBLES),
    "three operands": lambda: torch.addcmul(X, MASK, X),
    "function of whole numbers": lambda: WHOLE.sqrt(),
    "quotient of whole numbers": lambda: WHOLE / WHOLE,
    "whole numbers by a float": lambda: WHOLE * 2.5,
    "real numbers by a complex one": lambda: X * 1j,
    "given result": lambda: torch.add(X, DOUBLES, out=HALVES),
    "joined": lambda: torch.cat([X, DOUBLES]),
    "power": lambda: torch.pow(WHOLE, 2.5),
}
HELD = (X, DOUBLES, HALVES, WHOLE, MASK)
BEFORE = sum(tensor.nbytes for tensor in HELD)


@pytest.fixture(autouse=True)
def nothing_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_workspaces, "_found", {})


@pytest.fixture(params=["new", "known"])
def signatures(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have the signatures of calls be new, or be those of an earlier counter."""
    SHARED_PLANS.rules_changed()
    yield request.param
    SHARED_PLANS.rules_changed()


def memory_of(run: Callable[[], object]) -> MemoryProfile:
    with FlopCounterMode(display=False, memory=True) as counter:
        for tensor in HELD:
            tensor.detach()  # is met, and counts as there before
        run()
    memory = counter.profile.check().memory
    assert memory is not None
    return memory


@pytest.mark.parametrize("name", CALLS)
def test_kernels_that_cast_operands_peak_at_the_allocators_bytes(
    name: str, signatures: str
) -> None:
    call = CALLS[name]
    truth = max(accumulate(allocations(call), initial=0))
    if signatures == "known":
        memory_of(call)
    memory = memory_of(call)
    assert abs(memory.peak_bytes - BEFORE - truth) <= NUMBERS
    assert not memory.is_lower_bound
    assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes


def test_cast_operand_is_a_workspace_of_the_product(signatures: str) -> None:
    with torch.inference_mode():
        memory = memory_of(lambda: X * MASK)
    assert memory.by_role()["workspace"] == ROWS * 4
    assert memory.peak_bytes == BEFORE + ELEMENTS * 4 + ROWS * 4


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_softmax_of_quantised_numbers_holds_them_and_its_result_in_floats(signatures: str) -> None:
    x = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
    memory = memory_of(lambda: torch.ops.quantized.softmax(x, 1, 0.1, 0))
    assert memory.by_role()["workspace"] == 2 * ELEMENTS * 4
    assert memory.peak_bytes == BEFORE + 2 * ELEMENTS + 2 * ELEMENTS * 4


def test_onednns_product_of_bytes_takes_what_the_allocator_says(signatures: str) -> None:
    onednn, weight = torch.ops.onednn, torch.ones(23, COLUMNS, dtype=torch.int8)
    packed = onednn.qlinear_prepack(weight, [ROWS, COLUMNS])
    x, zeros = X.to(torch.uint8), torch.zeros(23, dtype=torch.int32)
    scales = bias = torch.ones(23)

    def run() -> object:
        post = (0.1, 0, torch.uint8, "none", [], "")
        return onednn.qlinear_pointwise(x, 1.0, 0, packed, scales, zeros, bias, *post)

    run()
    truth = max(accumulate(allocations(run), initial=0))
    held = x.nbytes + zeros.nbytes + scales.nbytes
    assert memory_of(run).peak_bytes == BEFORE + held + truth


def test_same_operator_casts_in_some_calls_alone(signatures: str) -> None:
    assert memory_of(lambda: X + DOUBLES).by_role()["workspace"] == ELEMENTS * 8
    assert "workspace" not in memory_of(lambda: X + X).by_role()
    assert memory_of(lambda: X + DOUBLES).by_role()["workspace"] == ELEMENTS * 8


def test_kernels_of_other_devices_cast_no_operand_as_a_whole(signatures: str) -> None:
    def run() -> None:
        X.to("meta") + DOUBLES.to("meta")

    memory_of(lambda: X + DOUBLES)
    devices = {device.device: device for device in memory_of(run).devices}
    assert devices["meta"].peak_bytes == ELEMENTS * (4 + 8 + 8)


def test_cast_that_a_profiler_of_the_program_hides_makes_the_peak_a_lower_bound(
    signatures: str,
) -> None:
    def run() -> None:
        _torch.start_reporting_allocations()
        try:
            X + X, WHOLE + 1, X * MASK
        finally:
            _torch.stop_reporting_allocations()

    assert memory_of(run).unseen == ("aten.mul.Tensor",)


def test_calls_that_a_profiler_hid_are_reported_when_it_is_off(signatures: str) -> None:
    def run() -> None:
        torch.cat([X, DOUBLES])

    def run_hidden() -> None:
        _torch.start_reporting_allocations()
        try:
            run()
        finally:
            _torch.stop_reporting_allocations()

    expected = memory_of(run).peak_bytes
    SHARED_PLANS.rules_changed()
    found_workspaces._found.clear()
    assert memory_of(run_hidden).peak_bytes < expected
    assert memory_of(run).peak_bytes == expected
    assert memory_of(lambda: (run_hidden(), run())).peak_bytes == expected


def test_allocator_is_asked_of_new_calls_alone(
    signatures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_of(lambda: (X.exp(), X + X))
    asked: list[Any] = []
    monkeypatch.setattr(_torch, "start_reporting_allocations", lambda: asked.append(None))
    memory_of(lambda: [(X.exp(), X + X) for _ in range(3)])
    assert not asked


@pytest.fixture
def five_copies() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """An operator that torch does not ship, whose kernel joins five copies and adds them up."""
    with torch.library._scoped_library("found_workspaces", "DEF") as library:
        library.define("five_copies(Tensor x) -> Tensor")
        library.impl("five_copies", lambda x: torch.cat([x] * 5).sum(0), "CPU")
        library.impl("five_copies", lambda x: x.new_empty(x.shape[1]), "Meta")
        yield torch.ops.found_workspaces.five_copies


@pytest.mark.filterwarnings("ignore:no cost is known")
def test_kernel_of_another_library_peaks_at_the_allocators_bytes(
    five_copies: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    for _ in range(2):
        memory = memory_of(lambda: five_copies(X))
        assert memory.peak_bytes == BEFORE + 5 * ELEMENTS * 4 + COLUMNS * 4
        assert not memory.is_lower_bound


def test_kernel_of_another_library_with_a_formula_peaks_at_the_allocators_bytes() -> None:
    """The formulas of this package for other libraries know nothing of their kernels' memory."""
    a = torch.ones(ROWS, COLUMNS, dtype=torch.int8)
    b = torch.ones(11, COLUMNS, dtype=torch.int8)
    with torch.library._scoped_library("bitsandbytes", "DEF") as library:
        library.define("int8_linear_matmul(Tensor A, Tensor B) -> Tensor")
        library.impl(
            "int8_linear_matmul", lambda a, b: torch.cat([a] * 5)[:ROWS, : len(b)].int(), "CPU"
        )
        memory = memory_of(lambda: torch.ops.bitsandbytes.int8_linear_matmul(a, b))
    held = BEFORE + ELEMENTS + 11 * COLUMNS
    assert memory.peak_bytes == held + 5 * ELEMENTS + ROWS * 11 * 4
    assert not memory.is_lower_bound


@pytest.mark.filterwarnings("ignore:no cost is known")
def test_kernel_of_another_library_on_another_device_is_unseen(
    five_copies: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    memory = memory_of(lambda: five_copies(X.to("meta")))
    assert memory.unseen == ("found_workspaces.five_copies.default",)


# -- higher-order operators -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_peaks_at_the_allocators_bytes() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.ones(2, 3, 137, 16)
    truth = max(accumulate(allocations(lambda: flex_attention(q, q, q)), initial=0))
    memory = memory_of(lambda: flex_attention(q, q, q))
    assert truth > 2 * 3 * 137 * 137 * 4
    assert memory.peak_bytes == BEFORE + q.nbytes + truth
    assert not memory.is_lower_bound


def add(times: int, other: torch.Tensor) -> None:
    for _ in range(times):
        X + other


def test_kernel_that_is_found_to_allocate_in_more_calls_is_reported_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FlopCounterMode(display=False, memory=True) as counter:
        add(3, DOUBLES)
        monkeypatch.setattr(kernel_allocations, "_most_over_the_last", lambda sizes: 100)
        add(3, X)
    memory = counter.profile.memory
    assert memory is not None and memory.unseen == ()


def test_rule_that_has_changed_applies_to_calls_of_earlier_counters() -> None:
    def in_two_ways() -> None:
        add(5, DOUBLES)  # until the calls are known by comparison
        add(5, X)

    memory_of(in_two_ways)
    found_workspaces._found[torch.ops.aten.add.Tensor] = found_workspaces._OF_ALL_CALLS
    assert memory_of(in_two_ways).unseen == ()


def test_operator_that_stacks_results_of_a_function_is_unseen() -> None:
    from torch._higher_order_ops.map import map as map_over_rows

    memory = memory_of(lambda: map_over_rows(lambda row: row.exp(), X))
    assert memory.unseen == ("map_impl",)


def test_operator_all_of_whose_functions_are_followed_is_not_unseen() -> None:
    memory = memory_of(lambda: torch.cond(X.sum() > 0, lambda x: x.exp(), lambda x: x.sin(), (X,)))
    assert not memory.unseen
