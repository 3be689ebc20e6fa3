"""Attribution of operators after backward: optimizer steps, clipping, scaling, accumulation."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode, OpCost, Profile, overridden
from dispatch_flops.counting import call_stack
from dispatch_flops.counting.python_frames import ACCUMULATION, operator_caller
from dispatch_flops.counting.thread_state import AFTER_BACKWARD
from tests.helpers.attributing import plain, rows, train, work_of
from tests.helpers.modes import OperatorNames
from tests.helpers.profiling import profile_of

CLIPPING = "<outside>.gradient clipping"
SCALING = "<outside>.gradient scaling"
N = 3 * 5 + 5 * 7  # parameters of the model


def phases(profile: Profile, fqn: str) -> set[str]:
    return {op.phase for op in profile.node(fqn).ops}


def outside(profile: Profile) -> set[str]:
    """Return the named parts of the outside in which operators ran."""
    return {node.fqn for node in profile.outside.walk() if node.ops} - {"<outside>"}


@pytest.fixture
def model() -> nn.Sequential:
    return plain(3, 5, 7)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *after: Callable[[], Any]) -> None:
    train(model, rows(2, 3))
    for do in after:
        do()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizer_step_is_a_phase_outside_the_model(
    model: nn.Module, kind: Any, how: dict[str, bool]
) -> None:
    optimizer = kind(model.parameters(), lr=0.1, **how)
    profile = profile_of(step, model, optimizer, model=model)
    name = f"<outside>.{kind.__name__}"
    assert phases(profile, name) == {"optimizer"}
    assert profile.node(name).own().flops >= 2 * N
    assert all(not node.own("optimizer").flops for node in profile.root.walk())
    assert profile.model_total().flops == profile.total().flops - profile.total("optimizer").flops


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_sgd_step_costs_two_flops_per_parameter(model: nn.Module, how: dict[str, bool]) -> None:
    """p -= lr·g is one product and one sum per parameter."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **how)
    profile = profile_of(step, model, optimizer, model=model)
    assert profile.total("optimizer").flops == 2 * N


def test_two_optimizers_are_named_by_class(model: nn.Module) -> None:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    profile = profile_of(lambda: step(model, first, second.step), model=model)
    assert outside(profile) >= {"<outside>.SGD", "<outside>.AdamW"}
    assert profile.node("<outside>.SGD").own().flops == 2 * 3 * 5


def test_two_optimizers_of_one_class_are_told_apart(model: nn.Module) -> None:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    profile = profile_of(lambda: step(model, first, second.step), model=model)
    rest = sum(p.numel() for p in model[1].parameters())
    # The second one steps first, before gradients are set to zero.
    assert profile.node("<outside>.SGD").own().flops == 2 * rest
    assert profile.node("<outside>.SGD.1").own().flops == 2 * 3 * 5
    assert profile.node("<outside>.SGD.1").class_name == "SGD"
    assert profile.node("<outside>.SGD.1").name == "SGD.1"


@pytest.mark.slow
def test_optimizers_made_for_every_step_share_a_name(model: nn.Module) -> None:
    def steps() -> None:
        for _ in range(3):
            step(model, torch.optim.SGD(model.parameters(), lr=0.1))
            gc.collect()

    profile = profile_of(steps, model=model)
    assert profile.node("<outside>.SGD").own().flops == 3 * 2 * N
    assert "<outside>.SGD.1" not in outside(profile)


def test_optimizers_of_named_models_have_the_names_of_the_models() -> None:
    g, d = nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False)
    own = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (d, g)]
    both = torch.optim.SGD([*g.parameters(), *d.parameters()], lr=0.1)
    with FlopCounterMode({"G": g, "D": d}, display=False) as counter:
        d(g(torch.ones(2, 3))).sum().backward()
        for optimizer in (*own, both):
            optimizer.step()
    profile = counter.profile.check()
    assert [child.fqn for child in profile.root.children] == ["G", "D"]
    assert profile.by_module("forward")["G"].macs == 2 * 3 * 5
    assert profile.total_params == 3 * 5 + 5 * 7
    flops = {node.fqn: node.own().flops for node in profile.outside.walk() if "SGD" in node.fqn}
    assert flops == {
        "<outside>.SGD.D": 2 * 5 * 7,
        "<outside>.SGD.G": 2 * 3 * 5,
        "<outside>.SGD": 2 * (5 * 7 + 3 * 5),
    }


