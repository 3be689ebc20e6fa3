"""The DeepSpeed-compatible face: parameters, return values, printouts, and what it leaves."""

from __future__ import annotations

import inspect
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from dispatch_flops import FlopsProfiler, get_model_profile, profile_model
from dispatch_flops.analysis.latency import inexact_latencies, measured_seconds
from dispatch_flops.errors import (
    DispatchFlopsError,
    NotProfiledError,
    TargetError,
    UncountedWarning,
    WrongThreadError,
)


class Net(nn.Module):
    """Batch B: MACs B·(5·7 + 7·3) in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.drop = nn.Dropout(0.5)
        self.b = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.b(self.drop(self.a(x))) * scale

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(x) + self(x)


class NoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))

    def forward(self) -> torch.Tensor:
        return self.w @ self.w


B = 2
MACS = B * (5 * 7 + 7 * 3)
FLOPS = 2 * MACS + B * (7 + 3) + B * 3  # biases, and the scaling of the output
PARAMS = 5 * 7 + 7 + 7 * 3 + 3


def test_numbers_and_strings() -> None:
    numbers = get_model_profile(Net(), (B, 5), print_profile=False, as_string=False)
    assert numbers == (FLOPS, MACS, PARAMS)
    strings = get_model_profile(Net(), (B, 5), print_profile=False)
    assert strings == (f"{FLOPS} ", f"{MACS} MACs", f"{PARAMS}")  # DeepSpeed's empty unit


def test_inputs_by_every_way() -> None:
    x = torch.ones(B, 5)
    for given in ({"args": [x]}, {"kwargs": {"x": x}}, {"args": (x,), "kwargs": {"scale": 2.0}}):
        assert get_model_profile(Net(), print_profile=False, as_string=False, **given) == (
            FLOPS,
            MACS,
            PARAMS,
        )


def test_a_model_without_inputs() -> None:
    _, macs, params = get_model_profile(NoInput(), print_profile=False, as_string=False)
    assert (macs, params) == (3 * 3 * 3, 3 * 3)


@pytest.mark.parametrize("name", ["mode", "func_name"])
def test_another_method(name: str) -> None:
    _, macs, _ = get_model_profile(
        Net(), (B, 5), print_profile=False, as_string=False, **{name: "twice"}
    )
    assert macs == 2 * MACS


def test_meta_counts_the_same_and_has_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    before = dict(model.named_parameters())
    assert get_model_profile(model, (B, 5), as_string=False, device="meta") == (
        FLOPS,
        MACS,
        PARAMS,
    )
    assert all(p is before[name] for name, p in model.named_parameters())
    assert "fwd latency:" in (out := capsys.readouterr().out)
    assert "n/a" in next(line for line in out.splitlines() if line.startswith("fwd latency:"))


def test_ignored_modules_leave_their_work_out_and_their_parameters_in() -> None:
    _, macs, params = get_model_profile(
        Net(), (B, 5), print_profile=False, as_string=False, ignore_modules=[nn.Linear]
    )
    assert (macs, params) == (0, PARAMS)


def test_backward_is_counted_and_gradients_are_put_back() -> None:
    model = Net()
    model.a.weight.grad = torch.full((7, 5), 3.0)
    profile = profile_model(model, (B, 5), backward=True)
    # a's input needs no gradient
    assert profile.total("backward").macs == B * 5 * 7 + 2 * B * 7 * 3
    assert torch.equal(model.a.weight.grad, torch.full((7, 5), 3.0))
    assert model.b.weight.grad is None
    assert (
        profile.timing.latency("forward") is not None
        and profile.timing.latency("backward") is not None
    )


def test_backward_is_the_same_however_often_it_ran_before() -> None:
    x = torch.ones(B, 5, requires_grad=True)
    profiles = [profile_model(Net(), args=[x], backward=True, warm_up=n) for n in (0, 2)]
    assert profiles[0].by_operator() == profiles[1].by_operator()
    assert x.grad is None


def test_a_compiled_model_has_its_own_latency_and_eager_counts() -> None:
    model = torch.compile(Net(), backend="eager")
    profile = profile_model(model, (B, 5))
    assert profile.root.total("forward").macs == MACS
    assert "compiled" in (profile.timing.method or "")
    assert profile.node("a").latency_s is not None


def test_nothing_is_left_changed(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net().train()
    model.a.eval()
    stdout, state = sys.stdout, torch.get_rng_state()
    flags = [m.training for m in model.modules()]
    attributes = {name: set(vars(m)) for name, m in model.named_modules()}
    get_model_profile(model, (B, 5), warm_up=3, repeats=2)
    assert sys.stdout is stdout
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == flags
    assert {name: set(vars(m)) for name, m in model.named_modules()} == attributes


class Draws(nn.Module):
    """Draws from every generator that programs use."""

    def forward(self) -> Any:
        return torch.rand(2) + random.random() + float(np.random.rand())


def test_what_a_model_draws_is_drawn_again() -> None:
    states = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    profile_model(Draws())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert repr(np.random.get_state()) == states[2]


def test_modules_tell_how_runs_of_them_vary() -> None:
    """A module whose runs take 1 and 31 ms by turns varies by 15/16; one run tells nothing."""

    class Uneven(nn.Module):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            time.sleep(0.031 if self.runs % 2 else 0.001)
            return x

    model = nn.Sequential(Uneven(), nn.Identity())
    profile = profile_model(model, args=[torch.ones(1)], repeats=2)
    node = profile.node("0")
    assert node.latency_s is not None and node.latency_spread_s is not None
    assert node.latency_spread_s > 0.1 * node.latency_s
    assert "0" in inexact_latencies(profile.root, profile.timing)
    assert profile_model(model, args=[torch.ones(1)]).node("0").latency_spread_s is None


def test_flags_come_back_after_an_exception() -> None:
    model = Net().train()
    with pytest.raises(RuntimeError, match="shapes"):
        get_model_profile(model, (B, 6), print_profile=False)
    assert all(m.training for m in model.modules())


def test_output_goes_to_the_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "profile.txt"
    get_model_profile(Net(), (B, 5), output_file=file)
    assert capsys.readouterr().out == ""
    assert "DeepSpeed Flops Profiler" in file.read_text()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"input_shape": (2, -1)}, "input_shape"),
        ({"input_shape": "2,5"}, "input_shape"),
        ({"input_shape": (2, 5), "args": [1]}, "input_shape and args"),
        ({"input_shape": (2, 5), "mode": "nothing"}, "mode='nothing'"),
        ({"input_shape": (2, 5), "device": "cuda"}, "device='cuda'"),
    ],
)
def test_bad_use_is_named(given: dict, named: str) -> None:
    with pytest.raises(TargetError, match=named):
        get_model_profile(Net(), print_profile=False, **given)


def test_a_model_must_be_a_module() -> None:
    with pytest.raises(TargetError, match="nn.Module"):
        get_model_profile(lambda x: x, (2, 5))  # type: ignore[arg-type]


# -- FlopsProfiler ------------------------------------------------------------------------------


def test_a_training_step(capsys: pytest.CaptureFixture[str]) -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss = model(torch.ones(B, 5)).sum()
    profiler.stop_profile()
    loss.backward()  # outside: not counted
    assert profiler.get_total_macs() == MACS
    assert profiler.get_total_macs(as_string=True) == f"{MACS} MACs"
    assert profiler.get_total_params() == PARAMS
    assert profiler.get_total_params(as_string=True) == f"{PARAMS}"
    assert profiler.get_total_duration() > 0
    profiler.print_model_profile(profile_step=5, top_modules=2)
    out = capsys.readouterr().out
    assert "Profile Summary at step 5:" in out
    assert "(a): Linear(" in out
    profiler.print_model_aggregated_profile(top_modules=1)
    assert "depth 1:" in capsys.readouterr().out
    profiler.end_profile()
    assert profiler.get_total_macs() == MACS  # nothing is lost at the end


def test_forward_alone_is_what_the_totals_are_of() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(torch.ones(B, 5)).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS
    assert profiler.profile.total("backward").macs == B * 5 * 7 + 2 * B * 7 * 3


def test_repeated_starts_never_add_up() -> None:
    model, x = Net(), torch.ones(B, 5)
    profiler = FlopsProfiler(model)
    for _ in range(3):
        profiler.start_profile()
        profiler.start_profile()
        model(x)
        profiler.stop_profile()
        assert profiler.get_total_macs() == MACS
    profiler.start_profile()
    model(x)
    profiler.reset_profile()
    model(x)
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS
    profiler.end_profile()


@torch.library.custom_op("dispatch_flops_profiler::unpriced", mutates_args=())
def unpriced(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Unpriced(Net):
    """Net, and an operator that has no known cost."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        unpriced(x)
        return super().forward(x, scale)


