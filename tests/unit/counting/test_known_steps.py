"""Steps of optimizers that are like earlier ones: not dispatched again, but counted."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dispatch_flops import FlopCounterMode, OpCost, Profile
from dispatch_flops.counting import known_steps
from dispatch_flops.counting.known_steps import KINDS
from dispatch_flops.errors import UncountedWarning
from tests.helpers.modes import NamesBesideCompiled, OperatorNames
from tests.helpers.undispatched import imported_again, note_steps, signalled_at

Make = Callable[[list[nn.Parameter]], Optimizer]
Change = Callable[[Any], Any]
Run = Callable[..., Profile]


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the optimizers whose steps are not dispatched, one for each step."""
    return note_steps(monkeypatch)


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [nn.Parameter(torch.randn(shape)) for shape in ((3, 5), (7,), (2, 3, 2))]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    return made


def counted(make: Make, *changes: Change, **options: Any) -> Profile:
    """Count a step after each change of a new optimizer."""
    optimizer = make(parameters())
    with FlopCounterMode(display=False, **options) as counter:
        for change in changes:
            change(optimizer)
            optimizer.step()
    return counter.profile


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return ``counted``, with every step dispatched."""

    def run(make: Make, *changes: Change) -> Profile:
        with monkeypatch.context() as patch:
            for cls in list(KINDS):
                patch.delitem(KINDS, cls)
            return counted(make, *changes)

    return run


def facts(profile: Profile) -> Any:
    return {node.fqn: node.ops for node in profile.nodes()}


def nothing(optimizer: Any) -> None:
    pass


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD, foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: Adam(p, weight_decay=0.01),
    "Adam, amsgrad": lambda p: Adam(p, amsgrad=True, maximize=True),
    "AdamW": lambda p: AdamW(p),
    "AdamW, foreach": lambda p: AdamW(p, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, fused=True),
    "groups": lambda p: AdamW(
        [{"params": p[:1], "lr": 0.5, "name": "first"}, {"params": p[1:], "weight_decay": 0}]
    ),
    "named parameters": lambda p: AdamW([(str(i), one) for i, one in enumerate(p)]),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_that_are_alike_count_as_dispatched_ones(
    name: str, passed: list[str], dispatched: Run
) -> None:
    """The first step makes the state, the second one is kept for later ones."""
    make = OPTIMIZERS[name]
    profile = counted(make, *[nothing] * 5)
    is_stateless = name == "SGD"
    assert len(passed) == 3 + is_stateless
    assert facts(profile) == facts(dispatched(make, *[nothing] * 5))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_under_autocast_count_as_dispatched_ones(name: str, dispatched: Run) -> None:
    def switch(optimizer: Any) -> None:
        torch.set_autocast_enabled("cpu", not torch.is_autocast_enabled("cpu"))

    changes = [nothing, nothing, switch, nothing, nothing, switch, nothing]
    with torch.autocast("cpu", enabled=False):
        profile = counted(OPTIMIZERS[name], *changes)
        assert facts(profile) == facts(dispatched(OPTIMIZERS[name], *changes))
    with torch.autocast("cpu"):
        profile = counted(OPTIMIZERS[name], *changes)
        assert facts(profile) == facts(dispatched(OPTIMIZERS[name], *changes))


def test_parameters_are_the_same_as_without_a_counter() -> None:
    with_counter, without = parameters(), parameters()
    optimizers = AdamW(with_counter), AdamW(without)
    with FlopCounterMode(display=False):
        for _ in range(5):
            optimizers[0].step()
    for _ in range(5):
        optimizers[1].step()
    for one, other in zip(with_counter, without, strict=True):
        assert torch.equal(one, other)


def test_steps_of_a_scheduler_are_alike(passed: list[str], dispatched: Run) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made = SGD(parameters, lr=0.1)
        warm_up = torch.optim.lr_scheduler.LambdaLR(made, lambda step: step / 4)
        made.scheduler = warm_up  # type: ignore[attr-defined]
        return made

    changes = [nothing, *[lambda optimizer: optimizer.scheduler.step()] * 4]
    profile = counted(make, *changes)
    assert len(passed) == 4
    assert facts(profile) == facts(dispatched(make, *changes))


def test_two_optimizers_in_turns_are_told_apart(passed: list[str]) -> None:
    ones, others = parameters(), parameters()[:1]
    optimizers = SGD(ones, lr=0.1), SGD(others, lr=0.1)
    with FlopCounterMode(display=False) as counter:
        for _ in range(3):
            for optimizer in optimizers:
                optimizer.step()
    assert len(passed) == 4
    elements = 3 * 5 + 7 + 2 * 3 * 2
    assert counter.get_total_flops() == 3 * 2 * (elements + 3 * 5)  # multiplied and added


# -- steps that are not alike ---------------------------------------------------------------------


class Halving(SGD):
    """A class of the program's own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.5)


