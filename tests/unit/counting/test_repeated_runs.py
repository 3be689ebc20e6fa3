"""What is remembered of modules and nodes changes no figure: n runs cost n times what one costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.counting import module_tracker, operator_locator
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.node_owners import NodeOwners
from dispatch_flops.counting.thread_state import ThreadState
from tests.helpers.addresses import made_at
from tests.helpers.attributing import plain, rows, train, work, work_of
from tests.helpers.profiling import profile_of
from tests.helpers.threads import in_new_thread

Program = tuple[nn.Module, Callable[[], None]]


def figures(profile: Profile, runs: int) -> dict[Any, Any]:
    """Return own MACs, FLOPs and calls of every module, phase and operator, for each run."""
    found: dict[Any, Any] = {}
    for node in profile.nodes():
        found[node.fqn] = node.calls / runs, (node.tokens or 0) / runs, node.active_params
        for op in node.ops:
            assert op.cost is not None
            amounts = op.calls, op.cost.macs, op.cost.flops, op.cost.bytes_read
            found[node.fqn, op.phase, op.op] = tuple(amount / runs for amount in amounts)
    return found


def phases_of(profile: Profile, operator: str) -> list[Any]:
    """Return the phases in which an operator of aten ran."""
    return [op.phase for op in profile.op_totals() if op.op.split(".")[1] == operator]


def of_runs(program: Callable[[], Program], runs: int) -> dict[Any, Any]:
    model, run = program()

    def run_all() -> None:
        for _ in range(runs):
            run()
            model.zero_grad()  # otherwise the next run accumulates

    return figures(profile_of(run_all, model=model), runs)


class Core(nn.Module):
    """Calls a module and computes for itself, within a checkpoint if one is asked for."""

    def __init__(self, reentrant: bool | None = None, *, without_gradients: bool = False) -> None:
        super().__init__()
        self.before, self.inner, self.after = plain(3, 5), plain(5, 7), plain(7, 11)
        self.scale = nn.Parameter(torch.ones(5, 5))
        self.reentrant = reentrant
        self.without_gradients = without_gradients

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = x @ x.T if self.without_gradients else 0
        x = self.inner(x @ self.scale)
        return x + shift.sum() if isinstance(shift, Tensor) else x

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        if self.reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return self.after(x)


class Wrapper(nn.Module):
    """Wraps a module under the name that ``checkpoint_wrapper`` uses."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._checkpoint_wrapped_module = module

    def forward(self, x: Tensor) -> Any:
        return self._checkpoint_wrapped_module(x)


def trained(model: nn.Module, width: int = 3) -> Program:
    return model, lambda: train(model, rows(2, width, grad=True))


def with_module_in_forward_hook() -> Program:
    model: Any = nn.Sequential(Core(), nn.Tanh())
    model.probe = plain(11, 13)
    model[0].register_forward_hook(lambda module, args, out: model.probe(out).sum() * 0 + out)
    return model, lambda: model[1](model[0](rows(2, 3))).sum().backward()


def with_module_in_gradient_hook() -> Program:
    model: Any = Core()
    model.probe = plain(11, 13)

    def run() -> None:
        out = model(rows(2, 3))
        out.register_hook(lambda grad: grad + model.probe(grad).sum())
        out.sum().backward()

    return model, run