@pytest.mark.parametrize("stop", [FlopsProfiler.stop_profile, FlopsProfiler.end_profile])
def test_a_warning_that_is_an_error_is_raised_once(stop: Any) -> None:
    profiler = FlopsProfiler(Unpriced())
    for _ in range(2):
        profiler.start_profile()
        profiler.model(torch.ones(B, 5))
        with pytest.raises(UncountedWarning, match="unpriced"):
            stop(profiler)
        stop(profiler)
        assert not _get_current_dispatch_mode_stack()
        assert profiler.get_total_macs() == MACS
    profiler.end_profile()
    assert not profiler.started


def test_what_is_forgotten_is_not_warned_of() -> None:
    profiler = FlopsProfiler(Unpriced())
    for forget in (profiler.start_profile, profiler.reset_profile, profiler.drop_profile):
        profiler.start_profile()
        profiler.model(torch.ones(B, 5))
        forget()
    assert not _get_current_dispatch_mode_stack()
    assert not profiler.started
    with pytest.raises(NotProfiledError):
        _ = profiler.profile


def test_a_reset_profiler_stays_paused() -> None:
    model, x = Net(), torch.ones(B, 5)
    profiler = FlopsProfiler(model)
    for resumed in (False, True):
        profiler.start_profile()
        model(x)
        profiler.pause_profile()
        profiler.reset_profile()
        model(x)
        if resumed:
            profiler.resume_profile()
            model(x)
        profiler.stop_profile()
        assert profiler.get_total_macs() == resumed * MACS


