"""Memory of small programs, whose bytes are products of sizes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.errors import ConfigError, UncountedWarning
from dispatch_flops.memory import memory_mode
from dispatch_flops.profile import MemoryPeak, MemoryProfile, MemoryUse, PeakMoment
from tests.helpers.addresses import made_at
from tests.helpers.interrupting import TooLateError, interrupted_at
from tests.helpers.modes import OperatorNames

F32, F64, I64 = 4, 8, 8
MODE = memory_mode.__file__


def memory_of(run: Callable[[], object], *models: nn.Module, **options: object) -> MemoryProfile:
    with FlopCounterMode([*models] or None, display=False, memory=True, **options) as counter:  # type: ignore[arg-type]
        run()
    memory = counter.profile.check().memory
    assert memory is not None
    return memory


def test_memory_that_is_not_asked_for_is_none() -> None:
    with FlopCounterMode(display=False) as counter:
        torch.ones(3) + 1
    assert counter.profile.memory is None
    assert counter.profile.root.memory is None


def test_peak_is_the_most_that_was_allocated_at_a_time() -> None:
    def run() -> None:
        a = torch.ones(3, 5)
        b = torch.ones(7, dtype=torch.float64)
        del a
        torch.ones(11)
        del b

    memory = memory_of(run)
    assert memory.peak_bytes == 3 * 5 * F32 + 7 * F64
    assert memory.peak_at is not None and memory.peak_at.operator == "aten.ones.default"
    assert sum(use.bytes for use in memory.at_peak) == memory.peak_bytes


def test_range_around_an_optimizers_step_is_not_a_moment_of_forward() -> None:
    """The forward has the weight, its input and two results; gradients and state come later."""
    weight, x = nn.Linear(5, 7, bias=False), torch.ones(3, 5)
    adam = torch.optim.AdamW(weight.parameters(), foreach=False)

    def step() -> None:
        weight(x).sum().backward()
        adam.step()

    memory = memory_of(step, weight)
    assert memory.by_role("forward") == {
        "parameters": 5 * 7 * F32, "activations": 3 * 7 * F32 + F32, "inputs": 3 * 5 * F32,
    }  # fmt: skip


def test_views_and_in_place_results_take_no_memory() -> None:
    def run() -> None:
        a = torch.ones(3, 5)
        a.view(15)[2:].add_(1).t().mul_(2).unsqueeze(0)

    assert memory_of(run).peak_bytes == 3 * 5 * F32


def test_view_keeps_its_storage_allocated() -> None:
    def run() -> None:
        part = torch.ones(13, 5)[0]
        torch.ones(7)
        part.sum()

    assert memory_of(run).peak_bytes == 13 * 5 * F32 + 7 * F32


def test_out_argument_that_grows_counts_with_its_new_size() -> None:
    def run() -> None:
        out = torch.empty(0)
        torch.add(torch.ones(13), 1, out=out)

    assert memory_of(run).peak_bytes == 2 * 13 * F32


def test_resized_tensor_counts_with_its_new_size() -> None:
    def run() -> None:
        a = torch.ones(3)
        a.resize_(11)
        a.untyped_storage().resize_(0)
        torch.ones(7)

    assert memory_of(run).peak_bytes == (3 + 11) * F32


RESIZED: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "operator": (lambda a: a.resize_(11), 3 + 11),
    "operator to fewer elements": (lambda a: a.resize_(2), 3),
    "storage": (lambda a: a.untyped_storage().resize_(11 * F32), 3 + 11),
    "storage to fewer bytes": (lambda a: a.untyped_storage().resize_(2 * F32), 3 + 2),
    "released": (lambda a: a.untyped_storage().resize_(0), 3),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", RESIZED)
def test_old_and_new_memory_of_a_resized_tensor_are_there_at_once(way: str, device: str) -> None:
    """Torch copies what fits."""
    resize, most = RESIZED[way]
    memory = memory_of(lambda: resize(torch.ones(3, device=device)))
    assert memory.peak_bytes == most * F32
    assert sum(use.bytes for use in memory.at_peak) == most * F32


def test_storage_that_is_resized_on_its_own_is_named_at_the_peak() -> None:
    memory = memory_of(lambda: torch.ones(3).untyped_storage().resize_(11 * F32))
    assert memory.peak_at is not None
    assert memory.peak_at.operator == "UntypedStorage.resize_"
    assert {use.role: use.bytes for use in memory.at_peak} == {
        "temporaries": 3 * F32, "workspace": 11 * F32,
    }  # fmt: skip


def test_parameter_without_memory_is_unsharded_once_its_storage_has_some() -> None:
    """As FSDP's parameters are, whose storages an earlier step made."""
    model, x = nn.Linear(5, 7, bias=False), torch.ones(2, 5)
    storage = model.weight.untyped_storage()
    storage.resize_(0)

    def run() -> None:
        x + 1
        storage.resize_(5 * 7 * F32)
        with torch.no_grad():
            model(x)

    assert memory_of(run, model).by_role()["unsharded parameters"] == 5 * 7 * F32


