"""A counter changes neither the program nor the process, however its block is left."""

from __future__ import annotations

import copy
import gc
import json
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.errors import AlreadyActiveError, UncountedOpsError, UncountedWarning
from tests.helpers.attributing import plain, rows, train
from tests.helpers.untouched import (
    MODELS,
    EmptyMode,
    ProgramError,
    Tail,
    model_state,
    process_state,
    same_values,
    values,
)

aten = torch.ops.aten
Exit = tuple[Callable[[], Tail], dict[str, Any], type[BaseException] | None]


def broken(*args: Any, **kwargs: Any) -> int:
    raise ZeroDivisionError("a formula")


EVERYTHING = dict.fromkeys((aten.addmm, aten.mm, aten.add, aten.mul, aten.sum, aten.bmm), broken)
# The last layer, options of the counter, and what reaches the user.
EXITS: dict[str, Exit] = {
    "success": (Tail, {}, None),
    "layer raises": (lambda: Tail(ProgramError), {}, ProgramError),
    "interrupt": (lambda: Tail(KeyboardInterrupt), {}, KeyboardInterrupt),
    "backward raises": (lambda: Tail(backward=True), {}, ProgramError),
    "formula raises": (Tail, {"custom_mapping": EVERYTHING}, None),
    "strict": (Tail, {"custom_mapping": EVERYTHING, "strict": True}, UncountedOpsError),
}
# A training step, and ways to run forward alone.
RUNS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "training": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


COMBINATIONS = [
    (name, leave, how)
    for name in MODELS
    for leave in EXITS
    for how in RUNS
    if how == "training" or leave != "backward raises"
]


def seeded(name: str, tail: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(MODELS[name](), tail())


def run(model: nn.Module, x: Tensor, how: str) -> Tensor:
    with RUNS[how]():
        out = model(x)
        if how == "training":
            out.float().square().sum().backward()
    return out.detach()


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """What torch imports and registers by itself at first use is not the counter's doing."""
    for build in MODELS.values():
        run(build(), torch.randn(4, 6), "training")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::dispatch_flops.profilers.counter.UncountedWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("name", "leave", "how"), COMBINATIONS)
def test_program_under_the_counter_leaves_nothing_behind(name: str, leave: str, how: str) -> None:
    tail, options, error = EXITS[leave]
    model, twin = (seeded(name, tail) for _ in range(2))
    x = torch.randn(4, 6)
    before, random = process_state(), torch.get_rng_state()
    written = model_state(model)

    found = expected = torch.empty(0)
    raised: BaseException | None = None
    try:
        with FlopCounterMode(model, display=False, **options):
            found = run(model, x, how)
    except (ProgramError, KeyboardInterrupt, UncountedOpsError) as caught:
        raised = caught
    assert type(raised) is (error or type(None))

    assert model_state(model) == written
    after = process_state()
    assert {key: after.get(key) for key, value in before.items() if after.get(key) != value} == {}

    drawn = torch.get_rng_state()
    torch.set_rng_state(random)
    try:
        with EmptyMode():
            expected = run(twin, x, how)
    except (ProgramError, KeyboardInterrupt):
        assert error in (ProgramError, KeyboardInterrupt)
    assert torch.equal(drawn, torch.get_rng_state())
    assert torch.equal(found, expected) or error is UncountedOpsError
    assert same_values(values(model), values(twin))


@pytest.mark.parametrize("name", MODELS)
def test_counter_in_identical_runs_gives_identical_profiles(name: str) -> None:
    model = MODELS[name]()
    x = torch.randn(4, 6)
    texts = set()
    for _ in range(3):
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        with FlopCounterMode(model, display=False) as counter:
            run(model, x, "training")
        data = counter.profile.to_dict()
        assert data["run"].pop("date")  # a second may pass between two runs
        texts.add(json.dumps(data))
    assert len(texts) == 1


def test_counter_entered_again_starts_from_zero() -> None:
    model = plain(3, 5)
    counter = FlopCounterMode(model, display=False)
    totals = []
    for n in (1, 3, 2):
        with counter:
            for _ in range(n):
                model(rows(2, 3))
        totals.append(counter.get_total_macs())
    assert totals == [2 * 3 * 5 * n for n in (1, 3, 2)]


def test_counter_entered_twice_raises_and_leaves_nothing_behind() -> None:
    model = plain(3, 5)
    before = process_state()
    counter = FlopCounterMode(model, display=False)
    with counter:
        inside = process_state()
        with pytest.raises(AlreadyActiveError), counter:
            pass
        assert process_state() == inside
        model(rows(2, 3))
    assert process_state() == before
    assert counter.get_total_macs() == 2 * 3 * 5


