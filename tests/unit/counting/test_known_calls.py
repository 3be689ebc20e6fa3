"""Calls that are like earlier ones: found by one comparison, and told apart where costs differ."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode, OpCost, register_flops
from dispatch_flops.counting import dispatch_mode, known_calls, meta_tensors
from dispatch_flops.counting.plans import SHARED_PLANS
from dispatch_flops.operators.registry import unregister_flops
from tests.helpers.interpreters import run_python
from tests.helpers.modes import OperatorNames

Program = Callable[[], Any]
pytestmark = pytest.mark.usefixtures("no_plans")


def cost_of(*calls: Program) -> OpCost:
    """Return the cost of the last call; the others come first, in the same counter."""
    with FlopCounterMode(display=False) as counter:
        for call in calls[:-1]:
            call()
        before = counter.profile.total()
        calls[-1]()
    total = counter.profile.total()
    return OpCost(
        macs=total.macs - before.macs,
        flops=total.flops - before.flops,
        bytes_read=total.bytes_read - before.bytes_read,
        bytes_written=total.bytes_written - before.bytes_written,
    )


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*shape, **options)


x, w, bias = ones(3, 5), ones(7, 5), ones(7)
rows, columns = ones(11, 13), ones(11, 3)
z, like_x, scales = ones(3, 5), ones(3, 5), (ones(5), ones(5))
order = torch.argsort(rows)
signal, kernel = ones(1, 2, 9), ones(3, 2, 3)
meta = ones(6, device="meta"), ones(6, device="meta")
y = ones(3, 5, dtype=torch.int32)

# Pairs of calls of one operator that cost differently. The first argument has the same shape.
PAIRS: dict[str, tuple[Program, Program]] = {
    "shape of the second tensor": (lambda: x @ ones(5, 7), lambda: x @ ones(5, 2)),
    "shape of the third tensor": (
        lambda: torch.addmm(bias, ones(3, 5), w.t()),
        lambda: torch.addmm(bias, ones(3, 2), ones(2, 7)),
    ),
    "dtype": (lambda: x + x.clone(), lambda: x.double() + x.double()),
    "strides": (lambda: torch.add(x, ones(3, 5)), lambda: torch.add(x, ones(3, 1).expand(3, 5))),
    "dimension": (lambda: x.sum(dim=0), lambda: x.sum(dim=1)),
    "dimensions in a list": (lambda: rows.sum(dim=[0]), lambda: rows.sum(dim=[0, 1])),
    "type of a number": (lambda: y * 2, lambda: y * 2.0),
    "number and tensor": (lambda: x * 2.0, lambda: x * ones(3, 5)),
    "number that decides": (
        lambda: torch.linalg.vector_norm(x, 2.0),
        lambda: torch.linalg.vector_norm(x, 3.0),
    ),
    "optional tensors": (
        lambda: F.layer_norm(x, (5,)),
        lambda: F.layer_norm(x, (5,), ones(5), ones(5)),
    ),
    "one optional tensor": (
        lambda: F.conv1d(ones(1, 2, 9), ones(3, 2, 3)),
        lambda: F.conv1d(ones(1, 2, 9), ones(3, 2, 3), ones(3)),
    ),
    "a third tensor": (lambda: torch.clamp(x, z), lambda: torch.clamp(x, z, like_x)),
    "a keyword beside two tensors": (lambda: x + z, lambda: torch.add(x, z, alpha=0.5)),
    "number of arguments": (
        lambda: F.conv1d(ones(1, 2, 9), ones(3, 2, 3), stride=2),
        lambda: F.conv1d(ones(1, 2, 9), ones(3, 2, 3), stride=1),
    ),
    "stored elements": (
        lambda: torch.relu(torch.eye(4).to_sparse()),
        lambda: torch.relu(ones(4, 4).to_sparse()),
    ),
    "layout": (lambda: torch.relu(ones(4, 4)), lambda: torch.relu(torch.eye(4).to_sparse())),
    "keyword": (lambda: x.sum(dtype=torch.float64), lambda: x.sum()),
    "value of a keyword": (
        lambda: x.sum(dtype=torch.float64),
        lambda: x.sum(dtype=torch.float16),
    ),
    "name of a keyword": (
        lambda: torch.searchsorted(rows, rows, out_int32=True),
        lambda: torch.searchsorted(rows, rows, right=True),
    ),
    "number by keyword that decides": (
        lambda: torch.addmm(bias, x, w.t(), beta=0),
        lambda: torch.addmm(bias, x, w.t(), beta=2),
    ),
    "tensor by keyword": (
        lambda: torch.searchsorted(rows, rows, side="left"),
        lambda: torch.searchsorted(rows, rows, side="left", sorter=order),
    ),
    "tensors in a list": (lambda: torch.cat([x, z]), lambda: torch.cat([x, w])),
    "length of a list": (lambda: torch.cat([x, z]), lambda: torch.cat([x, z, like_x])),
    "value beside a list": (
        lambda: torch._foreach_norm([x, z], 1.0),
        lambda: torch._foreach_norm([x, z], 3.0),
    ),
    "lengths of two lists": (
        lambda: torch.ops.aten._foreach_copy.default([x, z], [like_x, y]),
        lambda: torch.ops.aten._foreach_copy.default([x], [like_x]),
    ),
    "list given twice": (
        lambda: torch._foreach_mul([x, w], [z, w.clone()]),
        lambda: torch._foreach_mul([x, w], [x, w]),
    ),
    "tensor given twice": (lambda: x * ones(3, 5), lambda: x * x),
    "one of three given twice": (
        lambda: torch.addcmul(x, z, like_x, value=0.5),
        lambda: torch.addcmul(x, z, z, value=0.5),
    ),
    "views that overlap": (
        lambda: ones(4) + ones(10, 4),
        lambda: (lambda whole: whole[5] + whole)(ones(10, 4)),
    ),
    "three views that overlap": (
        lambda: torch.addcmul(ones(6), ones(6), ones(6)),
        lambda: (lambda whole: torch.addcmul(whole[:6], whole[1:7], whole[2:8]))(ones(8)),
    ),
    "views of meta tensors": (
        lambda: ones(6, device="meta") * ones(6, device="meta"),
        lambda: (lambda whole: whole[:6] * whole[2:])(ones(8, device="meta")),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_calls_that_cost_differently_are_told_apart(pair: tuple[Program, Program]) -> None:
    one, other = pair
    alone = cost_of(one), cost_of(other)
    assert alone[0] != alone[1]
    SHARED_PLANS.rules_changed()
    assert cost_of(one, one, one, other) == alone[1]
    assert cost_of(one, other, other, other) == alone[1]
    assert cost_of(other, other, other, one) == alone[0]


def test_views_that_overlap_are_read_once() -> None:
    whole = ones(10, 4)
    calls: list[Program] = [lambda: ones(4) + ones(10, 4)] * 3
    assert cost_of(*calls).bytes_read == 4 * (4 + 40)
    assert cost_of(*calls, lambda: whole[5] + whole).bytes_read == 4 * 40
    assert cost_of(*calls, lambda: whole + whole[5]).bytes_read == 4 * 40
    assert cost_of(*calls, lambda: whole[0] + whole[1:]).bytes_read == 4 * (4 + 36)


@pytest.fixture
def unsigned(monkeypatch: pytest.MonkeyPatch) -> Program:
    """A function from whose call on no call may get a signature."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("a call that is like an earlier one needs no signature")

    def unsign() -> None:
        monkeypatch.setattr(known_calls, "call_signature", refuse)
        monkeypatch.setattr(dispatch_mode, "call_signature", refuse)

    return unsign