def test_closure_within_a_step_is_forward_and_backward_of_the_model(model: nn.Module) -> None:
    """LBFGS calls the model within its step: those operators still belong to the model."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=1)
    x = rows(2, 3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()  # outside the model, and not in the optimizer
        loss.backward()
        return loss

    profile = profile_of(optimizer.step, closure, model=model)
    calls = profile.root.calls
    assert calls >= 1
    assert work_of(profile) == {
        "0": {"forward": calls * 2 * 3 * 5, "backward": calls * 2 * 3 * 5},
        "1": {"forward": calls * 2 * 5 * 7, "backward": calls * 2 * 2 * 5 * 7},
        **{k: v for k, v in work_of(profile).items() if k == "<outside>.LBFGS"},
    }
    assert profile.node("<outside>.LBFGS").own("optimizer").flops > N
    assert phases(profile, "<outside>.LBFGS") == {"optimizer"}
    assert profile.outside.own("forward").flops == calls * (2 * 7 + (2 * 7 - 1))
    assert profile.root.active_params == N


@pytest.mark.parametrize("has_closure", [False, True])
def test_average_of_parameters_after_a_step_is_of_its_phase(
    model: nn.Module, has_closure: bool
) -> None:
    """Also where the backward pass runs in the closure of the step."""
    optimizer, averages = torch.optim.SGD(model.parameters(), lr=0.1), [torch.zeros(5, 3)]

    def closure() -> Tensor:
        loss = model(rows(2, 3)).sum()
        loss.backward()
        return loss

    def run() -> None:
        if has_closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        with torch.no_grad():
            averages[0].mul_(0.5)

    profile = profile_of(run, model=model)
    assert profile.node(AFTER_BACKWARD).own("optimizer").flops == 5 * 3
    assert profile.total("optimizer").flops == 2 * N + 5 * 3


def test_step_in_a_gradient_hook_is_optimizer(model: nn.Module) -> None:
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    profile = profile_of(train, model, rows(2, 3), model=model)
    # The gradient of the last layer is there first.
    assert profile.node("<outside>.SGD").own("optimizer").flops == 2 * 5 * 7
    assert profile.node("<outside>.SGD.1").own("optimizer").flops == 2 * 3 * 5
    assert profile.total("optimizer").flops == 2 * N
    assert work_of(profile) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


class Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        raise ValueError("no")


@pytest.mark.parametrize("then", ["product", "model", "step", "backward"])
def test_operators_after_a_step_that_raised_are_not_optimizer(model: nn.Module, then: str) -> None:
    """The step is over, although torch does not call its post hook."""
    failing = Failing(model.parameters(), lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    w = rows(3, 7, grad=True)
    loss = (rows(2, 3) @ w).sum()

    def call() -> None:
        train(model, rows(2, 3))
        with pytest.raises(ValueError, match="no"):
            failing.step()
        if then == "product":
            _ = rows(2, 3) @ w
        elif then == "model":
            model(rows(2, 3))
        elif then == "step":
            other.step()
        else:
            loss.backward()

    profile = profile_of(call, model=model)
    assert profile.node("<outside>.Failing").own("optimizer").flops == 2 * N
    twice = 2 if then == "model" else 1
    assert work_of(profile)["1"] == {"forward": twice * 2 * 5 * 7, "backward": 2 * 2 * 5 * 7}
    if then == "product":
        assert work_of(profile)["<outside>"] == {"forward": 2 * 3 * 7}
    if then == "step":
        assert profile.node("<outside>.SGD").own("optimizer").flops == 2 * N
    if then == "backward":
        assert profile.total("backward").macs == 2 * 3 * 5 + 2 * 2 * 5 * 7 + 2 * 3 * 7


def test_composite_operator_with_a_formula_in_a_step_is_the_optimizers(model: nn.Module) -> None:
    """Autograd calls it: no mode dispatches it."""

    class Projecting(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                torch.matmul(parameter, parameter.t())
                parameter.add_(1.0)

    optimizer = Projecting(model.parameters(), lr=0.1)
    with overridden({torch.ops.aten.matmul: lambda a, b, **_: OpCost(macs=7, flops=14)}):
        profile = profile_of(lambda: [optimizer.step() for _ in range(3)], model=model)
    own = profile.node("<outside>.Projecting").own("optimizer")
    assert own.macs == 3 * len([*model.parameters()]) * 7
    assert profile.total("forward").flops == 0


def scale(tensor: torch.Tensor) -> None:
    tensor.mul_(1.0)
    tensor.mul_(1.0)


class FailingInParts(Failing):
    """Runs its operators in a function that others may call, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(1.0)
            scale(parameter)
        raise ValueError("no")


