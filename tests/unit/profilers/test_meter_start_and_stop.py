"""Where a meter starts and stops counting, and where steps begin and end."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopMeter, _torch
from tests.helpers.modes import OperatorNames

B, IN, OUT = 2, 3, 5
UPDATE = 2 * IN * OUT  # p += -lr * grad


class Net(nn.Module):
    """One layer without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def forward(rows: int) -> int:
    return 2 * rows * IN * OUT


def batch(rows: int) -> int:
    """Return the FLOPs of forward, a sum, and the gradient of the weight."""
    return forward(rows) + (rows * OUT - 1) + 2 * rows * IN * OUT


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def optimizer(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not _torch.modes_in_force()
    assert not _torch.are_modes_seen()
    assert not torch.nn.modules.module._global_forward_hooks
    assert not _torch.all_step_pre_hooks


def train(model: nn.Module, optimizer: Any, rows: int = B) -> None:
    model(torch.ones(rows, IN)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- inference mode ---------------------------------------------------------------------------


def test_evaluation_in_inference_mode_within_a_step_is_counted(model: Net, optimizer: Any) -> None:
    """Counting that began before the evaluation, for a new shape, does not stop inside it."""
    meter, exact = FlopMeter(model, verify_every=0), 0
    steps = (4, 1), (4, 0), (4, 0), (7, 0), (7, 1), (7, 1), (9, 1), (4, 1), (9, 1)
    for rows, evaluations in steps:
        with meter.step():
            train(model, optimizer, rows)
            for _ in range(evaluations):
                with torch.inference_mode():
                    model(torch.ones(B, IN))
        torch.ones(2)  # raises if the dispatch keys are not those before the step
        exact += batch(rows) + UPDATE + evaluations * forward(B)
    assert meter.total_flops == exact
    assert not meter.is_estimate


@pytest.mark.parametrize("lengths", ["1 2 1 3 2 3 1 2 3", "4 4 4 1 2 3 4 3 2 1 2 3 4"])
def test_calls_in_inference_mode_before_training_are_counted(
    lengths: str, model: Net, optimizer: Any
) -> None:
    """A call that is new there is counted to the end, in a step that is counted as a whole."""
    meter, exact = FlopMeter(model, verify_every=0), 0
    for length in map(int, lengths.split()):
        with meter.step():
            with torch.inference_mode():
                for _ in range(length):
                    model(torch.ones(B, IN))
            train(model, optimizer, length)
        exact += length * forward(B) + batch(length) + UPDATE
    assert meter.total_flops == exact
    assert not meter.is_estimate
    assert meter.run.timed_steps > 0


def test_call_in_inference_mode_that_comes_once_makes_an_estimate(
    model: Net, optimizer: Any
) -> None:
    meter = FlopMeter(model, verify_every=0)
    for rows in (B, B, 11, B, B):
        with meter.step():
            with torch.inference_mode():
                model(torch.ones(rows, IN))
            train(model, optimizer)
    assert meter.is_estimate
    assert meter.last_step.total_flops == forward(B) + batch(B) + UPDATE


def test_step_inside_inference_mode_is_counted_as_any_other(model: Net) -> None:
    shapes, found = (2, 7, 11, 7, 2, 13, 11, 13), set()
    for mode in torch.no_grad, torch.inference_mode:
        meter = FlopMeter(model, verify_every=0)
        with mode():
            for rows in shapes:
                with meter.step():
                    model(torch.ones(rows, IN))
                    model(torch.ones(rows, IN))
            assert not _torch.are_modes_seen()
        assert meter.total_flops == 2 * forward(sum(shapes))
        assert not meter.is_estimate
        found.add(meter.run.timed_steps)
    assert len(found) == 1


def test_inference_mode_within_another_is_counted(model: Net) -> None:
    """No flag tells one mode from the other; what counts from the inner one on ends with it."""

    @torch.inference_mode()
    def evaluate(rows: int) -> None:
        model(torch.ones(rows, IN))

    meter, shapes = FlopMeter(model, verify_every=0), (2, 7, 7, 2, 11, 11)
    with torch.inference_mode():
        for rows in shapes:
            with meter.step():
                evaluate(rows)
                torch.ones(B, IN) @ torch.ones(IN, OUT)
            torch.ones(2)
    assert meter.total_flops == sum(forward(rows) + forward(B) for rows in shapes)
    assert not meter.is_estimate


# -- other dispatch modes ---------------------------------------------------------------------


@pytest.mark.parametrize("is_started", [False, True])
@pytest.mark.parametrize("has_outer", [False, True])
def test_block_of_another_mode_that_ends_within_the_step_is_left(
    model: Net, optimizer: Any, *, is_started: bool, has_outer: bool
) -> None:
    """The end of a mode's block takes off the mode that was entered last, whichever it is."""
    meter, seen = FlopMeter(model, optimizer, verify_every=0), []
    with OperatorNames() if has_outer else nullcontext():
        if is_started:
            meter.start()
        shapes = (2, 7, 2, 11, 7)
        for rows in shapes:
            with nullcontext() if is_started else meter.step():
                with OperatorNames() as mode:
                    out = model(torch.ones(rows, IN))
                seen.append("aten.mm.default" in mode.seen)
                out.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        meter.stop()
        assert len(_torch.modes_in_force()) == has_outer
    assert meter.total_flops == sum(batch(rows) + UPDATE for rows in shapes)
    assert all(seen)
    assert not meter.is_estimate


def test_work_after_the_end_of_a_mode_that_began_before_the_step_is_counted_the_next_time(
    model: Net,
) -> None:
    """That end takes the counting mode off; what was counted up to there is not the whole."""
    meter = FlopMeter(model, verify_every=0)

    def step(mode: Any) -> None:
        with ExitStack() as stack:
            mode.__enter__()
            stack.enter_context(meter.step())
            model(torch.ones(B, IN))
            mode.__exit__(None, None, None)
            torch.ones(7, IN) @ torch.ones(IN, OUT)

    step(OperatorNames())
    assert meter.is_estimate
    _torch.pop_mode()  # the one that ended: it took off another
    step(nullcontext())
    assert meter.total_flops == 2 * (forward(B) + forward(7))
    assert not meter.is_estimate


def test_counting_that_starts_under_fake_tensors_stays_within_the_modes_of_the_step(
    model: Net,
) -> None:
    """Torch lists the mode of fake tensors first, whenever it begins."""
    meter = FlopMeter(model, verify_every=0)
    with OperatorNames() as outer, torch.no_grad():
        for rows in (2, 7, 2):
            with meter.step(), FakeTensorMode(allow_non_fake_inputs=True):
                model(torch.ones(rows, IN))
                assert _torch.stacked_modes()[0] is outer
    assert meter.total_flops == (2 + 7 + 2) * forward(1)


# -- optimizers that step in the backward pass ------------------------------------------------


@pytest.mark.parametrize("is_started", [False, True])
def test_optimizer_that_steps_in_the_backward_pass_is_counted(*, is_started: bool) -> None:
    """Autograd restores the dispatch modes after each node: no counting starts or stops there."""
    optimizers = []
    model = nn.Sequential(*(nn.Linear(IN, IN, bias=False) for _ in range(3)))
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        optimizers.append(own)

        def step(_: torch.Tensor, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    meter = FlopMeter(model, optimizers[0], verify_every=0)  # the one that steps last
    if is_started:
        meter.start()
    shapes = (2, 2, 7, 2, 7, 11, 11, 2)
    for rows in shapes:
        with nullcontext() if is_started else meter.step():
            model(torch.ones(rows, IN)).sum().backward()
    meter.stop()
    # Three products in forward, three gradients of weights, and two between the layers.
    products = 3 + 3 + 2
    assert meter.total_flops == sum(
        products * 2 * rows * IN * IN + (rows * IN - 1) + 3 * 2 * IN * IN for rows in shapes
    )
    assert not meter.is_estimate
    assert meter.run.timed_steps > 0


# -- steps that ``start`` finds -----------------------------------------------------------------


class Failing(torch.optim.SGD):
    """Raises in the steps that ``failures`` names."""

    failures: tuple[int, ...] = ()
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        if self.calls in self.failures:
            raise FloatingPointError
        return super().step(closure)


@pytest.mark.parametrize("failures", [(1,), (4,), (4, 5, 9)])
def test_step_that_the_optimizer_leaves_by_an_exception_is_dropped(
    failures: tuple[int, ...], model: Net
) -> None:
    optimizer = Failing(model.parameters(), lr=0.1)
    optimizer.failures = failures
    meter = FlopMeter(model, optimizer)
    meter.start()
    for _ in range(20):
        with suppress(FloatingPointError):
            train(model, optimizer)
        optimizer.zero_grad()
    meter.stop()
    assert meter.steps_done == 20 - len(failures)
    assert meter.total_flops == meter.steps_done * (batch(B) + UPDATE)
    assert not meter.is_estimate


def closure_of(model: Net, optimizer: Any) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(B, IN)).sum()
        loss.backward()
        return loss

    return closure


def test_closure_calls_the_model_within_a_step_that_has_begun(model: Net, optimizer: Any) -> None:
    meter, closure = FlopMeter(model, optimizer, verify_every=0), closure_of(model, optimizer)
    meter.start()
    for _ in range(4):
        model(torch.ones(B, IN))
        optimizer.step(closure)
    meter.stop()
    assert meter.steps_done == 4
    assert meter.total_flops == 4 * (forward(B) + batch(B) + UPDATE)


def test_options_of_an_optimizer_whose_closure_begins_the_step_are_of_its_signature(
    model: Net, optimizer: Any
) -> None:
    """They have changed before the meter's step begins, with the call of the model."""
    meter, closure = FlopMeter(model, optimizer, verify_every=0), closure_of(model, optimizer)
    meter.start()
    for decay in (0.0, 0.0, 0.5, 0.0, 0.5):
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.step(closure)
    meter.stop()
    assert meter.steps_done == 5
    # Decay is a multiplication and an addition for each parameter, as the update is.
    assert meter.total_flops == 5 * (batch(B) + UPDATE) + 2 * UPDATE
    assert not meter.is_estimate


def test_started_meter_warns_where_no_call_of_the_model_is_seen(optimizer: Any, model: Net) -> None:
    meter = FlopMeter(model, optimizer)
    meter.start()
    with pytest.warns(UserWarning, match="not called before the optimizer's step") as caught:
        for _ in range(2):
            model.forward(torch.ones(B, IN)).sum().backward()
            optimizer.step()
    meter.stop()
    assert len(caught) == 1
    assert (meter.run.steps, meter.total_flops) == (0, 0)


def test_step_without_a_call_after_others_is_no_reason_to_warn(optimizer: Any, model: Net) -> None:
    meter = FlopMeter(model, optimizer)
    meter.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(B, IN)).sum().backward()
        optimizer.step()
        optimizer.step()
    meter.stop()
    assert meter.run.steps == 1


def test_other_optimizers_are_not_kept_alive_after_stop(model: Net, optimizer: Any) -> None:
    meter = FlopMeter(model, optimizer, verify_every=0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])
    meter.start()
    other.step()
    meter.stop()
    reference = weakref.ref(other)
    del other
    gc.collect()  # an optimizer may refer to itself
    assert reference() is None