def test_stopping_in_another_thread_stops_nothing() -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    with ThreadPoolExecutor(1) as pool, pytest.raises(WrongThreadError):
        pool.submit(profiler.stop_profile).result()
    profiler.model(torch.ones(B, 5))
    profiler.end_profile()
    assert profiler.get_total_macs() == MACS


def test_ignore_list() -> None:
    model = Net()
    profiler = FlopsProfiler(model)
    profiler.start_profile(ignore_list=[nn.Linear])
    model(torch.ones(B, 5))
    profiler.stop_profile()
    assert profiler.get_total_macs() == 0


def test_asking_too_early_says_so() -> None:
    profiler = FlopsProfiler(Net())
    for ask in (
        profiler.get_total_flops,
        profiler.print_model_profile,
        profiler.print_model_aggregated_profile,
    ):
        with pytest.raises(NotProfiledError, match="start_profile"):
            ask()


def test_printing_before_any_forward_divides_by_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    profiler.stop_profile()
    profiler.print_model_profile()
    assert "n/a" in capsys.readouterr().out


def test_a_notebook_asks_the_profile_for_its_html() -> None:
    html = profile_model(Net(), (B, 5))._repr_html_()  # type: ignore[attr-defined]
    assert "<table" in html and "Net" in html


def test_parameters_are_deepspeeds() -> None:
    theirs = (
        "model input_shape args kwargs print_profile detailed module_depth top_modules warm_up "
        "as_string output_file ignore_modules mode"
    ).split()
    assert list(inspect.signature(get_model_profile).parameters)[: len(theirs)] == theirs
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(get_model_profile).parameters.items()
    }
    assert [defaults[n] for n in ("print_profile", "detailed", "module_depth", "top_modules")] == [
        True,
        True,
        -1,
        1,
    ]
    assert [defaults[n] for n in ("warm_up", "as_string", "mode")] == [1, True, "forward"]


def test_operators_have_times_where_they_are_asked_for() -> None:
    for asked in (False, True):
        profile = profile_model(Net(), (B, 5), backward=True, operator_latency=asked)
        times = {op.op: op.latency_s for op in profile.op_totals()}
        assert all((seconds is not None) is asked for seconds in times.values())
        assert (profile.root.latency("backward") is not None) is asked
        assert any("operators' times" in note for note in profile.notes) is asked
        assert profile.timing.method is not None and "own" in profile.timing.method
        assert profile.root.latency_s == pytest.approx(profile.timing.latency("forward"))


def test_nothing_takes_time_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(Net(), (B, 5), device="meta", operator_latency=True)
    assert "Time" not in capsys.readouterr().out
    profiler = FlopsProfiler(Net().to("meta"))
    profiler.start_profile()
    profiler.model(torch.ones(B, 5, device="meta")).sum().backward()
    profiler.stop_profile()
    assert profiler.get_total_macs() == MACS
    assert profiler.get_total_duration() is None
    assert profiler.profile.timing.latency("backward") is None