@pytest.mark.parametrize(
    "call",
    [
        lambda: x + z,
        lambda: x @ w.t(),
        lambda: F.linear(x, w, bias),
        lambda: torch.softmax(x, -1),
        lambda: x * 0.5,
        lambda: F.layer_norm(x, (5,), *scales),
        lambda: F.conv1d(signal, kernel),
        lambda: meta[0] * meta[1],
        lambda: x.sum(dtype=torch.float64),
        lambda: torch.add(x, z, alpha=0.5),
        lambda: torch.addcmul(x, z, z, value=0.5),
        lambda: x * x,
        lambda: torch._foreach_mul([x, w, z], [z, w, x]),
        lambda: torch._foreach_addcmul([x, w], [z, w], [z, w], 0.5),
        lambda: (x * z, x * 0.5),
    ],
)
def test_call_like_an_earlier_one_needs_no_signature(unsigned: Program, call: Program) -> None:
    cost_of(call, call, call)
    unsigned()
    expected = cost_of(call)
    assert expected.flops
    assert cost_of(call, call) == expected


def test_numbers_that_do_not_decide_need_no_signature(unsigned: Program) -> None:
    cost_of(*[lambda: x * 0.5] * 3)
    unsigned()
    assert cost_of(lambda: x * 0.25).flops == 3 * 5