class Hooked(nn.Module):
    """Keeps a product of the gradient of its own product, made in a hook with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, 5))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.factor
        product.register_hook(self.keep)
        return product.tanh()

    def keep(self, grad: Tensor) -> None:
        with torch.enable_grad():
            self.kept.append(grad @ self.factor.T)


def with_graph_made_in_gradient_hook() -> Program:
    model: Any = nn.Sequential(Hooked(), plain(5, 7))

    def run() -> None:
        model(rows(2, 3)).sum().backward()
        model[0].kept.pop().sum().backward()

    return model, run


def with_closure_that_calls_a_part() -> Program:
    model: Any = Core()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        out: Tensor = model.inner(rows(2, 5)).sum()
        return out

    def run() -> None:
        train(model, rows(2, 3))
        optimizer.step(closure)
        with torch.no_grad():
            model.scale.mul(2)

    return model, run


def with_graph_that_is_used_again() -> Program:
    model: Any = plain(3, 5)

    def run() -> None:
        out = model[0](rows(2, 3))
        for _ in range(2):
            out.backward(torch.ones(2, 5), retain_graph=True)
            model[0](rows(4, 3))
        out.backward(torch.ones(2, 5))
        with torch.no_grad():
            model[0].weight.grad.mul_(2)

    return model, run


def with_double_backward() -> Program:
    model = Core()

    def run() -> None:
        x = rows(2, 3, grad=True)
        (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        grad.sum().backward()

    return model, run


def with_experts() -> Program:
    model: Any = nn.Module()
    model.experts = nn.ModuleList([plain(3, 5), plain(3, 5)])

    def run() -> None:
        for number, expert in enumerate(model.experts):
            expert(rows(2 + number, 3)).sum().backward()

    return model, run


PROGRAMS: dict[str, Callable[[], Program]] = {
    "plain": lambda: trained(Core()),
    "checkpoint": lambda: trained(Core(reentrant=False)),
    "reentrant checkpoint": lambda: trained(Core(reentrant=True)),
    "checkpoint, in part without gradients": lambda: trained(
        Core(reentrant=False, without_gradients=True)
    ),
    "reentrant checkpoint, in part without gradients": lambda: trained(
        Core(reentrant=True, without_gradients=True)
    ),
    "module in a forward hook": with_module_in_forward_hook,
    "module in a gradient hook": with_module_in_gradient_hook,
    "graph made in a gradient hook": with_graph_made_in_gradient_hook,
    "closure that calls a part": with_closure_that_calls_a_part,
    "graph that is used again": with_graph_that_is_used_again,
    "double backward": with_double_backward,
    "experts": with_experts,
    "wrapper": lambda: trained(nn.Sequential(Wrapper(plain(3, 5)), plain(5, 7))),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_later_runs_cost_what_the_first_run_costs(program: Callable[[], Program]) -> None:
    assert of_runs(program, 3) == of_runs(program, 1)


def test_graph_made_in_a_gradient_hook_belongs_to_the_module_of_the_running_node() -> None:
    model, run = with_graph_made_in_gradient_hook()
    one = 2 * 3 * 5  # the input needs no gradient; the product in the hook is differentiated, too
    assert work(run, model=model)["0"] == {"forward": one, "backward": 3 * one}


def test_operator_after_another_backward_through_a_kept_graph_is_of_the_optimizer() -> None:
    model, run = with_graph_that_is_used_again()
    with FlopCounterMode(model, display=False) as counter:
        run()
    assert phases_of(counter.profile, "mul_") == ["optimizer"]


# -- what is remembered is forgotten in time --------------------------------------------------


def test_module_at_the_address_of_one_that_is_gone_has_its_own_name() -> None:
    model: Any = nn.Sequential(nn.Sequential(nn.Identity()))
    x, tries = rows(2, 3), 0

    def run() -> None:
        nonlocal tries
        other: Any = None
        while other is None:
            tries += 1
            assert tries < 100
            model[0][0] = nn.Linear(3, 5, bias=False)
            for _ in range(2):
                model[0](x)
            gone = id(model[0][0])
            del model[0][0]
            other = made_at(gone, lambda: nn.Linear(3, 7, bias=False))
            model[0].append(nn.Identity())
        other(x)

    found = work(run, model=model)
    assert found == {
        "0.0": {"forward": tries * 2 * (2 * 3 * 5)}, "<outside>.Linear": {"forward": 2 * 3 * 7}
    }  # fmt: skip


def test_module_that_gets_a_second_parent_is_named_by_its_caller_from_then_on() -> None:
    model: Any = nn.Sequential(plain(3, 3))
    x = rows(2, 3)

    def run() -> None:
        for _ in range(2):
            model[0](x)
        model.append(nn.Sequential(model[0][0]))
        model(x)
        model[0](x)

    one = 2 * 3 * 3
    assert work(run, model=model) == {"0.0": {"forward": 4 * one}, "1.0": {"forward": one}}


def test_setup_of_a_pipeline_after_runs_is_of_its_own_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(plain(3, 5))

    def run() -> None:
        for _ in range(2):
            train(model, rows(2, 3))
        for room in (module_tracker, operator_locator):
            monkeypatch.setattr(room, "is_in_pipeline_setup", lambda: True)
        train(model, rows(2, 3))

    profile = profile_of(run, model=model)
    assert work_of(profile) == {
        "0.0": {"forward": 2 * 2 * 3 * 5, "backward": 2 * 2 * 3 * 5, "setup": 2 * 2 * 3 * 5}
    }
    assert phases_of(profile, "add_") == ["backward", "setup"], "of two accumulations"


def test_shapes_of_a_module_that_raised_first_are_those_of_its_first_output() -> None:
    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if len(x) == 2:
                raise ValueError("no")
            return out

    model = nn.Sequential(nn.Sequential(Late(3, 5)))
    with FlopCounterMode(model, display=False) as counter:
        with pytest.raises(ValueError, match="no"):
            model(rows(2, 3))
        model(rows(7, 3))
    assert counter.profile.node("0.0").output_shapes == ((7, 5),)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.factor


class Moving(nn.Module):
    """Moves its part to another attribute, and calls a new module of that part first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Part()

    def move(self) -> None:
        self.second = self.first
        del self.first
        self.second.added = nn.Linear(3, 7, bias=False)

    def forward(self, x: Tensor) -> Any:
        if hasattr(self, "first"):
            return self.first(x)
        self.second.get_submodule("added")(x)
        return self.second(x)


def test_module_that_is_found_under_another_name_has_that_name_from_then_on() -> None:
    model: Any = Moving()
    x = rows(2, 3)

    def run() -> None:
        for _ in range(2):
            model(x)
        model.move()
        model(x)

    one = 2 * 3 * 5
    assert work(run, model=model) == {
        "first": {"forward": 2 * one},
        "second": {"forward": one},
        "second.added": {"forward": 2 * 3 * 7},
    }


def test_nodes_of_equal_numbers_from_two_threads_have_their_own_modules() -> None:
    model = nn.Sequential(plain(3, 5), plain(3, 7))
    sums: list[Tensor] = []
    for part in model:
        in_new_thread(lambda part=part: sums.append(part(rows(2, 3)).sum()))

    def run() -> None:
        torch.autograd.backward(sums)

    assert work(run, model=model) == {
        "0.0": {"backward": 2 * 3 * 5}, "1.0": {"backward": 2 * 3 * 7}
    }  # fmt: skip


def test_nodes_made_before_the_block_are_not_taken_for_ones_of_another_thread() -> None:
    home, other = ThreadState(10, is_entered=True), ThreadState(5, is_entered=False)
    home.mark(12, "layer")
    home.last_seq = 20
    owners = NodeOwners(ModuleNames([]), [home, other])
    assert owners.first_like(15) == 12
    assert owners.first_like(7) == 7


def test_operator_after_a_step_whose_closure_calls_a_part_is_of_forward() -> None:
    """The call of the part begins another forward, as that of the model would."""
    model, run = with_closure_that_calls_a_part()
    with FlopCounterMode(model, display=False) as counter:
        for _ in range(2):
            run()
    assert phases_of(counter.profile, "mul") == ["forward"]