@pytest.mark.parametrize("has_gradient", [False, True])
def test_gradients_of_a_parameter_that_is_gone_are_not_those_of_one_at_its_address(
    has_gradient: bool,
) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False))
    data = torch.ones(2, 3)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        for _ in range(100):
            model(torch.ones(1, 3)).sum().backward()
            model(torch.ones(1, 3))  # notes the gradients
            gone, model[0].weight = id(model[0].weight), None
            model[0].weight = made_at(gone, lambda: nn.Parameter(data))
            if model[0].weight is not None:
                break
            model[0].weight = nn.Parameter(torch.ones(3, 3))
        assert model[0].weight.shape == data.shape
        if has_gradient:
            model(torch.ones(1, 3)).sum().backward()
    memory = counter.profile.root.children[0].memory
    assert memory is not None
    held = 2 * 3 * F32
    assert (memory.own.parameters, memory.own.gradients) == (held, has_gradient * held)


def test_module_holds_the_largest_of_its_gradients() -> None:
    """A sparse gradient has an index and a row for each token."""
    model = nn.Embedding(11, 3, sparse=True)
    optimizer = torch.optim.SGD(model.parameters())
    with FlopCounterMode(model, display=False, memory=True) as counter:
        for tokens in (5, 7, 2):
            model(torch.arange(tokens)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory = counter.profile.root.memory
    assert memory is not None
    assert memory.own.gradients == 7 * (I64 + 3 * F32)


def test_sparse_tensor_counts_with_indices_and_values() -> None:
    diagonal = torch.eye(5).to_sparse()
    held = 2 * 5 * 8 + 5 * F32

    def run() -> None:
        diagonal.clone()

    assert memory_of(run).peak_bytes == 2 * held


@pytest.mark.parametrize("is_given", [False, True])
def test_looking_at_sparse_tensors_that_are_held_runs_no_operator(is_given: bool) -> None:
    """A buffer, the gradients of a parameter and of another leaf, and a state have parts."""
    seen = []
    for memory in (False, True):
        model = nn.Embedding(7, 3, sparse=True)
        model.register_buffer("mask", torch.eye(3).to_sparse())
        model(torch.arange(5)).sum().backward()
        leaf = torch.ones(3, 3, requires_grad=True)
        leaf.grad = torch.eye(3).to_sparse()
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[model.weight]["rows"] = torch.eye(3).to_sparse()
        given = model if is_given else None
        with OperatorNames() as names, FlopCounterMode(given, display=False, memory=memory):
            leaf * 2
            for tokens in (5, 2):
                model(torch.arange(tokens)).sum().backward()
                optimizer.step()
        seen.append(names.seen)
    assert seen[0] == seen[1]


def test_view_of_a_sparse_tensor_may_have_new_indices_and_values() -> None:
    """Torch transposes a copy: 2 indices and a value for each of 15 elements."""
    x = torch.ones(3, 5).to_sparse()
    assert memory_of(x.t).peak_bytes == 2 * (2 * 15 * I64 + 15 * F32)


def test_rounding_applies_to_every_block() -> None:
    def run() -> None:
        kept = [torch.ones(3), torch.ones(512 // F32), torch.ones(512 // F32 + 1)]
        kept.clear()

    assert memory_of(run, memory_rounding=512).peak_bytes == (1 + 1 + 2) * 512


def test_rounding_applies_to_workspaces_that_are_stated_and_reported() -> None:
    length = 101
    whole, floats = torch.ones(length, dtype=torch.int32), torch.ones(length)
    for run, cast in ((lambda: whole.sum(), length * 8), (lambda: floats * whole, length * F32)):
        memory = memory_of(run, memory_rounding=512)
        assert memory.by_role()["workspace"] == -(-cast // 512) * 512
        assert memory.peak_bytes % 512 == 0


@pytest.mark.parametrize("rounding", [0, -1, 1.5, True, "512"])
def test_rounding_that_is_not_a_number_of_bytes_is_an_error(rounding: object) -> None:
    with pytest.raises(ConfigError, match="memory_rounding"):
        FlopCounterMode(memory=True, memory_rounding=rounding)  # type: ignore[arg-type]


def test_training_step_is_split_into_roles() -> None:
    batch, width, hidden = 11, 3, 5
    model = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, 1, bias=False))
    x = torch.ones(batch, width)
    params = (width * hidden + hidden + hidden) * F32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> None:
        model(x).sum().backward()
        optimizer.step()

    memory = memory_of(run, model)
    assert memory.by_role("optimizer") == {
        "parameters": params,
        "gradients": params,
        "optimizer state": params,
        "inputs": batch * width * F32,
    }
    # The peak is at Tanh, which keeps its result and not its input.
    assert memory.by_role("forward") == {
        "parameters": params,
        "inputs": batch * width * F32,
        "activations": batch * hidden * F32,
        "temporaries": batch * hidden * F32,
    }


def test_module_knows_what_it_holds_and_keeps() -> None:
    batch, width, hidden = 7, 3, 5
    model = nn.Sequential(nn.Linear(width, hidden), nn.BatchNorm1d(hidden))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        for _ in range(3):  # the activations of one step, not of all
            model(torch.ones(batch, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    root = counter.profile.root
    linear, norm = (child.memory for child in root.children)
    assert linear is not None and norm is not None and root.memory is not None
    held = (width * hidden + hidden) * F32
    assert (linear.own.parameters, linear.own.gradients, linear.own.optimizer_state) == (held,) * 3
    assert linear.own.activations == batch * hidden * F32
    assert norm.own.buffers == 2 * hidden * F32 + 8  # num_batches_tracked is an int64
    assert root.memory.own.parameters == 0
    assert root.memory.total.parameters == held + 2 * hidden * F32
    assert root.memory.total.activations == linear.own.activations + norm.own.activations
    assert root.memory.peak_bytes["forward"] >= linear.peak_bytes["forward"]


def test_parameter_that_two_modules_share_counts_once() -> None:
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = model[0].weight
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model[1](model[0](torch.ones(1, 3)))
    root = counter.profile.root
    assert [c.memory and c.memory.own.parameters for c in root.children] == [3 * 3 * F32] * 2
    assert root.memory is not None and root.memory.total.parameters == 3 * 3 * F32
    assert counter.profile.memory is not None
    assert counter.profile.memory.by_role()["parameters"] == 3 * 3 * F32


def test_optimizer_that_does_not_step_is_passed() -> None:
    model = nn.Linear(3, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    def run() -> None:
        model(torch.ones(2, 3))

    assert "optimizer state" not in memory_of(run, model).by_role()
    found = memory_of(run, model, optimizers=[optimizer])
    assert found.by_role()["optimizer state"] == 3 * 5 * F32


def test_gradients_that_share_a_storage_count_once_each() -> None:
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False))
    flat = torch.zeros(3 * 5 + 5 * 7)
    model[0].weight.grad = flat[: 3 * 5].view(5, 3)
    model[1].weight.grad = flat[3 * 5 :].view(7, 5)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(2, 3)).sum().backward()
    root = counter.profile.root
    held = [child.memory and child.memory.own.gradients for child in root.children]
    assert held == [3 * 5 * F32, 5 * 7 * F32]


def test_gradients_at_the_end_of_the_block_are_known_to_their_modules() -> None:
    model = nn.Linear(3, 5, bias=False)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(2, 3)).sum().backward()
    assert counter.profile.root.memory is not None
    assert counter.profile.root.memory.own.gradients == 3 * 5 * F32


def test_gradients_that_no_optimizer_uses_are_gradients() -> None:
    model = nn.Linear(3, 5, bias=False)

    def run() -> None:
        model(torch.ones(2, 3)).sum().backward()
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()

    assert memory_of(run, model).by_role("backward")["gradients"] == 3 * 5 * F32


def test_gradient_that_a_later_backward_pass_releases_is_a_gradient() -> None:
    x = torch.ones(1009, requires_grad=True)

    def run() -> None:
        kept = [*torch.autograd.grad(x.exp().sum(), x)]
        y = x.sin()
        y.register_hook(lambda _: kept.clear())
        y.sum().backward()

    # The peak is where the sum of the sines is there, and the gradient that backward() begins with.
    size = 1009 * F32
    assert memory_of(run).by_role("forward") == {
        "inputs": size, "gradients": size, "activations": size + 2 * F32,
    }  # fmt: skip


def test_without_backward_what_outlives_the_call_is_an_activation() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Sigmoid(), nn.Linear(5, 11))
    x = torch.ones(7, 3)

    def run() -> None:
        model(x)

    # The result of Sigmoid is kept for backward; without backward it is released in the call.
    memory = memory_of(run, model)
    assert memory.by_role()["activations"] == 7 * 5 * F32 + 7 * 11 * F32
    with torch.no_grad():
        memory = memory_of(run, model)
    assert memory.by_role()["activations"] == 7 * 11 * F32
    assert memory.by_role()["temporaries"] == 7 * 5 * F32