def without_graph(parameter: Tensor) -> Tensor:
    found = parameter.detach().clone()
    found.grad = torch.randn_like(found)
    return found


def set_option(**options: Any) -> Change:
    return lambda optimizer: optimizer.param_groups[0].update(options)


def set_gradient(make: Callable[[Tensor], Tensor | None]) -> Change:
    def change(optimizer: Any) -> None:
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.grad = make(parameter.detach())

    return change


def resize(optimizer: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = None
        parameter.data = torch.randn(4, *parameter.shape)
        parameter.grad = torch.randn_like(parameter)
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter)


def set_buffer(make: Callable[[Tensor], Tensor | None]) -> Change:
    def change(optimizer: Any) -> None:
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        state["momentum_buffer"] = make(state["momentum_buffer"])

    return change


def rename_buffer(optimizer: Any) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["momentum"] = state.pop("momentum_buffer")


def exchange_options(optimizer: Any) -> None:
    """Set the values of two options to those of each other, in the same order of values."""
    group, other = optimizer.param_groups[0], {"nesterov": "maximize", "maximize": "nesterov"}
    exchanged = {other.get(name, name): value for name, value in group.items()}
    group.clear()
    group.update(exchanged)


def add_group(optimizer: Any) -> None:
    parameter = nn.Parameter(torch.randn(11))
    parameter.grad = torch.randn(11)
    optimizer.add_param_group({"params": [parameter]})


def add(optimizer: Any, args: Any, kwargs: Any) -> None:
    torch.ones(2) + 1


def hook_own(optimizer: Any) -> None:
    optimizer.register_step_post_hook(add)


def hook_own_before(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(add)


CHANGES: dict[str, Change] = {
    "weight decay": set_option(weight_decay=0.1),
    "momentum": set_option(momentum=0),
    "nesterov": set_option(nesterov=False),
    "dampening that makes a factor 1": set_option(dampening=0.0, nesterov=False),
    "learning rate that makes a factor 1": set_option(lr=-1.0),
    "learning rate in a tensor": set_option(lr=torch.tensor(0.1)),
    "foreach": set_option(foreach=True),
    "maximize": set_option(maximize=True),
    "no gradient": set_gradient(lambda p: None),
    "gradient of other strides": set_gradient(lambda p: torch.randn(5, 3).t()),
    "gradient that shares memory": set_gradient(lambda p: p),
    "shape": resize,
    "state of another dtype": set_buffer(lambda buffer: buffer.double()),
    "state of another name": rename_buffer,
    "options in another order": exchange_options,
    "state that is missing": set_buffer(lambda buffer: None),
    "group": add_group,
    "hook": hook_own,
    "hook before": hook_own_before,
    "state": lambda optimizer: optimizer.state.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_step_that_differs_is_counted_as_it_runs(
    change: str, passed: list[str], dispatched: Run
) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)

    changes = [nothing] * 3 + [CHANGES[change]] + [nothing] * 3
    profile = counted(make, *changes)
    assert passed
    assert facts(profile) == facts(dispatched(make, *changes))


def test_learning_rate_in_a_tensor_that_changes_is_read_each_time(dispatched: Run) -> None:
    """A factor that becomes 1 costs nothing."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=torch.tensor(0.1), foreach=False)

    changes = [*[nothing] * 3, lambda optimizer: optimizer.param_groups[0]["lr"].fill_(-1.0)]
    assert facts(counted(make, *changes)) == facts(dispatched(make, *changes))


def set_gradients(*positions: int) -> Change:
    """Return a change that leaves gradients to the parameters at those positions alone."""

    def change(optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for position, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter) if position in positions else None

    return change


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: Adam(p)], ids=["SGD", "Adam"])
def test_steps_with_other_numbers_of_gradients_are_told_apart(make: Make, dispatched: Run) -> None:
    """Without a state, nothing but the gradient tells which parameters take part."""

    def clear(positions: tuple[int, ...]) -> Change:
        def change(optimizer: Any) -> None:
            optimizer.state.clear()
            set_gradients(*positions)(optimizer)

        return change

    changes = [clear(positions) for positions in ((0,), (0,), (0, 1), (0,), (0, 1), (1,), (0, 1))]
    assert facts(counted(make, *changes)) == facts(dispatched(make, *changes))


def test_gradients_of_another_group_are_told_apart(dispatched: Run) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        other = nn.Parameter(torch.randn(3, 5))
        return SGD([{"params": parameters[:1], "weight_decay": 0.1}, {"params": [other]}], lr=0.1)

    changes = [set_gradients(position) for position in (0, 0, 1, 0, 1)]
    assert facts(counted(make, *changes)) == facts(dispatched(make, *changes))


def test_option_that_is_no_default_of_the_optimizer_is_compared(dispatched: Run) -> None:
    """As after loading one of an older torch; a default of no group is not asked for."""

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        made = AdamW(parameters)
        del made.defaults["maximize"]
        made.defaults["extra"] = 1
        return made

    changes = [nothing] * 3 + [set_option(maximize=True)] * 2
    assert facts(counted(make, *changes)) == facts(dispatched(make, *changes))


def test_default_dtype_is_compared(dispatched: Run) -> None:
    def use_double(optimizer: Any) -> None:
        torch.set_default_dtype(torch.float64)

    changes = [nothing] * 3 + [use_double, nothing]
    try:
        profile = counted(OPTIMIZERS["AdamW, foreach"], *changes)
        torch.set_default_dtype(torch.float32)
        assert facts(profile) == facts(dispatched(OPTIMIZERS["AdamW, foreach"], *changes))
    finally:
        torch.set_default_dtype(torch.float32)


class Wrapped(Tensor):
    """A class of the program's own, whose operators run in Python."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        return args[0] if str(func).split(".")[1].endswith("_") else out


STATES: dict[str, Change] = {
    "Parameter": set_buffer(lambda buffer: nn.Parameter(buffer, requires_grad=False)),
    "Parameter of another dtype": set_buffer(
        lambda buffer: nn.Parameter(buffer.double(), requires_grad=False)
    ),
    "subclass": set_buffer(Wrapped),
}


@pytest.mark.parametrize("state", STATES)
def test_state_of_another_class_is_counted_as_it_runs(state: str, dispatched: Run) -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1, momentum=0.9)

    to_parameter = STATES["Parameter"]
    changes = [nothing, to_parameter, nothing, nothing, STATES[state], nothing, nothing]
    assert facts(counted(make, *changes)) == facts(dispatched(make, *changes))


