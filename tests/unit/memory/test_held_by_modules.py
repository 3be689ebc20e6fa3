"""What modules hold: storages that change in the run, and activations of one step."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile
from dispatch_flops.profile.memory import HeldBytes

F32, F64 = 4, 8
WIDTH, ROWS = 7, 3
WEIGHT = WIDTH * WIDTH
LARGE = 10_007


def held_at_the_end(
    run: Callable[[], object], model: nn.Module | None
) -> tuple[MemoryProfile, HeldBytes]:
    """Return the memory of a run whose peak is at its end, and what the model itself holds."""
    with FlopCounterMode(model, display=False, memory=True) as counter:
        run()
        torch.empty(LARGE)
    memory, root = counter.profile.memory, counter.profile.root.memory
    assert memory is not None and root is not None
    assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes
    assert memory.by_role()["temporaries"] == LARGE * F32
    return memory, root.own


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def test_lazy_parameters_count_from_the_first_call_on() -> None:
    model, x = nn.Sequential(nn.LazyLinear(5), nn.ReLU()), torch.ones(ROWS, WIDTH)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(x)
        torch.empty(LARGE)
    memory, root = counter.profile.memory, counter.profile.root.memory
    assert memory is not None and root is not None
    assert root.total.parameters == (WIDTH * 5 + 5) * F32
    assert memory.by_role()["parameters"] == root.total.parameters


class Unregistered(nn.Module):
    """Keeps its parameters in a list, as a library that brings offloaded ones for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(WIDTH, WIDTH)), nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, scale = self.weights
        return x @ weight.t() * scale


def test_parameters_that_no_module_holds_are_parameters() -> None:
    model, x = Unregistered(), torch.ones(ROWS, WIDTH)
    with torch.no_grad():
        memory, _ = held_at_the_end(lambda: model(x), model)
    assert memory.by_role()["parameters"] == (WEIGHT + WIDTH) * F32
    assert memory.by_role()["inputs"] == ROWS * WIDTH * F32


def convert(model: nn.Linear) -> None:
    model.double()


def replace_data(model: nn.Linear) -> None:
    model.weight.data = model.weight.data.double()


def load(model: nn.Linear) -> None:
    weight = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
    model.load_state_dict({"weight": weight}, assign=True)


def replace(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach().double())


@pytest.mark.parametrize("change", [convert, replace_data, load, replace])
def test_new_storages_of_parameters_are_parameters(change: Callable[[nn.Linear], None]) -> None:
    model = linear()
    memory, own = held_at_the_end(lambda: change(model), model)
    assert memory.by_role()["parameters"] == own.parameters == WEIGHT * F64


def test_parameters_of_a_model_that_is_made_in_the_block_are_parameters() -> None:
    x, kept = torch.ones(ROWS, WIDTH), []

    def run() -> None:
        model = linear()
        kept.append(model)
        with torch.no_grad():
            model(x)

    memory, own = held_at_the_end(run, None)
    assert memory.by_role()["parameters"] == own.parameters == WEIGHT * F32


def test_gradients_that_are_set_before_the_first_backward_are_gradients() -> None:
    model, x = linear(), torch.ones(ROWS, WIDTH)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model.weight.grad = torch.zeros(WIDTH, WIDTH)
        model(x).sum().backward()
    memory, root = counter.profile.memory, counter.profile.root.memory
    assert memory is not None and root is not None
    assert memory.by_role("backward")["gradients"] == root.own.gradients == WEIGHT * F32