class Twice(nn.Module):
    """One linear layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(3, 3)
        self.a, self.b = nn.Sequential(layer), nn.Sequential(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("make", "ignored", "macs"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7)), nn.Linear, 0),
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7)), nn.ReLU, 2 * 50),
        (lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU()), nn.Sequential, 0),
        (lambda: torch.compile(nn.Sequential(nn.Linear(3, 5)), backend="eager"), nn.Linear, 0),
        (Twice, nn.Linear, 0),
    ],
)
def test_modules_of_a_class_are_left_out(make: Any, ignored: type[nn.Module], macs: int) -> None:
    profile = profile_model(make(), (2, 3), ignore_modules=[ignored]).check()
    assert profile.total().macs == macs
    assert "at the user's wish" in profile.notes[-1]


def test_a_model_without_tensors_on_the_meta_device() -> None:
    profile = profile_model(nn.ReLU(), (2, 3), device="meta")
    assert profile.total().flops == 2 * 3
    assert profile.run.device == "meta"
    assert profile.root.latency_s is None


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Sum(nn.Module):
    def forward(self, pair: Pair) -> torch.Tensor:
        return pair.x + pair.y


@pytest.mark.parametrize("device", [None, "meta"])
def test_inputs_keep_their_class(device: str | None) -> None:
    pair = Pair(torch.ones(5), torch.ones(5))
    assert profile_model(Sum(), args=[pair], device=device).total().flops == 5


@pytest.mark.parametrize("args", [torch.ones(2, 5), "x", 3])
def test_args_is_a_list(args: Any) -> None:
    with pytest.raises(TargetError, match="args is a .*list"):
        profile_model(Net(), args=args)


def test_a_frozen_torchscript_model() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7)).eval()
    frozen = torch.jit.freeze(torch.jit.script(model))
    profile = profile_model(frozen, (2, 3))
    assert profile.total().macs == 2 * (3 * 5 + 5 * 7)
    assert not hasattr(frozen, "training")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeats": 0}, "repeats=0: pass an int of at least 1"),
        ({"warm_up": -1}, "warm_up=-1: pass an int of at least 0"),
        ({"causal": "quarter"}, "causal='quarter'"),
        ({"device": "cuda"}, "device='cuda': only"),
        ({"mode": None}, "mode=None"),
        ({"kwargs": [1]}, "kwargs is a list"),
        ({"ignore_modules": ["Linear"]}, "such as nn.Linear"),
        ({"ignore_modules": "Linear"}, "such as nn.Linear"),
        ({"ignore_modules": [nn.Linear(2, 2)]}, "such as nn.Linear"),
        ({"input_shape": (True, 5)}, "tuple of ints"),
        ({"input_shape": (2, 5.0)}, "tuple of ints"),
        ({"input_shape": 5}, "tuple of ints"),
        ({"custom_mapping": [1]}, "a list is no mapping"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DispatchFlopsError, match=words):
        profile_model(Net(), **{"input_shape": (B, 5), **options})


def test_options_of_the_counter_are_taken() -> None:
    counted = get_model_profile(
        Net(), (B, 5), print_profile=False, as_string=False,
        custom_mapping={torch.ops.aten.addmm: lambda *a, out, **k: 1000},
    )  # fmt: skip
    assert counted[0] == 2 * 1000 + B * 3
    with pytest.raises(TypeError, match="no_such"):
        get_model_profile(Net(), (B, 5), no_such=1)

    class Routed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x if x.sum() > 0 else x

    profile = profile_model(Routed(), (B, 5), device="meta", meta_value=1)
    assert profile.by_operator()["aten.add.Tensor"].calls == 1


@pytest.mark.parametrize("ignored", [nn.Linear, [nn.Linear], (nn.Linear,)])
def test_a_class_to_leave_out_may_stand_alone(ignored: Any) -> None:
    assert profile_model(Net(), (B, 5), ignore_modules=ignored).total().macs == 0


def test_a_device_and_sizes_of_other_kinds() -> None:
    assert profile_model(Net(), (B, 5), device=torch.device("meta")).total().macs == MACS
    assert profile_model(Net(), np.array([B, 5])).total().macs == MACS


def test_a_model_of_complex_numbers() -> None:
    model = nn.Linear(5, 7, dtype=torch.complex64)
    assert profile_model(model, (B, 5)).total().macs == 4 * B * 5 * 7


def test_the_scope_is_amended_when_the_profile_is_done() -> None:
    profiler = FlopsProfiler(Net())
    profiler.start_profile()
    with pytest.raises(NotProfiledError, match="stop_profile"):
        profiler.amend_scope(batch_size=B)
    profiler.stop_profile()
    profiler.amend_scope(batch_size=B)
    assert profiler.profile.run.batch_size == B


def test_a_model_of_which_no_operator_ran(capsys: pytest.CaptureFixture[str]) -> None:
    get_model_profile(nn.Identity(), (B, 5))
    assert "Nothing has run" not in capsys.readouterr().out
    assert measured_seconds(profile_model(nn.Identity(), (B, 5)))[1] == "forward"


def test_a_model_that_wants_an_input_says_how_to_give_one() -> None:
    with pytest.raises(TypeError) as raised:
        profile_model(nn.Linear(2, 3))
    assert raised.value.__notes__ == ["It was given no input: pass input_shape, args or kwargs."]
    with pytest.raises(TypeError) as raised:
        profile_model(nn.Linear(2, 3), args=[torch.ones(2)], kwargs={"nope": 1})
    assert not hasattr(raised.value, "__notes__")