def test_many_shapes_of_a_later_argument_are_all_counted() -> None:
    with FlopCounterMode(display=False) as counter:
        for _ in range(3):
            for columns in range(1, 12):
                x @ ones(5, columns)
    assert counter.get_total_macs() == 3 * sum(3 * 5 * columns for columns in range(1, 12))


def test_parameters_of_calls_like_earlier_ones_are_used() -> None:
    first, second = nn.LayerNorm(5), nn.LayerNorm(5)
    cost_of(*[lambda: first(x)] * 3)
    with FlopCounterMode(second, display=False) as counter:
        second(x)
    assert counter.profile.root.active_params == 10


def test_parameters_in_lists_of_calls_like_earlier_ones_are_used() -> None:
    class Norms(nn.Linear):
        def forward(self) -> list[Tensor]:
            return torch._foreach_norm([*self.parameters()])

    first, second = Norms(3, 5), Norms(3, 5)
    cost_of(*[first] * 3)
    with FlopCounterMode(second, display=False) as counter:
        second()
    assert counter.profile.root.active_params == 3 * 5 + 5


NESTED = """
import torch, warnings
from dispatch_flops import FlopCounterMode, OpCost
warnings.simplefilter("ignore")
dense = torch.ones(2, 3, 4)
nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)])
weight = torch.ones(4)
with torch.no_grad(), FlopCounterMode(display=False) as counter:
    for tensor in (dense, dense, dense, dense.clone(), nested, dense):
        torch.relu(tensor)
        torch.add(tensor, tensor)
        torch.add(tensor, tensor.clone())
        torch.mul(tensor, 2.0)
        torch.mul(tensor, tensor)
        torch.cat([tensor, tensor.clone()])
        torch.cat([tensor, tensor.clone(), tensor.clone()])
        torch.add(tensor, tensor.clone(), alpha=2)
        torch.clone(tensor, memory_format=torch.preserve_format)
        torch.nn.functional.layer_norm(tensor, (4,), weight, weight.clone())
        torch.softmax(tensor, -1)
    factor = torch.tensor(2.0)
    for first, second in ((factor, dense), (dense, factor)):
        for _ in range(5):
            torch.mul(first, second)
        torch.mul(nested if first is dense else first, nested if second is dense else second)
    without_a_kernel = (
        lambda tensor: torch.addcmul(dense, dense + 1, tensor),
        lambda tensor: torch.addcmul(dense, tensor, tensor),
        lambda tensor: torch._foreach_mul([dense, dense + 1, tensor], 2.0),
        lambda tensor: torch.sum(tensor, dtype=torch.float64),
    )
    for call in without_a_kernel:
        for tensor in (dense + 2, dense + 2, dense + 2, nested, dense + 2):
            try:
                call(tensor)
            except NotImplementedError:
                assert tensor is nested
print("done")
"""


def test_nested_tensors_are_never_compared_with_dense_ones() -> None:
    """To compare one ends the process."""
    done = run_python("-c", NESTED)
    assert done.stdout == "done\n", done.stderr


def test_tensor_given_again_is_found_at_its_places_alone() -> None:
    calls: list[Program] = [lambda: torch.addcmul(x, z, z)] * 3
    assert cost_of(*calls).bytes_read == 4 * 2 * 15
    assert cost_of(*calls, lambda: torch.addcmul(x, z, like_x)).bytes_read == 4 * 3 * 15
    assert cost_of(*calls, lambda: torch.addcmul(z, z, z)).bytes_read == 4 * 15
    assert cost_of(*calls, lambda: torch.addcmul(z, z, x)).bytes_read == 4 * 2 * 15


def test_keywords_that_are_compared() -> None:
    aten = torch.ops.aten
    assert known_calls._comparable_keywords(aten.sum.default) == {"dtype"}
    assert known_calls._comparable_keywords(aten.bernoulli.default) == frozenset()  # a generator
    calls = known_calls.KnownCalls(aten.searchsorted.Tensor)
    with OperatorNames() as mode:
        has_same_values = calls._comparison_of_values((x, x, None))
        assert has_same_values((x, x, None))
        assert not has_same_values((x, x, order))
        assert not calls._comparison_of_values((x, x, 2))((x, x, 2.0))
    assert mode.seen == []