@pytest.mark.parametrize("is_held", [True, False])
def test_result_that_is_held_until_the_next_forward_is_an_activation(is_held: bool) -> None:
    """No module is called, so that it outlives a phase, and no call."""
    rows, width, columns = 3, 5, 7
    x, weight = torch.ones(rows, width), torch.ones(width, columns, requires_grad=True)

    def run() -> None:
        extra = [torch.ones(1009)]  # the first step has the peak
        for _ in range(2):
            y = x @ weight
            y.sum().backward()
            extra.clear()
            weight.grad = None
            if not is_held:
                del y

    # With the result, there are its sum and the gradient that backward() begins with.
    kept = 1009 + rows * columns + 2
    assert memory_of(run).by_role("backward")["activations"] == kept * F32


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_activations_are_of_the_phase_recompute(use_reentrant: bool) -> None:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(5, 5), nn.Sigmoid(), nn.Linear(5, 5)) for _ in range(3)
    )
    x = torch.ones(101, 5, requires_grad=True)

    def run() -> None:
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=use_reentrant)
        y.sum().backward()

    memory = memory_of(run, layers)
    recomputed = [use for use in memory.at_peak if use.phase == "recompute"]
    assert recomputed and {use.role for use in recomputed} <= {"activations", "temporaries"}
    assert memory.by_role("backward").keys() >= {"activations", "parameters"}