def test_nothing_is_told_of_the_release_of_an_optimizer_after_a_step_that_raised(
    model: Net, optimizer: Any
) -> None:
    """See ``Session._let_go``."""

    def told() -> list[Any]:
        return [c for ref in weakref.getweakrefs(optimizer) if (c := ref.__callback__) is not None]

    before = told()
    with suppress(FloatingPointError), FlopMeter(model, optimizer).step():
        train(model, optimizer)
        raise FloatingPointError
    assert told() == before


class Recycling(Net):
    """Calls itself on what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(OUT, IN, bias=False)

    def forward(self, x: torch.Tensor, times: int = 0) -> torch.Tensor:
        out: torch.Tensor = super().forward(x)
        if times < 0:
            raise ValueError
        if times:
            out = self(self.back(out), times - 1)
            self.back(out)
        return out


@pytest.mark.parametrize("rows", [(2, 2, 2, 2), (2, 7, 7, 2)])
def test_started_meter_takes_a_call_within_a_call_as_part_of_it(rows: tuple[int, ...]) -> None:
    model = Recycling()
    meter = FlopMeter(model, verify_every=0)
    meter.start()
    for index, n in enumerate(rows):
        model(torch.ones(n, IN), 2)
        if index == 1:
            with pytest.raises(ValueError):
                model(torch.ones(n, IN), -1)
    meter.stop()
    assert meter.steps_done == len(rows)
    # Three times there, twice back between, and twice after a call within has returned.
    assert meter.total_flops == (3 + 2 + 2) * forward(sum(rows))
    assert not meter.is_estimate


def test_step_ends_in_an_inference_mode_that_it_did_not_begin_in(
    model: Net, optimizer: Any
) -> None:
    """Counting goes on, and the next step, which is counted as a whole, is the one that stops."""
    meter = FlopMeter(model, optimizer, verify_every=0)
    meter.start()
    for is_inside in (True, False, True, False, False):
        model(torch.ones(B, IN)).sum().backward()
        with torch.inference_mode(is_inside):
            optimizer.step()
        torch.ones(2)
        optimizer.zero_grad()
    meter.stop()
    assert meter.total_flops == 5 * (batch(B) + UPDATE)


# -- threads ----------------------------------------------------------------------------------


def in_thread(run: Any) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@pytest.mark.parametrize("is_counted", [True, False])
def test_step_that_a_thread_did_not_end_is_dropped(
    is_counted: bool, model: Net, optimizer: Any
) -> None:
    meter = FlopMeter(model, optimizer, verify_every=0)
    meter.start()
    if not is_counted:
        train(model, optimizer)
    in_thread(lambda: model(torch.ones(B, IN)).sum().backward())
    optimizer.zero_grad()
    for _ in range(5):
        train(model, optimizer)
    meter.stop()
    assert meter.steps_done == 5 + (not is_counted)
    assert meter.total_flops == meter.steps_done * (batch(B) + UPDATE)
    assert not meter.is_estimate


def test_call_in_another_thread_has_no_part_in_the_step(model: Net, optimizer: Any) -> None:
    meter = FlopMeter(model, verify_every=0)
    rows = [7, 11, 13, 17]
    for count in rows:
        with meter.step():
            train(model, optimizer)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(model, torch.ones(count, IN)).result()
    assert meter.total_flops == len(rows) * (batch(B) + UPDATE)
    assert meter.run.timed_steps == len(rows) - 1


class Late(torch.optim.Optimizer):
    """An optimizer that makes the one that it steps in its first step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner: Any = None

    def step(self, closure: Any = None) -> None:
        if self.inner is None:
            self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)
        self.inner.step()


