"""A counter that is left or paused in another inference mode, backward pass or thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, FlopMeter, FlopsProfiler, _torch
from dispatch_flops.errors import (
    AlreadyActiveError,
    UncountedWarning,
    WrongPlaceError,
    WrongThreadError,
)
from tests.helpers.modes import OperatorNames

B, IN, OUT = 2, 3, 5
FORWARD = 2 * B * IN * OUT


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(IN, OUT, bias=False)


@pytest.fixture
def counter(model: nn.Module) -> FlopCounterMode:
    return FlopCounterMode(model, display=False)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    torch.ones(2)  # raises if the dispatch keys are not those before the test
    assert not _torch.modes_in_force()
    assert not torch.nn.modules.module._global_forward_hooks


def test_counter_is_not_left_in_an_inference_mode_that_began_later(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    counter.__enter__()
    with torch.inference_mode():
        model(torch.ones(B, IN))
        with pytest.raises(WrongPlaceError):
            counter.__exit__(None, None, None)
        model(torch.ones(B, IN))
    counter.__exit__(None, None, None)
    assert counter.get_total_flops() == 2 * FORWARD


def test_counter_is_not_left_in_a_backward_pass_that_began_later(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    refused: list[Exception] = []

    def leave(_: torch.Tensor) -> None:
        try:
            counter.__exit__(None, None, None)
        except WrongPlaceError as error:
            refused.append(error)

    counter.__enter__()
    out = model(torch.ones(B, IN))
    out.register_hook(leave)
    out.backward(torch.ones(B, OUT))
    counter.__exit__(None, None, None)
    assert len(refused) == 1
    assert counter.get_total_flops() == 2 * FORWARD  # the gradient of the weight costs as much


def test_counter_within_an_inference_mode_or_a_backward_pass_counts(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    def count(_: torch.Tensor) -> None:
        with counter:
            model(torch.ones(B, IN))

    with torch.inference_mode(), counter:
        model(torch.ones(B, IN))
    assert counter.get_total_flops() == FORWARD
    out = model(torch.ones(B, IN))
    out.register_hook(count)
    out.sum().backward()
    assert counter.get_total_flops() == FORWARD


def test_counter_warns_that_the_inference_mode_it_was_entered_in_has_ended(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    with torch.inference_mode():
        counter.__enter__()
        model(torch.ones(B, IN))
    model(torch.ones(B, IN))
    with pytest.warns(UncountedWarning, match="the inference mode in which counting started"):
        counter.__exit__(None, None, None)
    assert counter.get_total_flops() == FORWARD


def test_counter_whose_inference_mode_has_ended_is_left_by_a_warning_as_an_error(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    with torch.inference_mode():
        counter.__enter__()
        model(torch.ones(B, IN))
    with pytest.raises(UncountedWarning, match="inference mode"):  # pytest's filter
        counter.__exit__(None, None, None)
    assert counter.get_total_flops() == FORWARD


def test_ended_inference_mode_does_not_hide_the_exception_of_the_program(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    with torch.inference_mode():
        counter.__enter__()
        model(torch.ones(B, IN))
    counter.__exit__(
        ValueError, ValueError(), None
    )  # no UncountedWarning, which is an error in tests
    assert counter.get_total_flops() == FORWARD


def test_counter_says_that_operators_after_its_inference_mode_may_have_passed_unseen() -> None:
    model = nn.Sequential(nn.Linear(IN, OUT), nn.Tanh(), nn.Linear(OUT, IN))
    with torch.inference_mode():
        counter = FlopCounterMode(model, display=False)
        counter.__enter__()
        model(torch.ones(B, IN))
    model(torch.ones(B, IN))
    with pytest.warns(UncountedWarning, match="inference mode"):
        counter.__exit__(None, None, None)


def test_counter_says_that_the_mode_within_which_it_was_entered_has_ended(
    counter: FlopCounterMode,
) -> None:
    """The end of a mode's block takes off the mode that was entered last, whichever it is."""
    mode = OperatorNames()
    with mode:
        counter.__enter__()
    torch.ones(B, IN).sum()
    with pytest.warns(UncountedWarning, match="backward pass or other mode"):
        counter.__exit__(None, None, None)
    assert _torch.pop_mode() is mode
    _torch.tell_of_modes()


