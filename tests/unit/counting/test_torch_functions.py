"""Torch's own functions take the place of an overload only where they run it and nothing else."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dispatch_flops import FlopCounterMode, _torch
from dispatch_flops.counting import dispatch_mode, known_calls, torch_functions
from dispatch_flops.counting.known_calls import differs_in_numbers
from dispatch_flops.counting.plans import SHARED_PLANS
from dispatch_flops.counting.torch_functions import run_and_find
from tests.helpers.interrupting import TooLateError, interrupted_at
from tests.helpers.modes import OperatorNames

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("no_plans")
x, y = torch.arange(15.0).reshape(3, 5), torch.ones(3, 5)
bias, w = torch.ones(7), torch.ones(5, 7)


def found(func: Any, *args: Any) -> Any:
    """Return what takes the place of the overload; it must have run it, and nothing else."""
    with OperatorNames() as mode:
        _, function = run_and_find(func, args)
    assert mode.seen == [str(func)]
    return function


def test_function_or_method_of_the_operators_name_takes_its_place() -> None:
    assert found(aten.add.Tensor, x, y) == torch._C._VariableFunctions.add
    assert found(aten.addmm.default, bias, x, w) == torch._C._VariableFunctions.addmm
    assert found(aten.add_.Tensor, x.clone(), y) == torch._C.TensorBase.add_
    assert found(aten.gelu.default, x) == torch._C._nn.gelu


@pytest.mark.parametrize("sizes", [[15], [5, 3], [3, -1], [1, 3, 5]])
def test_sizes_are_given_one_by_one(sizes: list[int]) -> None:
    method = found(aten.view.default, x, [15])
    assert method is not torch._C.TensorBase.view
    assert torch.equal(method(x, sizes), x.view(sizes))
    assert method(torch.ones(1), []).shape == ()
    with pytest.raises(RuntimeError, match="shape '\\[4, 4\\]' is invalid"):
        method(x, [4, 4])
    assert _torch._given_one_by_one(lambda *given: given)(x, sizes) == (x, *sizes)


def test_result_is_that_of_the_operator() -> None:
    out, _ = run_and_find(aten.addmm.default, (bias, x, w))
    assert torch.equal(out, torch.addmm(bias, x, w))


def test_other_overload_than_the_function_chooses_is_kept() -> None:
    # torch.add makes a tensor of the number, and calls add.Tensor.
    assert found(aten.add.Scalar, x, 2.0) is aten.add.Scalar._op
    assert found(aten.add.Tensor, x, 2.0) == torch._C._VariableFunctions.add


def test_operator_with_a_result_of_another_type_is_kept() -> None:
    out, function = run_and_find(aten.split.Tensor, (x, 2, 1))  # torch.split returns a tuple
    assert function is aten.split.Tensor._op
    assert len(out) == 3
    out, function = run_and_find(aten.max.dim, (x, 1))  # torch.max returns named results
    assert function is aten.max.dim._op
    assert torch.equal(out[1], torch.full((3,), 4))


def test_operator_without_a_function_is_kept() -> None:
    assert found(aten.gelu_backward.default, x, y) is aten.gelu_backward.default._op


def test_error_of_the_operator_is_its_own_and_it_ran_once() -> None:
    with OperatorNames() as mode, pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        run_and_find(aten.mm.default, (x, y))
    assert mode.seen == ["aten.mm.default"]


def is_of_finding(frame: FrameType) -> bool:
    rooms = dispatch_mode, known_calls, torch_functions
    return frame.f_code.co_filename in [room.__file__ for room in rooms]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TooLateError])
def test_error_of_a_signal_handler_is_raised_and_leaves_nothing(
    error: type[BaseException],
) -> None:
    shows = warnings.showwarning
    with OperatorNames() as outer:
        for step in itertools.count():
            SHARED_PLANS.rules_changed()
            raised = False
            try:
                with (
                    FlopCounterMode(display=False),
                    interrupted_at(step, is_of_finding, error) as hits,
                ):
                    for _ in range(3):
                        x + y
            except error:
                raised = True
            assert raised == bool(hits)
            assert _torch.modes_in_force() == [outer]
            assert warnings.showwarning is shows
            if not hits:
                break


def test_function_that_runs_no_operator_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "functions_named_as", lambda func: [Tensor.data_ptr])
    out, function = run_and_find(aten.t.default, (x,))
    assert function is aten.t.default._op
    assert out.shape == (5, 3)


def test_error_of_an_operator_has_no_context() -> None:
    with FlopCounterMode(display=False):
        for _ in range(4):
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes") as caught:
                torch.mm(x, y)
            assert caught.value.__context__ is None
            torch.mm(x, w)


def unpool() -> Tensor:
    pooled, indices = torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.long)
    return F.max_unpool2d(pooled, indices, 2)


@pytest.fixture
def warn_only() -> Iterator[None]:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.mark.usefixtures("warn_only")
def test_warnings_of_an_operator_name_the_line_of_the_program() -> None:
    with warnings.catch_warnings(record=True) as expected:
        warnings.simplefilter("always")
        with OperatorNames():
            unpool()
    if {warning.filename for warning in expected} != {F.__file__}:
        pytest.skip("torch's overloads, too, name the line that calls them: 2.15")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with FlopCounterMode(display=False):
            for _ in range(4):
                unpool()
    lines = [(warning.filename, warning.lineno) for warning in expected]
    assert [(warning.filename, warning.lineno) for warning in seen] == 4 * lines


def fill_expanded() -> None:
    torch.zeros(1).expand(3).masked_fill_(torch.tensor([True, False, True]), 1.0)


@pytest.mark.parametrize("action", ["always", "default", "error"])
def test_warnings_of_every_call_are_shown_as_without_the_counter(action: Any) -> None:
    def shown(counter: Any) -> list[Any]:
        globals().pop("__warningregistry__", None)
        errors = 0
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter(action)
            with counter:
                for _ in range(5):
                    try:
                        fill_expanded()
                    except UserWarning:
                        errors += 1
        return [errors, *((str(one.message), one.filename, one.lineno) for one in found)]

    expected = shown(contextlib.nullcontext())
    if shown(OperatorNames()) != expected:
        pytest.skip("torch's overloads, too, name the line that calls them: 2.15")
    assert shown(FlopCounterMode(display=False)) == expected
    assert expected[0] == 5 if action == "error" else expected[1][1] == __file__


def test_operator_in_place_runs_once() -> None:
    total = torch.zeros(3, 5)
    out, function = run_and_find(aten.add_.Tensor, (total, y))
    assert out is total
    assert function == torch._C.TensorBase.add_
    assert torch.equal(total, y)


def twice(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(torch.add(a, b), b)


def with_alpha(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(a, b, alpha=2)


def swapped(a: Tensor, b: Tensor) -> Tensor:
    return torch.add(b, a)


@pytest.mark.parametrize("function", [twice, with_alpha, swapped])
def test_function_that_does_anything_else_is_not_taken(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "functions_named_as", lambda func: [function])
    _, found = run_and_find(aten.add.Tensor, (x, y))
    assert found is aten.add.Tensor._op


def test_function_that_passes_a_keyword_on_with_another_value_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def doubled(a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
        return torch.add(a, b, alpha=2 * alpha)

    monkeypatch.setattr(_torch, "functions_named_as", lambda func: [doubled])
    out, found = run_and_find(aten.add.Tensor, (x, y), {"alpha": 3})
    assert torch.equal(out, x + 3 * y)
    assert found is aten.add.Tensor._op


def test_lists_of_the_same_tensors_are_the_same() -> None:
    with OperatorNames() as mode:
        out, function = run_and_find(aten.cat.default, ([x, y], 1))
    assert mode.seen == ["aten.cat.default"]
    assert torch.equal(out, torch.cat([x, y], 1))
    assert function == torch._C._VariableFunctions.cat


def test_lists_of_other_tensors_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def reversed_cat(tensors: list[Tensor], dim: int) -> Tensor:
        return torch.cat(tensors[::-1], dim)

    monkeypatch.setattr(_torch, "functions_named_as", lambda func: [reversed_cat])
    with OperatorNames() as mode:
        _, function = run_and_find(aten.cat.default, ([x, y], 1))
    assert mode.seen == ["aten.cat.default"]
    assert function is aten.cat.default._op


def test_witness_whose_function_is_over_lets_every_operator_pass() -> None:
    witness = torch_functions.Witness(aten.add.Tensor, (x, y))
    assert torch.equal(torch_functions._run_before(witness, torch.add), x + y)
    witness.operators = 0  # as if the function had been refused
    with witness:
        assert torch.equal(x * y, x)


def test_views_whose_calls_differ_in_numbers_alone() -> None:
    for func in (aten.t.default, aten.view.default, aten.select.int, aten.transpose.int):
        assert differs_in_numbers(func)
    for func in (aten.view.dtype, aten.diagonal.default, aten.expand.default, aten.split.Tensor):
        assert not differs_in_numbers(func)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.ends = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.embedding = nn.Embedding(11, 4)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        h = F.max_pool2d(self.norm(self.conv(image)).relu(), 2).flatten(2).transpose(1, 2)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        rows = self.embedding(ids)
        h = h * 2 + rows.mean(dim=1, keepdim=True) - rows.sum(1, keepdim=True).tanh()
        return self.ends(h).softmax(-1).sum()


def step(model: Block) -> list[Tensor]:
    """Run one training step; return the loss and the gradients."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 9, 9, generator=generator)
    loss = model(image, torch.arange(6).reshape(2, 3))
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_later_calls_give_the_same_results_by_the_same_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[Any] = []

    def spy(func: Any, args: Any, kwargs: Any) -> Any:
        out, function = run_and_find(func, args, kwargs)
        chosen.append(function is not _torch.kernel_of(func))
        return out, function

    monkeypatch.setattr("dispatch_flops.counting.known_calls.run_and_find", spy)
    torch.manual_seed(0)
    model = Block().eval()
    with OperatorNames() as mode:
        expected, names = step(model), [*mode.seen]
        with FlopCounterMode(model, display=False):
            for _ in range(4):
                mode.seen.clear()
                values = step(model)
                assert mode.seen == names
                for value, reference in zip(values, expected, strict=True):
                    assert torch.equal(value, reference)
    assert sum(chosen) > 15


class FunctionNames(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **kwargs or {})


class Logged(Tensor):
    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.fixture(scope="module")
def compiled() -> Any:
    """``x @ weight.t()`` in C++, where modes and subclasses for torch functions are not asked."""
    source = "def f(x: Tensor, weight: Tensor):\n    return torch.mm(x, weight.t())\n"
    return torch.jit.CompilationUnit(source).f


FUNCTIONS = {torch.mm, torch.t, Tensor.t, torch._C._VariableFunctions.t}


def test_mode_for_torch_function_sees_no_function_in_place_of_an_operator(compiled: Any) -> None:
    with FlopCounterMode(display=False):
        for _ in range(4):
            compiled(x, y)
        with FunctionNames() as mode:
            compiled(x, y)
    assert aten.mm.default in mode.seen
    assert not FUNCTIONS & {*mode.seen}


def test_subclass_sees_no_function_in_place_of_an_operator(compiled: Any) -> None:
    with FlopCounterMode(display=False):
        for _ in range(4):
            compiled(x, y)
        Logged.seen.clear()
        compiled(x, y.as_subclass(Logged))
    assert aten.mm.default in Logged.seen
    assert not FUNCTIONS & {*Logged.seen}