def test_step_ends_with_an_optimizer_that_the_given_one_holds_since_its_first_step(
    model: Net,
) -> None:
    outer = Late(model.parameters())
    meter = FlopMeter(model, outer, verify_every=0)
    meter.start()
    train(model, outer)
    for _ in range(3):
        train(model, outer.inner)
    meter.stop()
    assert meter.run.steps == 1 + 3
    assert meter.total_flops == 4 * (batch(B) + UPDATE)


def test_optimizer_of_another_thread_has_no_part_in_the_step(model: Net, optimizer: Any) -> None:
    """The hooks are on all optimizers."""
    other = torch.optim.SGD([torch.ones(7, requires_grad=True)], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.ones(7)
    meter = FlopMeter(model, verify_every=0)
    for _ in range(3):
        with meter.step():
            model(torch.ones(B, IN)).sum().backward()
            in_thread(other.step)
            optimizer.step()
            optimizer.zero_grad()
    assert meter.total_flops == 3 * (batch(B) + UPDATE)
    assert not meter.is_estimate


def test_stop_drops_a_step_that_another_thread_is_in(model: Net, optimizer: Any) -> None:
    meter = FlopMeter(model, optimizer, verify_every=0)
    meter.start()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: model(torch.ones(B, IN)).sum().backward()).result()
        with pytest.warns(UserWarning, match="calls in this thread are not counted"):
            train(model, optimizer)
        meter.stop()
        assert not model._forward_pre_hooks
        assert not torch.nn.modules.module._global_forward_pre_hooks
        pool.submit(train, model, optimizer).result()  # still within the dispatch mode
    assert meter.steps_done == 0
    with meter.step():
        train(model, optimizer)
    assert meter.total_flops == batch(B) + UPDATE
