"""``profile_model``: what it measures, counts and excludes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops import FlopCounterMode, get_model_profile, profile_model
from dispatch_flops.analysis.latency import inexact_latencies
from dispatch_flops.errors import (
    DispatchFlopsError,
    UncountedOpsError,
    UncountedWarning,
)
from dispatch_flops.profilers import model as model_profiler
from tests.helpers.small_net import MACS, B, Net


def test_profile_model_with_backward_counts_it_and_restores_gradients() -> None:
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


def test_profile_model_with_backward_does_not_depend_on_warm_up() -> None:
    x = torch.ones(B, 5, requires_grad=True)
    profiles = [profile_model(Net(), args=[x], backward=True, warm_up=n) for n in (0, 2)]
    assert profiles[0].by_operator() == profiles[1].by_operator()
    assert x.grad is None


def test_profile_model_with_backward_holds_the_gradient_of_a_sum() -> None:
    """One number, expanded. The product with it makes it contiguous, and holds that meanwhile."""
    rows, ins, outs, size = 11, 5, 7, 4
    model, x = nn.Linear(ins, outs), torch.ones(rows, ins)
    profile = profile_model(model, args=[x], backward=True, memory=True)
    parameters, inputs, output = outs * ins + outs, rows * ins, rows * outs
    assert profile.memory is not None
    assert dict(profile.memory.by_role()) == {
        "parameters": size * parameters,
        "inputs": size * inputs,
        "activations": size * (output + 1),
        "gradients": size * outs * ins,
        "workspace": size * output,
    }


def test_profile_model_with_backward_counts_as_backward_of_a_sum() -> None:
    model, x = Net().eval(), torch.ones(B, 5)
    profile = profile_model(model, args=[x], backward=True)
    with FlopCounterMode(model, display=False) as counter:
        model(x).sum().backward()
    assert profile.total("backward") == counter.profile.total("backward")


@pytest.mark.filterwarnings("ignore:Sparse .* support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_profile_model_with_backward_of_a_sparse_output(layout: torch.layout) -> None:
    class Sparse(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).to_sparse(layout=layout)

    profile = profile_model(Sparse(5, 7), args=[torch.ones(3, 5)], backward=True)
    assert profile.total("backward").macs == 3 * 5 * 7


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_profile_model_with_backward_of_an_output_that_cannot_be_expanded(
    layout: torch.layout,
) -> None:
    class Nested(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return torch.nested.as_nested_tensor([y, y], layout=layout)

    profile = profile_model(Nested(5, 7), args=[torch.ones(3, 5)], backward=True)
    assert profile.total("backward").macs == 3 * 5 * 7


@pytest.mark.parametrize(("whole_s", "backward_s"), [(7.0, 5.0), (1.5, 0.0)])
def test_profile_model_with_backward_takes_the_time_beyond_that_of_forward(
    whole_s: float, backward_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((2.0, whole_s))
    monkeypatch.setattr(model_profiler, "time_calls", lambda *_, **__: (next(seconds), 0.0))
    timing = profile_model(Net(), (B, 5), backward=True).timing
    assert (timing.latency("forward"), timing.latency("backward")) == (2.0, backward_s)


def test_profile_model_of_compiled_model_has_compiled_latency_and_eager_counts() -> None:
    model = torch.compile(Net(), backend="eager")
    profile = profile_model(model, (B, 5))
    assert profile.root.total("forward").macs == MACS
    assert "compiled" in (profile.timing.method or "")
    assert profile.node("a").latency_s is not None


def test_latency_of_a_model_that_calls_a_compiled_function_is_of_compiled_code() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = torch.compile(torch.relu, backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.activation(x)

    assert "compiled" in (profile_model(Calls(), (B, 5)).timing.method or "")
    assert "compiled" not in (profile_model(Net(), (B, 5)).timing.method or "")


def test_profile_model_with_repeats_gives_each_module_a_spread() -> None:
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


def test_profile_in_a_notebook_has_html() -> None:
    html = profile_model(Net(), (B, 5))._repr_html_()  # type: ignore[attr-defined]
    assert "<table" in html and "Net" in html


def test_profile_model_with_operator_latency_times_operators() -> None:
    for asked in (False, True):
        profile = profile_model(Net(), (B, 5), backward=True, operator_latency=asked)
        times = {op.op: op.latency_s for op in profile.op_totals()}
        assert all((seconds is not None) is asked for seconds in times.values())
        # the counting pass times modules, too, but its times do not add to those of the timed pass
        assert all(list(node.seconds) == ["forward"] for node in profile.root.walk() if node.calls)
        assert not profile.outside.seconds
        assert any("operator latencies" in note for note in profile.notes) is asked
        assert profile.timing.method is not None and "separate pass" in profile.timing.method
        assert profile.root.latency_s == pytest.approx(profile.timing.latency("forward"))


class Encoder(nn.Module):
    """A product of its own before a layer, in a method besides forward and in its call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 7))
        self.layer = nn.Linear(7, 3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x @ self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


@pytest.mark.parametrize("mode", ["forward", "encode"])
def test_operators_of_a_method_are_the_models_own(mode: str) -> None:
    profile = profile_model(Encoder(), (B, 5), mode=mode, backward=True).check()
    assert profile.root.own("forward").macs == B * 5 * 7
    assert profile.root.total("forward").macs == B * 5 * 7 + B * 7 * 3
    assert profile.root.own("backward").macs == B * 5 * 7  # none for the input
    assert profile.outside.own().flops == 0
    assert profile.root.latency_s == profile.timing.latency("forward")
    counted = get_model_profile(Encoder(), (B, 5), mode=mode, print_profile=False, as_string=False)
    assert counted[1] == B * 5 * 7 + B * 7 * 3


def test_time_of_a_method_is_not_that_of_the_modules_it_calls() -> None:
    class Sleeping(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.001)
            return x

    class Generating(nn.Sequential):
        def generate(self, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.1)
            return self(x)

    profile = profile_model(Generating(Sleeping()), (B, 5), mode="generate")
    layer, whole = profile.node("0").latency_s, profile.root.latency_s
    assert layer is not None and whole is not None
    assert layer < whole / 2


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
def test_ignore_modules_excludes_modules_of_the_class(
    make: Any, ignored: type[nn.Module], macs: int
) -> None:
    profile = profile_model(make(), (2, 3), ignore_modules=[ignored]).check()
    assert profile.total().macs == macs
    assert "excluded by ignore_modules" in profile.notes[-1]


def test_strict_profile_has_known_costs_outside_of_excluded_modules() -> None:
    with torch.library._scoped_library("strict", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CPU")

        class Twice(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                return torch.ops.strict.twice(x)

        model = nn.Sequential(nn.Linear(3, 5, bias=False), Twice())
        with pytest.warns(UncountedWarning, match="strict.twice"):
            profile = profile_model(model, (2, 3), ignore_modules=[Twice], strict=True)
        assert profile.total().macs == 2 * 3 * 5
        with (
            pytest.warns(UncountedWarning),
            pytest.raises(UncountedOpsError, match=r"no cost is known for strict.twice.* \(1 call"),
        ):
            profile_model(model, (2, 3), ignore_modules=[nn.Linear], strict=True)


def test_note_on_excluded_modules_says_that_latencies_include_them() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU())
    profile = profile_model(model, (2, 3), ignore_modules=[nn.Linear])
    note = "excluded by ignore_modules: 0; latencies of the modules above include theirs"
    assert profile.notes[-1] == note
    assert profile.node("0").latency_s is None
    assert profile.root.latency_s == pytest.approx(profile.timing.latency("forward"))


def test_profile_model_without_tensors_on_meta_has_device_meta() -> None:
    profile = profile_model(nn.ReLU(), (2, 3), device="meta")
    assert profile.total().flops == 2 * 3
    assert profile.run.device == "meta"
    assert profile.root.latency_s is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"repeats": 0}, "repeats=0: pass an int of at least 1"),
        ({"warm_up": -1}, "warm_up=-1: pass an int of at least 0"),
        ({"notify": 5}, "notify=5: pass a function that is told what runs"),
        ({"causal": "quarter"}, "causal='quarter'"),
        ({"device": "cuda"}, "device='cuda': only"),
        ({"mode": None}, "mode=None"),
        ({"kwargs": [1]}, "kwargs is of type list"),
        ({"ignore_modules": ["Linear"]}, r"ignore_modules=\['Linear'\]: pass a list of module"),
        ({"ignore_modules": "Linear"}, "ignore_modules='Linear': pass a list of module"),
        ({"ignore_modules": [nn.Linear(2, 2)]}, "ignore_modules=.*: pass a list of module"),
        ({"ignore_modules": 5}, "ignore_modules=5: pass a list of module"),
        ({"input_shape": (True, 5)}, "tuple of ints"),
        ({"input_shape": (2, 5.0)}, "tuple of ints"),
        ({"input_shape": 5}, "tuple of ints"),
        ({"input_shape": (10**11, 10**11)}, "cannot be made, pass smaller sizes: .*overflow"),
        ({"input_shape": (2, 10**19), "device": "meta"}, "cannot be made, pass smaller sizes"),
        (
            {"input_shape": torch.ones(2, 5)},
            r"Tensor; pass the inputs themselves as args=\[x\]",
        ),
        ({"input_shape": torch.tensor([2, 5])}, "is a Tensor; pass the inputs"),
        ({"custom_mapping": [1]}, "custom_mapping: formulas are .* of type list; pass a dict"),
        ({"custom_mapping": 0}, "custom_mapping: formulas are .* of type int; pass a dict"),
        ({"mode": 0}, "mode=0: Net has no method"),
        ({"meta_value": [1]}, r"meta_value=\[1\]: pass a number, or None"),
    ],
)
def test_profile_model_with_a_wrong_option_names_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DispatchFlopsError, match=words):
        profile_model(Net(), **{"input_shape": (B, 5), **options})


def test_profile_model_passes_options_to_the_counter() -> None:
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


@pytest.mark.parametrize("kind", [next, list, tuple, set, iter])
def test_ignore_modules_given_as_one_class_or_several_are_equal(kind: Any) -> None:
    ignored = kind(iter([nn.Linear]))
    assert profile_model(Net(), (B, 5), ignore_modules=ignored).total().macs == 0