def test_gradient_that_flows_between_checkpoints_is_temporary() -> None:
    """It is there while the first function is run again, and gone after the pass."""
    x = torch.ones(101, requires_grad=True)

    def run() -> None:
        y = x
        for function in (lambda x: x.repeat(3).tanh(), torch.sigmoid):
            y = checkpoint(function, y, use_reentrant=False)  # type: ignore[assignment]
        y.sum().backward()

    assert "gradients" not in memory_of(run).by_role("recompute")


def test_saved_tensor_hook_that_packs_smaller_lowers_the_peak() -> None:
    model = nn.Sequential(*(nn.Sigmoid() for _ in range(4)))
    x = torch.ones(101, requires_grad=True)

    def run() -> None:
        model(x).sum().backward()

    def run_packed() -> None:
        half = torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float())
        with half:
            model(x).sum().backward()

    assert memory_of(run_packed, model).peak_bytes < memory_of(run, model).peak_bytes


def test_each_device_has_a_peak() -> None:
    def run() -> None:
        kept = [torch.ones(3), torch.ones(5, 7, device="meta")]
        kept.clear()

    memory = memory_of(run)
    assert {device.device: device.peak_bytes for device in memory.devices} == {
        "meta": 5 * 7 * F32,
        "cpu": 3 * F32,
    }
    assert memory.peak_bytes == 5 * 7 * F32