def test_counter_that_fails_to_enter_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks are in place already when the mode fails to be pushed."""
    before = process_state()
    with monkeypatch.context() as patch:
        patch.setattr("dispatch_flops.counting.dispatch_mode.CountingMode.__enter__", broken)
        counter = FlopCounterMode(plain(3, 5), display=False)
        with pytest.raises(ZeroDivisionError), counter:
            pass
    assert process_state() == before
    with counter:
        pass


def test_counters_when_nested_both_count() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Tanh())
    outer = FlopCounterMode(model, display=False)
    inner = FlopCounterMode(model, display=False)
    with outer:
        train(model, rows(2, 3))
        with inner:
            train(model, rows(2, 3))
    assert inner.get_total_macs() == 2 * (2 * 3 * 5)
    assert outer.get_total_macs() == 2 * inner.get_total_macs()
    assert inner.profile.root.calls == 1
    assert outer.profile.root.calls == 2
    twice = {fqn: cost * 2 for fqn, cost in inner.profile.by_module().items()}
    assert outer.profile.by_module() == twice


def test_counters_left_out_of_order_leave_nothing() -> None:
    model, before = plain(3, 5), process_state()
    outer, inner = (FlopCounterMode(model, display=False) for _ in range(2))
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    train(model, rows(2, 3))
    inner.__exit__(None, None, None)
    assert (outer.get_total_macs(), inner.get_total_macs()) == (0, 2 * (2 * 3 * 5))
    assert process_state() == before


def test_counter_in_whose_block_a_mode_of_another_thread_ends_leaves_nothing() -> None:
    for mode in (EmptyMode(), FlopCounterMode(display=False)):
        before = process_state()
        is_entered, is_to_end = threading.Event(), threading.Event()

        def run_in(
            mode: Any = mode, begun: threading.Event = is_entered, end: threading.Event = is_to_end
        ) -> None:
            with mode:
                begun.set()
                end.wait()

        thread = threading.Thread(target=run_in)
        thread.start()
        is_entered.wait()
        with FlopCounterMode(display=False):
            is_to_end.set()
            thread.join()
        assert process_state() == before


def test_counters_when_nested_under_inference_mode_agree() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Softmax(-1))
    with (
        FlopCounterMode(model, display=False) as outer,
        FlopCounterMode(model, display=False) as inner,
        torch.inference_mode(),
    ):
        model(rows(2, 3))
    assert outer.profile.by_module() == inner.profile.by_module()
    assert inner.profile.node("0").total().macs == 2 * 3 * 5


def test_counter_nested_with_another_mode_counts_everything() -> None:
    model = plain(3, 5)
    for first, second in ((0, 1), (1, 0)):
        managers = [FlopCounterMode(model, display=False), EmptyMode()]
        with managers[first], managers[second]:
            train(model, rows(2, 3))
        assert managers[0].get_total_macs() == 2 * (2 * 3 * 5)


def test_autograd_graph_inside_the_block_is_freed_at_once() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    gc.disable()  # no cycle may be needed to keep them apart
    try:
        with FlopCounterMode(model, display=False):
            out = model(rows(2, 3, grad=True))
            saved = weakref.ref(out.grad_fn._saved_result.untyped_storage())
            held = weakref.ref(out)
            del out
            assert (held(), saved()) == (None, None)
            loss = model(rows(2, 3)).sum()
            loss.backward()
            held = weakref.ref(loss)
            del loss
            assert held() is None
    finally:
        gc.enable()


def test_profile_after_the_block_does_not_keep_the_model() -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        train(model, rows(2, 3))
    profile = counter.profile
    alive = weakref.ref(model)
    del model, counter
    gc.collect()
    assert alive() is None
    assert profile.total().macs == 2 * 2 * 3 * 5


def test_module_made_in_the_block_is_freed() -> None:
    with FlopCounterMode(display=False):
        model = plain(3, 5)
        model(rows(2, 3))
        alive = weakref.ref(model)
        del model
        gc.collect()
        assert alive() is None


def test_counter_that_raises_or_does_not_display_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, display=False):
        model(rows(2, 3))
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ProgramError), FlopCounterMode(model):
        raise ProgramError
    assert capsys.readouterr() == ("", "")


def test_warning_of_the_counter_keeps_the_filters() -> None:
    model = plain(3, 5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        filters = list(warnings.filters)
        with FlopCounterMode(model, display=False, custom_mapping={aten.mm: broken}):
            model(rows(2, 3))
        assert warnings.filters == filters
    assert [w.category for w in caught] == [UncountedWarning]
    assert caught[0].filename == __file__


def test_profiled_model_can_be_copied() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    with FlopCounterMode(model, display=False):
        train(model, rows(2, 3))
        copied = copy.deepcopy(model)
    assert same_values(model.state_dict(), copied.state_dict())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_packed_weights_under_the_counter_are_not_cached() -> None:
    x = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)
    weight = torch.quantize_per_tensor(torch.ones(5, 3), 0.1, 0, torch.qint8)
    with FlopCounterMode(display=False) as counter:
        for _ in range(2):
            packed = torch.ops.quantized.linear_prepack(weight, None)
            torch.ops.quantized.linear(x, packed, 0.1, 0)
        plan = counter._active["session"]._mode._plans[id(torch.ops.quantized.linear.default)]
        assert not plan.calls.by_signature  # its keys would be the packed weights themselves
    assert counter.get_total_macs() == 2 * 2 * 3 * 5


def test_block_left_inside_catch_warnings_keeps_the_filters() -> None:
    before = list(warnings.filters)
    counter = FlopCounterMode(display=False)
    counter.__enter__()
    with warnings.catch_warnings():
        counter.__exit__(None, None, None)
        assert warnings.filters == before
    assert warnings.filters == before