@torch.library.custom_op("known_calls::total", mutates_args=())
def total(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return ones(())


@pytest.fixture
def formula_of_total() -> Iterator[None]:
    register_flops(total)(lambda a, b, **_: 100 * len(a) + len(b))
    yield
    unregister_flops(total)


@pytest.mark.usefixtures("formula_of_total")
def test_calls_whose_lists_have_other_lengths_are_told_apart() -> None:
    def call(*lengths: int) -> Program:
        tensors = [ones(3, 5) for _ in range(sum(lengths))]
        return lambda: total(tensors[: lengths[0]], tensors[lengths[0] :])

    assert cost_of(*[call(2, 1)] * 4).flops == 201
    assert cost_of(*[call(2, 1)] * 4, call(1, 2)).flops == 102
    assert cost_of(*[call(2, 1)] * 4, call(0, 3)).flops == 3
    assert cost_of(*[call(0, 0)] * 4).flops == 0


def test_lists_of_numbers_are_compared_as_lists() -> None:
    flattened = known_calls._flattened(([x, z], [2, 3], [], 0.5))
    assert flattened == (x, z, [2, 3], [], 0.5)


def scatter_columns(indices: Tensor) -> Tensor:
    return torch.ops.aten.index_put(rows, [None, indices], columns, True)  # type: ignore[no-any-return]


def test_indices_after_a_whole_dimension_need_no_signature(unsigned: Program) -> None:
    """Torch gives None for the dimension, and so the list begins with it."""
    first, second = torch.tensor([1, 5, 2]), torch.tensor([7, 2, 2])
    expected = cost_of(partial(scatter_columns, first))
    cost_of(*[partial(scatter_columns, first)] * 3)
    unsigned()
    assert cost_of(*[partial(scatter_columns, second)] * 2) == expected


def test_no_indices_are_kept() -> None:
    found = []
    with FlopCounterMode(display=False):
        for _ in range(4):
            indices = torch.tensor([1, 5, 2])
            found.append(weakref.ref(indices))
            scatter_columns(indices)
            del indices
            assert found[-1]() is None


def test_no_tensor_of_a_class_of_the_program_is_kept() -> None:
    """A counter without a formula of its own does not keep their costs either."""

    class Named(torch.Tensor):
        pass

    own = {torch.ops.quantized.add: lambda *args, **kwargs: OpCost()}
    with FlopCounterMode(display=False, custom_mapping=own) as counter:
        for _ in range(4):
            x = ones(3, 4).as_subclass(Named)
            kept = weakref.ref(x)
            torch.add(x, 2)
            del x
            assert kept() is None
    assert counter.get_total_flops() == 4 * 3 * 4


def test_calls_with_and_without_optional_tensors_need_no_signature(unsigned: Program) -> None:
    calls: list[Program] = [
        lambda: F.layer_norm(x, (5,), *scales),
        lambda: F.layer_norm(x, (5,)),
        lambda: F.layer_norm(x, (5,), *scales),
    ]
    for call in calls:
        cost_of(call, call, call)
    expected = cost_of(*calls)
    unsigned()
    assert cost_of(*calls) == expected


@pytest.mark.parametrize("func", ["_local_scalar_dense", "equal"])
def test_reading_one_value_needs_no_signature(unsigned: Program, func: str) -> None:
    args = (ones(()),) if func == "_local_scalar_dense" else (x, z)
    call = partial(getattr(torch.ops.aten, func).default, *args)
    cost_of(call, call, call)
    unsigned()
    assert cost_of(call, call).bytes_read == 4 * sum(tensor.numel() for tensor in args)


@pytest.mark.parametrize(
    ("func", "varies"),
    [("_local_scalar_dense", False), ("equal", False), ("nonzero", True), ("mul", False)],
)
def test_results_whose_shape_depends_on_values(func: str, varies: bool) -> None:
    packet = getattr(torch.ops.aten, func)
    overload = packet.Tensor if func == "mul" else packet.default
    assert meta_tensors.varies_in_shape(overload) is varies


def test_calls_that_take_turns_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """What followed a call before is compared first, without a search."""
    searched: list[str] = []
    find = known_calls.KnownCalls.find

    def spy(calls: Any, args: Any, kwargs: Any, used_params: set[int]) -> Any:
        searched.append(str(calls._func))
        return find(calls, args, kwargs, used_params)

    def run() -> None:
        torch.mm(x, ones(5, 7))
        torch.mm(ones(2, 3), x)
        F.gelu(x)
        F.gelu(w)

    with FlopCounterMode(display=False) as counter:
        for _ in range(4):
            run()
        monkeypatch.setattr(known_calls.KnownCalls, "find", spy)
        run()
    assert not {"aten.mm.default", "aten.gelu.default"} & set(searched)
    assert counter.get_total_macs() == 5 * (3 * 5 * 7 + 2 * 3 * 5)