class OnMeta(nn.Module):
    """Computes on the meta device with weights that stay on the CPU, as offloaded ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(11, 3)), nn.Parameter(torch.ones(11))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to("meta"), self.bias.to("meta"))


def test_device_without_a_byte_is_no_device_of_the_run() -> None:
    """The first operator is a view, which allocates nothing on any device."""
    x = torch.ones(3, 5, device="meta")
    with FlopCounterMode(display=False, memory=True) as counter:
        x.t() + 1
    memory = counter.profile.memory
    assert memory is not None
    assert [(found.device, found.peak_bytes) for found in memory.devices] == [("meta", 2 * 15 * 4)]


def test_device_on_which_nothing_is_allocated_has_what_it_holds() -> None:
    """It comes last, though it holds more: every figure is of a device where operators ran."""
    model, x = OnMeta(), torch.ones(2, 3, device="meta")

    with torch.no_grad():
        on_meta, on_cpu = memory_of(lambda: model(x), model).devices
    assert (on_meta.device, on_cpu.device) == ("meta", "cpu")
    assert on_cpu.peaks == (
        MemoryPeak(
            peak_bytes=(11 * 3 + 11) * F32,
            peak_at=PeakMoment(fqn="", phase="forward"),
            uses=(MemoryUse(role="parameters", bytes=(11 * 3 + 11) * F32),),
        ),
    )


def test_device_on_which_nothing_is_allocated_had_what_was_released_since() -> None:
    held = [torch.ones(5, 7), torch.ones(13)]

    def run() -> None:
        torch.ones(3, device="meta")
        held.pop().to("meta")
        held.pop().to("meta")

    _, on_cpu = memory_of(run).devices
    assert on_cpu.peak_bytes == (5 * 7 + 13) * F32
    assert sum(use.bytes for use in on_cpu.peaks[0].uses) == on_cpu.peak_bytes


def test_device_on_which_nothing_is_allocated_has_what_is_met_late() -> None:
    model, x = nn.Linear(3, 5, device="meta"), torch.ones(2, 3, device="meta")
    late = torch.ones(7, 3)

    def run() -> None:
        model(x + x)
        model(late.to("meta"))

    _, on_cpu = memory_of(run, model).devices
    assert on_cpu.peak_bytes == 7 * 3 * F32
    assert [use.role for use in on_cpu.peaks[0].uses] == ["inputs"]


def test_device_on_which_nothing_is_allocated_had_what_is_met_late_and_released_since() -> None:
    model, x = nn.Linear(3, 5, device="meta"), torch.ones(2, 3, device="meta")
    late = [torch.ones(7, 3), torch.ones(11, 3)]

    def run() -> None:
        model(x + x)
        model(late.pop().to("meta"))
        model(late.pop().to("meta"))

    _, on_cpu = memory_of(run, model).devices
    assert on_cpu.peak_bytes == 11 * 3 * F32
    assert [(use.role, use.bytes) for use in on_cpu.peaks[0].uses] == [("inputs", 11 * 3 * F32)]


def test_result_outside_of_modules_that_is_held_at_the_end_is_an_activation() -> None:
    held = []
    memory = memory_of(lambda: held.append(torch.ones(7) + 1))
    assert memory.by_role() == {"activations": 7 * F32, "temporaries": 7 * F32}


def test_storage_that_is_resized_before_any_operator_is_met_by_the_first_that_reads_it() -> None:
    x = torch.ones(3)

    def run() -> None:
        x.untyped_storage().resize_(5 * F32)
        x.neg()

    assert memory_of(run).by_role()["inputs"] == 5 * F32


def test_parameter_that_is_never_made_holds_nothing() -> None:
    model = nn.ModuleList((nn.Linear(3, 5, bias=False), nn.LazyLinear(7)))
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model[0](torch.ones(2, 3))
    held = [child.memory.own.parameters for child in counter.profile.root.children if child.memory]
    assert held == [3 * 5 * F32, 0]


class OfItsGradient(nn.Module):
    """The gradient of a layer by its input, as part of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(self.layer(x).sum(), x, create_graph=True)
        return gradient * 2