@pytest.mark.parametrize("name", ["_init_group", "_single_tensor_sgd"])
def test_step_of_which_a_part_was_replaced_is_dispatched(
    name: str, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(optimizer: Any) -> None:
        where = optimizer if name == "_init_group" else sys.modules[SGD.__module__]
        found = getattr(where, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            torch.ones(7) + 1
            return found(*args, **kwargs)

        monkeypatch.setattr(where, name, replaced)

    profile = counted(lambda p: SGD(p, lr=0.1), nothing, nothing, replace)
    assert len(passed) == 1
    assert profile.total("optimizer").flops == 3 * 2 * (3 * 5 + 7 + 2 * 3 * 2) + 7


def test_sparse_gradients_are_counted_by_what_they_store(dispatched: Run) -> None:
    def sparse(stored: int) -> Change:
        def change(optimizer: Any) -> None:
            parameter = optimizer.param_groups[0]["params"][1]
            parameter.grad = (torch.arange(7) < stored).float().to_sparse()

        return change

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=0.1)

    changes = [sparse(1), sparse(1), sparse(1), sparse(5)]
    assert facts(counted(make, *changes)) == facts(dispatched(make, *changes))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_steps_on_a_nested_parameter_are_dispatched(passed: list[str]) -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(2, 5)])
    parameter = nn.Parameter(nested)
    torch.nested.to_padded_tensor(parameter * 2, 0.0).sum().backward()
    optimizer = SGD([parameter], lr=0.1)
    with FlopCounterMode(display=False) as counter:
        for _ in range(4):
            optimizer.step()
    assert passed == []
    assert counter.get_total_flops() == 4 * 2 * (3 + 2) * 5


@pytest.mark.parametrize(
    "make",
    [
        lambda p: Halving(p, lr=0.1),
        lambda p: RAdam(p),
        lambda p: SGD([without_graph(t) for t in p], lr=0.1, differentiable=True),
    ],
)
def test_other_classes_and_steps_with_gradients_are_dispatched(
    make: Make, passed: list[str]
) -> None:
    counted(make, *[nothing] * 4)
    assert passed == []