def test_counter_of_a_thread_that_has_ended_is_left_in_another(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    def enter() -> None:
        counter.__enter__()
        model(torch.ones(B, IN))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    counter.__exit__(None, None, None)
    assert counter.get_total_flops() == FORWARD


def test_lost_counter_that_another_threads_collection_finds_leaves_nothing(
    model: nn.Module,
) -> None:
    is_lost, is_collected = threading.Event(), threading.Event()

    def lose() -> None:
        counter = FlopCounterMode(model, display=False)
        vars(counter)["itself"] = counter
        counter.__enter__()
        del counter
        is_lost.set()
        is_collected.wait()
        model(torch.ones(B, IN))

    thread = threading.Thread(target=lose)
    thread.start()
    is_lost.wait()
    gc.collect()
    is_left = not torch.nn.modules.module._global_forward_hooks
    is_collected.set()
    thread.join()
    assert is_left


def test_started_meter_is_not_stopped_in_an_inference_mode_within_its_step(
    model: nn.Module,
) -> None:
    meter = FlopMeter(model, torch.optim.SGD(model.parameters(), lr=0.1))
    meter.start()
    model(torch.ones(B, IN))
    with torch.inference_mode(), pytest.raises(WrongPlaceError):
        meter.stop()
    meter.stop()
    assert meter.steps_done == 0


# -- pauses ------------------------------------------------------------------------------------


def test_counter_paused_in_an_inference_mode_that_began_later_is_paused_after_it(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    with counter:
        with torch.inference_mode():
            model(torch.ones(B, IN))
            counter.pause()
            model(torch.ones(B, IN))
        model(torch.ones(B, IN))  # ones: an operator that is given no tensor
        counter.resume()
        model(torch.ones(B, IN))
    assert counter.get_total_flops() == 2 * FORWARD
    assert counter.profile.root.calls == 2


def test_counter_paused_in_a_backward_pass_that_began_later_is_paused_after_it(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    with counter:
        out = model(torch.ones(B, IN))
        out.register_hook(lambda _: counter.pause())
        out.backward(torch.ones(B, OUT))
        model(torch.ones(B, IN))
        counter.resume()
        model(torch.ones(B, IN))
    assert counter.get_total_flops() == 2 * FORWARD
    assert counter.profile.root.total("backward").flops == 0


@pytest.mark.parametrize("resumes", [False, True])
def test_counter_paused_and_resumed_in_an_inference_mode_is_left_outside(
    model: nn.Module, counter: FlopCounterMode, resumes: bool
) -> None:
    counter.__enter__()
    with torch.inference_mode():
        counter.pause()
        model(torch.ones(B, IN))
        if resumes:
            counter.resume()
            model(torch.ones(B, IN))
        with pytest.raises(WrongPlaceError):
            counter.__exit__(None, None, None)
    counter.__exit__(None, None, None)
    assert counter.get_total_flops() == resumes * FORWARD


def test_counter_paused_in_an_inference_mode_still_counts_in_other_threads(
    model: nn.Module, counter: FlopCounterMode
) -> None:
    is_paused, is_joined = threading.Event(), threading.Event()

    def run() -> None:
        with counter.in_thread():
            is_joined.set()
            is_paused.wait()
            model(torch.ones(B, IN))

    with counter:
        thread = threading.Thread(target=run)
        thread.start()
        is_joined.wait()
        with torch.inference_mode():
            counter.pause()
            is_paused.set()
            thread.join()
        with ThreadPoolExecutor(1) as pool, pytest.raises(WrongThreadError):
            pool.submit(counter.resume).result()
        counter.resume()
    assert counter.get_total_flops() == FORWARD


@pytest.mark.parametrize("action", ["stop_profile", "end_profile", "drop_profile", "start_profile"])
def test_profiler_is_not_stopped_in_an_inference_mode_that_began_later(
    model: nn.Module, action: str
) -> None:
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with torch.inference_mode():
        model(torch.ones(B, IN))
        with pytest.raises(WrongPlaceError):
            getattr(profiler, action)()
        model(torch.ones(B, IN))
    profiler.end_profile()
    assert profiler.get_total_flops() == 2 * FORWARD


# -- in the Python kernel of an operator, at whose end torch puts the mode back -------------------


@pytest.fixture
def call_within() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Return what calls a function in the Python kernel of an operator."""
    with torch.library._scoped_library("scopes", "FRAGMENT") as library:
        library.define("call(Tensor x) -> Tensor")
        wanted: list[Callable[[], None]] = []

        def kernel(x: torch.Tensor) -> torch.Tensor:
            wanted.pop()()
            return x.clone()

        library.impl("call", kernel, "CPU")

        def call(function: Callable[[], None]) -> None:
            wanted.append(function)
            torch.ops.scopes.call(torch.ones(1))

        yield call


def test_counter_is_not_left_in_the_kernel_of_an_operator(
    model: nn.Module,
    counter: FlopCounterMode,
    call_within: Callable[[Callable[[], None]], None],
) -> None:
    counter.__enter__()

    def leave() -> None:
        with pytest.raises(WrongPlaceError, match="operator"):
            counter.__exit__(None, None, None)

    call_within(leave)
    model(torch.ones(B, IN))
    with pytest.warns(UncountedWarning, match="scopes.call"):
        counter.__exit__(None, None, None)
    assert counter.get_total_flops() == FORWARD


def test_counter_paused_in_the_kernel_of_an_operator_is_paused_after_it(
    model: nn.Module,
    counter: FlopCounterMode,
    call_within: Callable[[Callable[[], None]], None],
) -> None:
    with pytest.warns(UncountedWarning, match="^no cost is known for scopes.call"), counter:
        call_within(counter.pause)
        model(torch.ones(B, IN))
        counter.resume()
        model(torch.ones(B, IN))
    assert counter.get_total_flops() == FORWARD


def test_counter_paused_and_resumed_in_the_kernel_of_an_operator_counts_once(
    model: nn.Module,
    counter: FlopCounterMode,
    call_within: Callable[[Callable[[], None]], None],
) -> None:
    def pause_and_resume() -> None:
        counter.pause()
        counter.resume()

    with pytest.warns(UncountedWarning, match="^no cost is known for scopes.call"), counter:
        call_within(pause_and_resume)
        model(torch.ones(B, IN))
    assert counter.get_total_flops() == FORWARD


def test_counter_that_is_entered_twice_goes_on_counting() -> None:
    x = torch.ones(3)
    with FlopCounterMode(display=False) as counter:
        x + 1
        with pytest.raises(AlreadyActiveError):
            counter.__enter__()
        x + 1
    assert counter.get_total_flops() == 2 * 3


def test_counter_that_was_not_entered_prints_as_its_repr() -> None:
    counter = FlopCounterMode(nn.Linear(3, 5))
    assert str(counter) == repr(counter)