def test_gradients_of_what_functional_call_puts_in_a_module_are_not_asked_for() -> None:
    """Torch warns where the gradient of a result is read."""
    model, x = OfItsGradient(), torch.ones(2, 3, requires_grad=True)

    def run() -> None:
        weight = model.layer.weight * 2
        torch.func.functional_call(model, {"layer.weight": weight}, x)

    assert memory_of(run, model).peak_bytes > 0


@pytest.mark.parametrize("train", [True, False])
def test_meta_makes_no_gradient_of_an_input_that_batch_norm_was_not_asked_for(train: bool) -> None:
    rows, width = 1009, 7
    model = nn.BatchNorm1d(width, device="meta").train(train)
    x, grad = (torch.empty(rows, width, device="meta") for _ in range(2))
    memory = memory_of(lambda: model(x).backward(grad), model)
    at_backward = memory.by_role("backward")
    assert at_backward["inputs"] == 2 * rows * width * F32
    assert "temporaries" not in at_backward
    assert at_backward["gradients"] == 2 * width * F32


def test_meta_equals_cpu_to_the_byte() -> None:
    def step(device: str) -> Callable[[], None]:
        model = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 7))
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.ones(11, 3, device=device)

        def run() -> None:
            model(x).square().mean().backward()
            optimizer.step()

        run()
        optimizer.zero_grad()
        return run

    cpu, meta = (memory_of(step(device)) for device in ("cpu", "meta"))
    # AdamW keeps the number of steps of each of the 6 parameters on the CPU, wherever they are.
    steps = 6 * F32
    assert meta.peak_bytes + steps == cpu.peak_bytes
    assert [device.peak_bytes for device in meta.devices] == [meta.peak_bytes, steps]
    state = meta.by_role().pop("optimizer state")
    assert meta.by_role() | {"optimizer state": state + steps} == cpu.by_role()


def test_exception_in_the_block_leaves_a_valid_profile() -> None:
    counter = FlopCounterMode(display=False, memory=True)

    def run() -> None:
        with counter:
            torch.ones(3)
            raise KeyError("in the block")

    with pytest.raises(KeyError):
        run()
    memory = counter.profile.check().memory
    assert memory is not None and memory.peak_bytes == 3 * F32


def test_thread_inside_in_thread_is_followed() -> None:
    with FlopCounterMode(display=False, memory=True) as counter:
        kept = []

        def work() -> None:
            with counter.in_thread():
                kept.append(torch.ones(5))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.ones(7)
        kept.clear()
    assert counter.profile.memory is not None
    assert counter.profile.memory.peak_bytes == (5 + 7) * F32


def test_pause_does_not_lose_what_is_released_meanwhile() -> None:
    with FlopCounterMode(display=False, memory=True) as counter:
        a = torch.ones(13)
        counter.pause()
        del a
        counter.resume()
        torch.ones(11)
    assert counter.profile.memory is not None
    assert counter.profile.memory.peak_bytes == 13 * F32


def test_data_from_outside_the_run_counts_once_each() -> None:
    model = nn.Linear(3, 1, bias=False)
    batches = [torch.ones(5, 3) for _ in range(4)]

    def run() -> None:
        while batches:
            model(batches.pop())

    # The first batch is there from the start, each other from its first operator on.
    memory = memory_of(run, model)
    assert memory.by_role()["inputs"] == 5 * 3 * F32