class Queue(nn.Module):
    """Keeps the last rows that it was given, in a new buffer at each call."""

    rows: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(11, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows = torch.cat([self.rows, x])[-11:].clone()
        return x.sum()


def test_buffer_that_each_call_sets_anew_is_a_buffer_also_after_its_release() -> None:
    model, x = Queue(), torch.ones(ROWS, WIDTH)

    def run() -> None:
        for _ in range(3):
            model(x)

    memory, own = held_at_the_end(run, model)
    assert memory.by_role()["buffers"] == own.buffers == 11 * WIDTH * F32

    with FlopCounterMode(model, display=False, memory=True) as counter:
        run()
        torch.empty(LARGE)
        model(x)  # releases the buffer of the peak
    assert counter.profile.memory is not None
    assert counter.profile.memory.by_role()["buffers"] == 11 * WIDTH * F32


def test_copy_of_a_model_that_each_step_moves_holds_parameters() -> None:
    """An average of weights, as self-supervised training keeps, without a call of its own."""
    student, teacher = linear(), linear()
    model, x = nn.ModuleList([student, teacher]), torch.ones(ROWS, WIDTH)

    def run() -> None:
        for _ in range(2):
            student(x).sum().backward()
            teacher.weight.data = teacher.weight.data * 0.9 + student.weight.data * 0.1

    memory, _ = held_at_the_end(run, model)
    assert memory.by_role()["parameters"] == 2 * WEIGHT * F32


def test_results_that_functional_call_puts_into_a_module_are_activations() -> None:
    model, x = linear(), torch.ones(ROWS, WIDTH, requires_grad=True)
    kept = []

    def run() -> None:
        inner = model.weight * 2
        kept.append(functional_call(model, {"weight": inner}, (x,)))

    memory, own = held_at_the_end(run, model)
    assert memory.by_role()["parameters"] == own.parameters == WEIGHT * F32
    assert memory.by_role()["activations"] == (WEIGHT + ROWS * WIDTH) * F32


def test_activations_of_forward_and_recomputation_are_those_of_one_step_together() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            recomputed = checkpoint(self.activation, x, use_reentrant=False)
            return cast(torch.Tensor, recomputed + self.activation(x))

    model, x = Twice(), torch.ones(ROWS, WIDTH, requires_grad=True)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        for _ in range(2):
            model(x).sum().backward()
    held = counter.profile.node("activation").memory
    assert held is not None and held.own.activations == 2 * ROWS * WIDTH * F32


def test_gradients_that_are_dropped_without_an_optimizer_step_are_held() -> None:
    model, x = linear(), torch.ones(ROWS, WIDTH)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        for _ in range(2):
            model(x).sum().backward()
            x.neg()
            model.zero_grad()
    held = counter.profile.root.memory
    assert held is not None and held.own.gradients == WEIGHT * F32


class WithGlobalState(torch.optim.SGD):
    """Also keeps state that is of no parameter, which torch saves under its name."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state["seen"] = {"batches": torch.ones(11)}  # type: ignore[index]
        super().step(closure)


def test_optimizer_state_that_is_of_no_parameter_is_optimizer_state() -> None:
    model, x = linear(), torch.ones(ROWS, WIDTH)
    optimizer = WithGlobalState(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        model(x).sum().backward()
        optimizer.step()

    memory, own = held_at_the_end(run, model)
    assert memory.by_role()["optimizer state"] == (WEIGHT + 11) * F32
    assert own.optimizer_state == WEIGHT * F32


class Delayed(torch.optim.SGD):
    """Keeps the gradients of the last two steps in a deque, as AdaShift does."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("gradients", deque(maxlen=2)).append(parameter.grad)


def test_optimizer_state_in_a_deque_is_optimizer_state() -> None:
    model, x = linear(), torch.ones(ROWS, WIDTH)
    optimizer = Delayed(model.parameters(), lr=0.1)

    def run() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        run()
    memory, own = held_at_the_end(run, model)
    assert memory.by_role()["optimizer state"] == own.optimizer_state == 2 * WEIGHT * F32


class KeepsWeights(torch.optim.Optimizer):
    """Keeps a copy of each parameter, and has another optimizer take the step, as SAM does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.clone()
        self.inner.step(closure)


class SharesState(torch.optim.Optimizer):
    """Shows the state of another optimizer as its own, as accelerate's does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.state = inner, inner.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


@pytest.mark.parametrize(("wrapper", "copies"), [(KeepsWeights, 2), (SharesState, 1)])
def test_state_of_an_optimizer_and_of_the_one_that_it_wraps_is_held_together(
    wrapper: Callable[[torch.optim.Optimizer], torch.optim.Optimizer], copies: int
) -> None:
    model, x = linear(), torch.ones(ROWS, WIDTH)
    optimizer = wrapper(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def run() -> None:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    memory, own = held_at_the_end(run, model)
    assert memory.by_role()["optimizer state"] == own.optimizer_state == copies * WEIGHT * F32


class Branches(nn.Module):
    """Calls one of two layers, whose results are kept for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Tanh(), nn.Tanh()])

    def forward(self, x: torch.Tensor, at: int) -> torch.Tensor:
        return cast(torch.Tensor, self.branches[at](x))


@pytest.mark.parametrize("later", [0, 200])
def test_modules_that_keep_activations_in_different_steps_do_not_hold_them_together(
    later: int,
) -> None:
    model, small = Branches(), torch.ones(1, WIDTH, requires_grad=True)
    first, second = (torch.ones(rows, WIDTH, requires_grad=True) for rows in (11, 13))
    with FlopCounterMode(model, display=False, memory=True) as counter:
        for x, at in ((first, 0), (second, 1), *[(small, 0)] * later):
            model(x, at).sum().backward()
    root = counter.profile.root
    own = [node.memory and node.memory.own.activations for node in root.walk()]
    total = [node.memory and node.memory.total.activations for node in root.walk()]
    assert own == [0, 0, 11 * WIDTH * F32, 13 * WIDTH * F32]
    assert total == [13 * WIDTH * F32] * 2 + own[2:]


@pytest.mark.parametrize("largest", [62, 63, 64])
@pytest.mark.parametrize("has_backward", [True, False])
def test_step_that_keeps_most_is_found_however_many_there_are(
    largest: int, has_backward: bool
) -> None:
    """Half of it is released only when the next step has made the like; step 5 kept more."""

    class Halves(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sigmoid(), x.tanh()

    model = nn.Sequential(Halves())

    def run() -> None:
        for step in range(70):
            rows = {5: 13, largest: 17}.get(step, 1)
            kept, other = model(torch.ones(rows, WIDTH, requires_grad=has_backward))
            if has_backward:
                other.sum().backward()
            del other
        del kept

    with torch.set_grad_enabled(has_backward):
        assert activations_of(model, run) == [2 * 17 * WIDTH * F32]


@pytest.mark.parametrize("show", [lambda data: data, lambda data: data.t(), lambda data: data[:]])
def test_parameters_that_show_the_same_memory_are_held_once(
    show: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    first, second = linear(), linear()
    second.weight = nn.Parameter(show(first.weight.data))
    model = nn.Sequential(first, second)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(ROWS, WIDTH)).sum().backward()
    memory, root = counter.profile.memory, counter.profile.root
    assert memory is not None and root.memory is not None
    each = [child.memory and child.memory.own.parameters for child in root.children]
    assert each == [WEIGHT * F32] * 2
    assert root.memory.total.parameters == memory.by_role()["parameters"] == WEIGHT * F32
    assert root.memory.total.gradients == 2 * WEIGHT * F32


def test_parts_of_one_storage_are_held_each() -> None:
    flat = torch.ones(2 * WEIGHT)
    model = nn.Sequential(linear(), linear())
    for layer, part in zip(model, flat.split(WEIGHT), strict=True):
        layer.weight = nn.Parameter(part.view(WIDTH, WIDTH))
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(ROWS, WIDTH))
    root = counter.profile.root.memory
    assert root is not None and root.total.parameters == 2 * WEIGHT * F32


def test_buffer_that_shows_a_parameter_is_part_of_the_parameters() -> None:
    model = linear()
    model.register_buffer("diagonal", model.weight.data.diagonal())
    model.register_buffer("transposed", model.weight.data.t())
    memory, own = held_at_the_end(lambda: model(torch.ones(ROWS, WIDTH)), model)
    assert memory.by_role()["parameters"] == own.parameters == WEIGHT * F32
    assert "buffers" not in memory.by_role()
    assert not own.buffers


@pytest.mark.parametrize("order", [1, -1])
def test_buffer_of_another_module_that_shows_a_parameter_is_part_of_the_parameters(
    order: int,
) -> None:
    first, second = linear(), nn.Tanh()
    second.register_buffer("alias", first.weight.data)
    model = nn.Sequential(*[first, second][::order])
    with FlopCounterMode(model, display=False, memory=True) as counter:
        second(first(torch.ones(ROWS, WIDTH)))
    memory, held = counter.profile.memory, counter.profile.root.memory
    assert memory is not None and held is not None
    assert memory.by_role()["parameters"] == held.total.parameters == WEIGHT * F32
    assert "buffers" not in memory.by_role() and not held.total.buffers


def activations_of(model: nn.Module, run: Callable[[], object]) -> list[int]:
    """Return the bytes of activations that each child of a model holds."""
    with FlopCounterMode(model, display=False, memory=True) as counter:
        run()
    held = [child.memory for child in counter.profile.root.children]
    return [memory.own.activations for memory in held if memory is not None]


@pytest.mark.parametrize("calls", [1, 2, 200])
def test_calls_without_gradients_do_not_hold_their_results_together(calls: int) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def run() -> None:
        with torch.no_grad():
            for rows in range(1, calls + 1):
                model(torch.ones(rows, WIDTH))

    assert activations_of(model, run) == [0, calls * WIDTH * F32]


def test_what_is_let_go_counts_beside_what_an_earlier_call_still_holds() -> None:
    """The result of the first call, with 3 rows, is there in all; others are let go of."""
    model = nn.Sequential(nn.Tanh())
    batches = [torch.ones(rows, WIDTH, requires_grad=True) for rows in (3, 5, 7)]
    gradient = torch.ones(3, WIDTH)

    def run() -> None:
        first = model(batches[0])
        for x in batches[1:]:
            model(x)
        first.backward(gradient)

    assert activations_of(model, run) == [(3 + 7) * WIDTH * F32]


class WithGradientInside(nn.Module):
    """A result that is computed after the gradient of another one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            torch.autograd.grad(y.sigmoid().sum(), y)
        return x.tanh()


def test_call_without_gradients_is_a_step_of_its_own_with_a_backward_pass_inside() -> None:
    """It keeps what the pass inside needs, with a sum and its gradient, and then its result."""
    model = nn.Sequential(WithGradientInside())

    def run() -> None:
        with torch.no_grad():
            held = model(torch.ones(7, WIDTH))
        model(torch.ones(3, WIDTH, requires_grad=True)).sum().backward()
        del held

    assert activations_of(model, run) == [(2 * 7 * WIDTH + 2) * F32]


def test_calls_without_gradients_between_others_are_steps_of_their_own() -> None:
    """Two calls, with 3 and 5 rows, keep activations for one backward pass; one has 7."""
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def train() -> None:
        first = model(torch.ones(3, WIDTH, requires_grad=True))
        with torch.no_grad():
            model(torch.ones(7, WIDTH))
        second = model(torch.ones(5, WIDTH, requires_grad=True))
        (first.sum() + second.sum()).backward()

    def run() -> None:
        for _ in range(2):
            train()
            with torch.no_grad():
                model(torch.ones(7, WIDTH))

    assert activations_of(model, run) == [(3 + 5) * WIDTH * F32] * 2


ROUNDS = 1, 2, 3, 200


@pytest.mark.parametrize("calls", ROUNDS)
def test_calls_whose_results_are_dropped_do_not_hold_them_together(calls: int) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def run() -> None:
        for rows in range(1, calls + 1):
            model(torch.ones(rows, WIDTH, requires_grad=True))

    assert activations_of(model, run) == [calls * WIDTH * F32] * 2


@pytest.mark.parametrize("calls", ROUNDS)
@pytest.mark.parametrize("first", [0, 500])
def test_result_that_the_next_one_replaces_is_held_with_it(calls: int, first: int) -> None:
    """Call number n has n rows; the result of a first call is kept to the end."""
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def run() -> None:
        kept = model(torch.ones(first, WIDTH, requires_grad=True))  # noqa: F841
        for rows in range(1, calls + 1):
            y = model(torch.ones(rows, WIDTH, requires_grad=True))
        del y

    rows = first + calls + (calls - 1)
    assert activations_of(model, run) == [rows * WIDTH * F32] * 2


@pytest.mark.parametrize("window", [3, 63, 64, 65, 200])
def test_window_of_the_latest_results_is_held_with_the_next_one(window: int) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def run() -> None:
        latest = deque[torch.Tensor](maxlen=window)
        for _ in range(3 * window + 70):
            latest.append(model(torch.ones(1, WIDTH, requires_grad=True)))

    assert activations_of(model, run) == [(window + 1) * WIDTH * F32] * 2


def test_result_that_is_held_for_long_counts_in_rounds_that_kept_less_without_it() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def run() -> None:
        for rows in (100, *[1] * 200):
            model(torch.ones(rows, WIDTH, requires_grad=True))
        kept = model(torch.ones(500, WIDTH, requires_grad=True))  # noqa: F841
        for rows in (90, *[1] * 200):
            model(torch.ones(rows, WIDTH, requires_grad=True))

    assert activations_of(model, run) == [(500 + 90) * WIDTH * F32] * 2


def test_results_that_are_dropped_together_are_held_together() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def run() -> None:
        for _ in range(4):
            pair = [model(torch.ones(rows, WIDTH, requires_grad=True)) for rows in (3, 5)]
            pair.clear()

    assert activations_of(model, run) == [(3 + 5) * WIDTH * F32] * 2


@pytest.mark.parametrize("dropped", [7, 11])
def test_calls_before_one_backward_pass_are_held_together_after_a_call_that_is_dropped(
    dropped: int,
) -> None:
    model = nn.Sequential(nn.Tanh(), nn.Sigmoid())

    def run() -> None:
        for _ in range(2):
            model(torch.ones(dropped, WIDTH, requires_grad=True))
            first = model(torch.ones(3, WIDTH, requires_grad=True))
            model(torch.ones(2, WIDTH, requires_grad=True))
            second = model(torch.ones(5, WIDTH, requires_grad=True))
            (first.sum() + second.sum()).backward()
            del first, second

    assert activations_of(model, run) == [max(dropped, 3 + 5) * WIDTH * F32] * 2


def test_reentrant_checkpoints_of_layers_are_of_one_step() -> None:
    """Each layer keeps its result for the next one, and makes it again in backward."""
    model, x = nn.Sequential(nn.Tanh(), nn.Sigmoid()), torch.ones(ROWS, WIDTH, requires_grad=True)

    def run() -> None:
        for _ in range(2):
            y = x
            for layer in model:
                y = checkpoint(layer, y, use_reentrant=True)
            y.sum().backward()

    assert activations_of(model, run) == [2 * ROWS * WIDTH * F32] * 2


def test_parametrized_model_is_let_go_of_after_the_block() -> None:
    """Torch makes a class for it, whose properties hold it."""
    model = nn.utils.parametrizations.weight_norm(linear())
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(ROWS, WIDTH))
    assert counter.profile.memory is not None
    reference = weakref.ref(model)
    del model, counter
    gc.collect()
    assert reference() is None


def test_cache_from_before_is_one_also_where_a_call_replaces_or_does_not_read_it() -> None:
    class Grower(nn.Module):
        """Adds rows to the keys; the values stay as they are."""

        def forward(self, rows: torch.Tensor, past_key_values: dict[str, torch.Tensor]) -> None:
            past_key_values["keys"] = torch.cat([past_key_values["keys"], rows])

    cache = {"keys": torch.ones(5, 7), "values": torch.ones(3, 11), "none yet": torch.ones(0, 13)}
    model, rows = Grower(), torch.ones(2, 7)
    with torch.no_grad(), FlopCounterMode(model, display=False, memory=True) as counter:
        model(rows, past_key_values=cache)
    memory = counter.profile.memory
    assert memory is not None
    keys_and_values = 5 * 7 + (5 + 2) * 7 + 3 * 11  # old and new keys, while torch joins them
    assert memory.by_role() == {"KV cache": keys_and_values * F32, "inputs": 2 * 7 * F32}