@pytest.mark.parametrize("modes", [nullcontext, OperatorNames])
def test_function_that_a_step_which_raised_has_called_is_not_optimizer(
    model: nn.Module, modes: Callable[[], AbstractContextManager[Any]]
) -> None:
    """Also within another mode, whose frames are alike for every operator."""
    failing = FailingInParts(model.parameters(), lr=0.1)
    w = rows(3, 7)
    with FlopCounterMode(model, display=False) as counter, modes():
        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                failing.step()
            scale(w)
    profile = counter.profile
    assert profile.node("<outside>.FailingInParts").own("optimizer").flops == 3 * 3 * N
    assert profile.node("<outside>").own("forward").flops == 3 * 2 * 3 * 7


@pytest.mark.parametrize("is_seen_first", [False, True], ids=["alone", "within another mode"])
def test_caller_of_an_operator_is_not_told_within_another_mode(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, is_seen_first: bool
) -> None:
    """The other mode's frames are alike for every operator, whatever calls it."""
    callers: list[Any] = []

    def spy() -> Any:
        callers.append(operator_caller())
        return callers[-1]

    monkeypatch.setattr(call_stack, "operator_caller", spy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    train(model, rows(2, 3))
    with FlopCounterMode(model, display=False), OperatorNames() if is_seen_first else nullcontext():
        optimizer.step()
    assert len(callers) == len([*model.parameters()])
    assert all((caller is None) is is_seen_first for caller in callers)


def test_training_after_a_step_that_raised_in_backward_is_attributed(model: nn.Module) -> None:
    failing = Failing([model[1].weight], lr=0.1)
    handle = model[1].weight.register_post_accumulate_grad_hook(lambda p: failing.step())

    def call() -> None:
        with pytest.raises(ValueError, match="no"):
            train(model, rows(2, 3))
        handle.remove()
        train(model, rows(2, 3))

    work = work_of(profile_of(call, model=model))
    # Backward stopped before it reached the first layer's weight.
    assert work["1"]["forward"] == 2 * 2 * 5 * 7
    assert set(work["0"]) | set(work["1"]) == {"forward", "backward"}


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_gradient_clipping_is_named(model: nn.Module, clip: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip_ = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[clip]
    profile = profile_of(
        lambda: step(model, optimizer, lambda: clip_(model.parameters(), 1.0)), model=model
    )
    assert phases(profile, CLIPPING) == {"optimizer"}
    assert profile.node(CLIPPING).own().flops >= N
    assert outside(profile) == {CLIPPING, ACCUMULATION, "<outside>.SGD"}


def test_gradient_scaler_is_named(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def scaled() -> None:
        scaler.scale(model(rows(2, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    profile = profile_of(scaled, model=model)
    assert phases(profile, SCALING) == {"optimizer"}
    assert outside(profile) == {SCALING, ACCUMULATION, "<outside>.SGD"}
    assert profile.node("<outside>.SGD").own().flops == 2 * N


def test_gradient_accumulation_costs_one_addition_per_parameter(model: nn.Module) -> None:
    def twice() -> None:
        train(model, rows(2, 3))
        train(model, rows(2, 3))

    profile = profile_of(twice, model=model)
    assert phases(profile, ACCUMULATION) == {"backward"}
    assert profile.node(ACCUMULATION).own().flops == N


def test_moving_average_after_backward_is_named(model: nn.Module) -> None:
    """A moving average of the weights runs after backward, in no module, without gradients."""
    average = [p.detach().clone() for p in model.parameters()]

    def ema() -> None:
        train(model, rows(2, 3))
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    profile = profile_of(ema, model=model)
    assert [op.op for op in profile.node(AFTER_BACKWARD).ops] == ["aten.lerp_.Scalar"]
    assert phases(profile, AFTER_BACKWARD) == {"optimizer"}


class Averaging(torch.optim.Optimizer):
    """Averages gradients of samples for another optimizer; no hook tells of its steps."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            closure()
        mean = torch.full((2,), 0.5) @ torch.ones(2, 11)
        assert mean.shape == (11,)
        self.optimizer.step()


def test_step_that_no_hook_tells_of_is_optimizer_with_gradients_enabled(
    model: nn.Module,
) -> None:
    optimizer = Averaging(torch.optim.SGD(model.parameters(), lr=0.1))

    def call() -> None:
        train(model, rows(2, 3))
        optimizer.step()

    profile = profile_of(call, model=model)
    assert phases(profile, "<outside>.Averaging") == {"optimizer"}
    assert profile.node("<outside>.Averaging").own().macs == 2 * 11
    assert profile.node("<outside>.SGD").own().flops == 2 * N
    assert profile.total("forward").macs == 2 * N


class Decaying(Averaging):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


def test_step_that_no_hook_tells_of_has_its_name_without_gradients(model: nn.Module) -> None:
    optimizer = Decaying(torch.optim.SGD(model.parameters(), lr=0.1))

    def call() -> None:
        train(model, rows(2, 3))
        optimizer.step()

    profile = profile_of(call, model=model)
    assert profile.node("<outside>.Decaying").own("optimizer").flops == N


def test_closure_of_a_step_that_no_hook_tells_of_computes_the_loss() -> None:
    weight = torch.ones(3, 5, requires_grad=True)
    optimizer = Averaging(torch.optim.SGD([weight], lr=0.1))

    def twice() -> None:
        for _ in range(2):
            optimizer.step(lambda: (rows(2, 3) @ weight).sum().backward())

    profile = profile_of(twice)
    assert profile.total("forward").macs == profile.total("backward").macs == 2 * 2 * 3 * 5
    assert profile.total("optimizer").macs == 2 * 2 * 11


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        a, b = ctx.saved_tensors
        return grad @ b.T, a.T @ grad


class _ProductUnderAutocast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _product(a, b)

    backward = _Product.backward


class _ProductWithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _product(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = _Product.backward


def _product(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


@pytest.mark.parametrize("function", [_Product, _ProductUnderAutocast, _ProductWithoutContext])
def test_custom_function_after_backward_is_forward_unless_it_reads_gradients(
    model: nn.Module, function: Any
) -> None:
    """Another loss follows, then a product of the gradient of shape (5, 3) with itself."""
    a, b = torch.ones(2, 7), torch.ones(7, 11, requires_grad=True)
    weight = next(model.parameters())

    def call() -> None:
        train(model, rows(2, 3))
        function.apply(a, b).sum().backward()
        assert weight.grad is not None
        function.apply(weight.grad, weight.grad.T)

    profile = profile_of(call, model=model)
    loss = 2 * 7 * 11
    assert profile.outside.total("forward").macs == loss
    assert profile.outside.total("backward").macs == 2 * loss
    assert profile.node(AFTER_BACKWARD).total("optimizer").macs == 5 * 3 * 5


def test_parameters_that_only_an_optimizer_uses_are_not_active() -> None:
    """Weight decay alone does not make a parameter active."""
    model = nn.ModuleDict({"used": plain(3, 5), "idle": plain(5, 7)})
    model["idle"][0].weight.grad = torch.zeros(7, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def call() -> None:
        train(model["used"], rows(2, 3))
        optimizer.step()
        train(model["used"], rows(2, 3))
        optimizer.step()

    profile = profile_of(call, model=model)
    assert (profile.root.active_params, profile.total_params) == (3 * 5, N)
    assert profile.uncalled_modules() == ["idle.0"]


def test_each_backward_pass_of_one_graph_begins_what_is_after_backward() -> None:
    layer, other = nn.Linear(3, 5, bias=False), nn.Linear(3, 7, bias=False)
    with FlopCounterMode({"layer": layer, "other": other}, display=False) as counter:
        out = layer(rows(2, 3))
        out.backward(torch.ones(2, 5), retain_graph=True)
        other(rows(2, 3))
        out.backward(torch.ones(2, 5))
        with torch.no_grad():
            layer.weight * 2.0
    assert counter.profile.node(AFTER_BACKWARD).total("optimizer").flops == 3 * 5
    assert counter.profile.outside.own("forward").flops == 0


def test_parameter_that_is_used_outside_of_modules_is_active(model: nn.Sequential) -> None:
    with FlopCounterMode(model, display=False) as counter:
        model[1](rows(2, 5))
        rows(2, 3) @ model[0].weight.t()
    assert counter.profile.root.active_params == N


def test_parameter_that_is_only_changed_after_backward_is_not_active() -> None:
    """From the second step on, the first operator after backward is like an earlier one."""
    model = plain(3, 5)
    model.unused = nn.Parameter(torch.ones(7))  # type: ignore[assignment]
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(3):
            model[0](rows(2, 3)).sum().backward()
            with torch.no_grad():
                model.unused.mul_(0.5)  # type: ignore[operator]
    assert counter.profile.root.active_params == 3 * 5