@pytest.mark.parametrize("by_keyword", [True, False])
def test_step_with_a_closure_is_dispatched(by_keyword: bool, passed: list[str]) -> None:
    optimizer = SGD(parameters(), lr=0.1)

    def closure() -> Tensor:
        return torch.ones(7) + 1

    with FlopCounterMode(display=False) as counter:
        for _ in range(4):
            optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
    assert passed == []
    assert counter.profile.by_operator("forward")["aten.add.Tensor"].calls == 4


@pytest.mark.parametrize(
    "register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook]
)
def test_step_with_a_hook_of_all_optimizers_is_dispatched(register: Any, passed: list[str]) -> None:
    optimizer = SGD(parameters(), lr=0.1)
    with FlopCounterMode(display=False) as counter:
        for _ in range(3):
            optimizer.step()
        handle = register(add)
        try:
            optimizer.step()
        finally:
            handle.remove()
    assert len(passed) == 2
    assert counter.profile.by_operator()["aten.ones.default"].calls == 1


@pytest.mark.parametrize("attribute", ["grad_scale", "found_inf"])
def test_step_that_is_scaled_is_dispatched(
    attribute: str, passed: list[str], dispatched: Run
) -> None:
    value = torch.zeros(())

    def scale(optimizer: Any) -> None:
        setattr(optimizer, attribute, value)

    changes = [nothing, nothing, nothing, scale]
    profile = counted(OPTIMIZERS["AdamW, fused"], *changes)
    assert len(passed) == 1
    assert facts(profile) == facts(dispatched(OPTIMIZERS["AdamW, fused"], *changes))


@pytest.mark.parametrize("mode", [OperatorNames, NamesBesideCompiled])
def test_step_in_another_mode_is_seen_by_it(mode: type[OperatorNames]) -> None:
    optimizer = SGD(parameters(), lr=0.1)
    with FlopCounterMode(display=False):
        for _ in range(3):
            optimizer.step()
        with mode() as names:
            optimizer.step()
    assert names.seen.count("aten.add_.Tensor") == 3