@pytest.mark.parametrize(
    ("use", "inputs"),
    [
        (lambda x, at: torch.cat([x, x]), 7 * F32),
        (lambda x, at: torch.ones(13)[None, at], 7 * I64),
        (lambda x, at: torch.ones(13).index_put_((at,), x), 7 * I64 + 7 * F32),
        (lambda x, at: torch.ops.aten.where.self(condition=x > 0, self=x, other=x), 7 * F32),
        (lambda x, at: torch._foreach_neg((x,)), 7 * F32),
        (lambda x, at: torch.neg(torch.ones(7), out=x), 7 * F32),
        (lambda x, at: x.view(1, 7), 7 * F32),
        (lambda x, at: torch.ones(7).mul(x), 7 * F32),
        (lambda x, at: torch.mm(x.view(7, 1), x.new_ones(1, 2)), 7 * F32),
        (lambda x, at: x.addcmul(torch.ones(7), torch.ones(7)), 7 * F32),
        (lambda x, at: torch.ones(7).addcmul(x, torch.ones(7)), 7 * F32),
        (lambda x, at: torch.ones(7).addcmul(torch.ones(7), x), 7 * F32),
    ],
    ids=[
        "list",
        "list that starts with None",
        "list and argument",
        "keywords",
        "tuple",
        "out argument",
        "only one",
        "second",
        "first",
        "first of three",
        "second of three",
        "third of three",
    ],
)
def test_data_from_outside_is_found_among_all_arguments(use: Any, inputs: int) -> None:
    x, at = torch.ones(7), torch.zeros(7, dtype=torch.int64)
    assert memory_of(lambda: use(x, at)).by_role()["inputs"] == inputs


def test_fake_data_from_outside_is_found_among_all_arguments() -> None:
    with FakeTensorMode():
        x, least = torch.ones(7), torch.zeros(7)
        assert memory_of(lambda: x.clamp(min=least)).by_role()["inputs"] == 2 * 7 * F32


def test_data_from_outside_is_found_in_an_argument_that_has_to_be_named() -> None:
    with torch.library._scoped_library("named_in_memory", "DEF") as library:
        library.define("scale(Tensor x, *, Tensor factor) -> Tensor")
        library.impl("scale", lambda x, *, factor: x * factor, "CPU")
        scale, factor = torch.ops.named_in_memory.scale, torch.ones(7)
        with pytest.warns(UncountedWarning):
            memory = memory_of(lambda: scale(torch.ones(7), factor=factor))
    assert memory.by_role()["inputs"] == 7 * F32


def test_profile_with_memory_survives_json() -> None:
    model = nn.Linear(3, 5)
    with FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(2, 3)).sum().backward()
    again = Profile.from_json(counter.profile.to_json())
    assert again == counter.profile
    assert again.memory == counter.profile.memory
    assert again.root.memory == counter.profile.root.memory


def test_own_resize_of_storages_is_back_after_the_block() -> None:
    own = torch.UntypedStorage.resize_
    with FlopCounterMode(display=False, memory=True):
        torch.ones(3)
    assert torch.UntypedStorage.resize_ is own


def test_latencies_and_memory_share_a_pass() -> None:
    model = nn.Linear(3, 5, bias=False)
    with FlopCounterMode(model, display=False, memory=True, latency=True) as counter:
        model(torch.ones(2, 3))
    assert counter.profile.memory is not None
    assert counter.profile.memory.peak_bytes == (3 * 5 + 2 * 3 + 2 * 5) * F32
    assert counter.profile.root.latency_s is not None


def test_error_of_a_signal_handler_is_raised() -> None:
    x, y = torch.ones(3, 5), torch.ones(3, 5)
    for step in itertools.count():
        raised = False
        try:
            with (
                FlopCounterMode(display=False, memory=True),
                interrupted_at(
                    step, lambda frame: frame.f_code.co_filename == MODE, TooLateError
                ) as hits,
            ):
                torch.cat([x + y, y.to_sparse().to_dense()])
        except TooLateError:
            raised = True
        assert raised == bool(hits)
        if not hits:
            break