def test_step_that_the_program_replaced_is_dispatched(
    passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sgd(*args: Any, **kwargs: Any) -> None:
        torch.ones(7) + 1

    def replace(optimizer: Any) -> None:
        monkeypatch.setattr(sys.modules[SGD.__module__], "sgd", sgd)

    profile = counted(lambda p: SGD(p, lr=0.1), nothing, nothing, replace)
    assert len(passed) == 1
    assert profile.total("optimizer").flops == 2 * 2 * (3 * 5 + 7 + 2 * 3 * 2) + 7


def test_step_of_the_class_that_the_program_replaced_is_dispatched(
    passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(optimizer: Optimizer, closure: Any = None) -> None:
        torch.ones(7) + 1

    def replace(optimizer: Any) -> None:
        monkeypatch.setattr(SGD, "step", Optimizer.profile_hook_step(step))

    profile = counted(lambda p: SGD(p, lr=0.1), nothing, nothing, replace)
    assert len(passed) == 1
    assert profile.total("optimizer").flops == 2 * 2 * (3 * 5 + 7 + 2 * 3 * 2) + 7


def test_steps_of_more_than_a_few_kinds_are_dispatched(passed: list[str], dispatched: Run) -> None:
    changes = [set_option(weight_decay=i / 100) for i in [*range(1, 9), *range(1, 9)]]
    make = OPTIMIZERS["Adam"]
    profile = counted(make, *changes)
    assert len(passed) == 3  # the first of four steps made the state
    assert facts(profile) == facts(dispatched(make, *changes))


@pytest.mark.parametrize("limit", [3, 4, 5])
def test_step_in_which_calls_are_aggregated_is_not_taken_for_a_whole_one(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Signatures are too many at once: what a step recorded until then is not in its counts.

    A counter with a formula of its own knows none from earlier counters.
    """
    monkeypatch.setattr("dispatch_flops.counting.dispatch_mode._LIMIT", limit)
    ones = torch.ones(1)

    def add_others(optimizer: Optimizer) -> None:
        for size in (2, 3, 4):
            ones.expand(size) + 1

    own = {torch.ops.quantized.add: lambda *args, **kwargs: OpCost()}
    profile = counted(lambda p: SGD(p, lr=0.1), add_others, *[nothing] * 9, custom_mapping=own)
    assert profile.total("optimizer").flops == 10 * 2 * (3 * 5 + 7 + 2 * 3 * 2)


def test_kinds_that_were_replaced_before_the_import_are_dispatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a library put in place of torch's functions may compute anything."""
    own = SGD._init_group  # type: ignore[attr-defined]
    monkeypatch.setattr(SGD, "_init_group", lambda *args: own(*args))
    later = imported_again(known_steps).KINDS
    assert not later[SGD].is_original(SGD(parameters(), lr=0.1))
    assert later[AdamW].is_original(AdamW(parameters()))


def test_formula_of_an_operator_of_torch_is_asked_each_time(passed: list[str]) -> None:
    mapping = {torch.ops.aten.add_.Tensor: lambda *args, **kwargs: OpCost(flops=1009)}
    profile = counted(lambda p: SGD(p, lr=0.1), *[nothing] * 4, custom_mapping=mapping)
    assert (passed, profile.total().flops) == ([], 4 * 3 * 1009)


def test_counter_that_measures_time_sees_every_operator(passed: list[str]) -> None:
    counted(lambda p: SGD(p, lr=0.1), *[nothing] * 4, latency=True)
    assert passed == []


# -- interrupts -----------------------------------------------------------------------------------


@pytest.fixture
def interrupting() -> Iterator[Callable[[Optimizer], None]]:
    """Return what begins a step and interrupts it."""

    def run(optimizer: Optimizer) -> None:
        def interrupt(frame: Any, event: str, what: Any) -> None:
            if event == "c_return" and getattr(what, "__name__", "") == "add_":
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

        sys.setprofile(interrupt)
        optimizer.step()

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    yield run
    signal.signal(signal.SIGINT, handler)
    sys.setprofile(None)


def test_interrupt_of_a_step_ends_at_the_next_call_of_a_module(
    interrupting: Callable[[Optimizer], None], passed: list[str]
) -> None:
    optimizer, model = SGD(parameters(), lr=0.1), nn.Linear(5, 3)
    with pytest.warns(UncountedWarning, match="broken off"):  # noqa: SIM117
        with FlopCounterMode(model, display=False) as counter:
            for _ in range(3):
                optimizer.step()
            with pytest.raises(KeyboardInterrupt):
                interrupting(optimizer)
            model(torch.randn(2, 5))
            optimizer.step()
    assert len(passed) == 4
    assert counter.get_total_macs() == 2 * 5 * 3
    assert counter.profile.total("optimizer").flops == 4 * 2 * (3 * 5 + 7 + 2 * 3 * 2)


def test_interrupt_of_a_step_that_ends_the_block_leaves_nothing_behind(
    interrupting: Callable[[Optimizer], None],
) -> None:
    optimizer = SGD(parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(KeyboardInterrupt), FlopCounterMode(display=False) as counter:
            for _ in range(3):
                optimizer.step()
            interrupting(optimizer)
    assert not told
    assert counter.profile.total("optimizer").flops == 3 * 2 * (3 * 5 + 7 + 2 * 3 * 2)
    with OperatorNames() as names:
        torch.ones(2) + 1
    assert names.seen == ["aten.ones.default", "aten.add.Tensor"]


def test_step_that_raises_is_told_where_the_program_goes_on() -> None:
    """The step divides by zero, and the program computes while it handles the error."""
    parameter, model = nn.Parameter(torch.randn(3)), nn.Linear(5, 3)
    parameter.grad = torch.randn(3)
    optimizer = AdamW([parameter])
    with pytest.warns(UncountedWarning, match="broken off"):  # noqa: SIM117
        with FlopCounterMode(model, display=False) as counter:
            for _ in range(3):
                optimizer.step()
            optimizer.state[parameter]["step"].fill_(-1)
            try:
                optimizer.step()
            except ZeroDivisionError:
                model(torch.randn(2, 5))
    assert counter.get_total_macs() == 2 * 5 * 3


def test_step_that_a_signals_handler_breaks_off_is_not_counted_twice(passed: list[str]) -> None:
    model, optimizer = nn.Linear(5, 3), SGD(parameters(), lr=0.1)

    single_tensor_sgd = sys.modules[SGD.__module__]._single_tensor_sgd
    with pytest.warns(UncountedWarning, match="broken off"):  # noqa: SIM117
        with FlopCounterMode(model, display=False) as counter:
            for _ in range(3):
                optimizer.step()
            with signalled_at(single_tensor_sgd, lambda: model(torch.randn(2, 5))):
                optimizer.step()
            optimizer.step()
    assert len(passed) == 4
    assert counter.get_total_macs() == 2 * 5 * 3
    assert counter.profile.total("optimizer").flops == 5 * 2 * (3 * 5 + 7 + 2 * 3 * 2)
