"""Memory of programs with threads, devices, exceptions, many steps, hooks, and unusual tensors.

Expected bytes are products of sizes, as of a program that allocates what its lines say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.testing._internal.two_tensor import TwoTensor

from dispatch_flops import FlopCounterMode
from dispatch_flops.profile import MemoryProfile

F16, F32, I64 = 2, 4, 8
SCALAR = F32
WIDTH = 101


def memory_of(run: Callable[[], object], model: nn.Module | None = None) -> MemoryProfile:
    with FlopCounterMode(model, display=False, memory=True) as counter:
        run()
    memory = counter.profile.check().memory
    assert memory is not None
    return memory


def of_device(memory: MemoryProfile, device: str) -> int:
    return next(d.peak_bytes for d in memory.devices if d.device == device)


def sigmoids(count: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Sigmoid() for _ in range(count))), torch.ones(WIDTH)


# -- threads ------------------------------------------------------------------------------------


def test_release_in_another_thread_is_noted() -> None:
    def run() -> None:
        kept = [torch.ones(13)]
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
        torch.ones(7)
        torch.ones(11)

    assert memory_of(run).peak_bytes == 13 * F32


def test_threads_at_the_same_time_add_up() -> None:
    count, both = 2, threading.Barrier(2)
    with FlopCounterMode(display=False, memory=True) as counter:

        def work() -> None:
            with counter.in_thread():
                for _ in range(50):
                    kept = torch.ones(13)
                    both.wait()
                    kept.add_(1)
                    both.wait()
                    del kept
                    both.wait()

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.ones(7)
    memory = counter.profile.check().memory
    assert memory is not None
    assert memory.peak_bytes == count * 13 * F32


def test_backward_in_another_thread_releases_the_activations_of_forward() -> None:
    model, x = sigmoids(3)
    x.requires_grad_()
    with FlopCounterMode(model, display=False, memory=True) as counter:
        losses = [model(x).sum()]

        def work() -> None:
            with counter.in_thread():
                losses.pop().backward()

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        x.grad = None
        torch.ones(5 * WIDTH)
    memory = counter.profile.check().memory
    assert memory is not None
    # x and the last tensor are all that is left.
    assert memory.peak_bytes == (1 + 5) * WIDTH * F32


# -- devices ------------------------------------------------------------------------------------


def test_step_with_layers_on_two_devices_has_a_peak_of_each() -> None:
    first, second = nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False, device="meta")
    batch = 11

    def run() -> None:
        second(first(torch.ones(batch, 3)).to("meta"))

    memory = memory_of(run, nn.ModuleList([first, second]))
    # Until the copy returns, input and result of the first layer are there.
    assert of_device(memory, "cpu") == (3 * 5 + batch * 3 + batch * 5) * F32
    assert of_device(memory, "meta") == (5 * 7 + batch * 5 + batch * 7) * F32
    assert memory.peak_bytes == max(of_device(memory, "cpu"), of_device(memory, "meta"))


def test_activations_that_are_offloaded_count_on_the_other_device() -> None:
    layers = 4
    model, x = sigmoids(layers)
    x.requires_grad_()

    def run() -> None:
        with saved_tensors_hooks(lambda t: t.to("meta"), lambda t: torch.zeros(t.shape)):
            total = model(x).sum()
        del total

    memory = memory_of(run, model)
    # Each layer saves its result; on the CPU there are x and the input and result of one layer.
    assert of_device(memory, "meta") == layers * WIDTH * F32
    assert of_device(memory, "cpu") == 3 * WIDTH * F32


def test_parameters_that_are_brought_for_each_call_take_memory_in_it_alone() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(3)))

    def bring(layer: nn.Linear, _: Any) -> None:
        layer.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def take_away(layer: nn.Linear, *_: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.to("meta"))

    for layer in model:
        layer._hf_hook = SimpleNamespace(execution_device="cpu")
        layer.register_forward_pre_hook(bring)
        layer.register_forward_hook(take_away)
    with torch.no_grad(), FlopCounterMode(model, display=False, memory=True) as counter:
        model(torch.ones(1, WIDTH))
    memory, root = counter.profile.check().memory, counter.profile.root.memory
    assert memory is not None and root is not None
    assert [device.device for device in memory.devices] == ["cpu"]
    # x, a weight, and the input and result of one layer
    assert memory.peak_bytes == (WIDTH + WIDTH * WIDTH + 2 * WIDTH) * F32
    assert root.total.parameters == 0


# -- exceptions ---------------------------------------------------------------------------------


def test_operator_that_raises_adds_nothing() -> None:
    def run() -> None:
        kept = torch.ones(7)
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(3, 5), torch.ones(3, 5))
        torch.ones(31)
        kept.add_(1)

    assert memory_of(run).peak_bytes == (7 + 31) * F32


def test_step_after_one_that_raised_has_its_own_activations() -> None:
    model, x = sigmoids(2)

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("in forward")

    failing = nn.Sequential(*model, Raises())
    x.requires_grad_()

    def run() -> None:
        with pytest.raises(KeyError):
            failing(x)
        model(x).sum().backward()
        x.grad = None

    memory = memory_of(run, failing)
    # The sum, and the gradient of the sum, which backward() makes before it starts.
    results = 2 * WIDTH * F32 + 2 * SCALAR
    assert memory.by_role("forward") == {"inputs": WIDTH * F32, "activations": results}


def test_exception_in_backward_releases_what_it_held() -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise KeyError("in backward")

    x = torch.ones(WIDTH, requires_grad=True)

    def run() -> None:
        with pytest.raises(KeyError):
            Raises.apply(x).exp().sum().backward()
        torch.ones(9 * WIDTH)

    assert memory_of(run).peak_bytes == (1 + 9) * WIDTH * F32


# -- steps --------------------------------------------------------------------------------------


def training_run(steps: int) -> MemoryProfile:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.ones(11, 3)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer has its state from now on
    return memory_of(lambda: [step() for _ in range(steps)], model)


def test_steps_in_one_block_have_the_peaks_of_one_step() -> None:
    one, three = training_run(1), training_run(3)
    assert one.peak_bytes == three.peak_bytes
    for phase in ("forward", "backward", "optimizer"):
        # State of the optimizer is known from its first step on; of earlier ones it was not.
        first, later = one.by_role(phase), three.by_role(phase)
        first.pop("optimizer state", None), later.pop("optimizer state", None)
        assert first == later


def test_program_that_keeps_what_it_computes_grows_with_its_steps() -> None:
    steps = 5
    kept: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(steps):
            kept.append(torch.ones(13) + 1)

    # During the last addition there is its other argument.
    assert memory_of(run).peak_bytes == (steps + 1) * 13 * F32


# -- hooks --------------------------------------------------------------------------------------


def test_saved_tensor_hooks_that_pack_to_half_precision_keep_half_the_bytes() -> None:
    layers = 4
    model, x = sigmoids(layers)
    x.requires_grad_()

    def run() -> None:
        with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
            model(x)

    # x, and at the last layer its input, its result, and what was packed.
    packed = layers * WIDTH * F16
    assert memory_of(run, model).peak_bytes == 3 * WIDTH * F32 + packed


def test_saving_on_the_cpu_what_is_there_keeps_one_copy() -> None:
    model, x = sigmoids(3)
    x.requires_grad_()

    def run() -> None:
        with save_on_cpu():
            model(x)

    assert memory_of(run, model).peak_bytes == (1 + 3) * WIDTH * F32


# -- shared storages ----------------------------------------------------------------------------


def test_tensors_that_show_the_same_storage_count_once() -> None:
    x = torch.ones(6, 7)

    def run() -> None:
        torch.cat([x, x[:, :3], x.t().t()], dim=1)

    assert memory_of(run).peak_bytes == 6 * 7 * F32 + 6 * (7 + 3 + 7) * F32


def test_view_that_the_operators_schema_does_not_declare_takes_no_memory() -> None:
    def run() -> None:
        torch.ops.aten._unsafe_view(torch.ones(6, 7), [42])

    assert memory_of(run).peak_bytes == 6 * 7 * F32


def test_data_that_is_replaced_is_released() -> None:
    def run() -> None:
        x = torch.ones(13)
        x.data = torch.ones(7)
        torch.ones(17)
        x.add_(1)

    assert memory_of(run).peak_bytes == (7 + 17) * F32


@pytest.mark.parametrize(
    "share",
    [
        torch.from_dlpack,
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.empty(0).set_(x.untyped_storage()[:]),
        lambda x: torch.frombuffer(x.numpy(), dtype=torch.float32, offset=F32),
    ],
    ids=["DLPack", "NumPy", "slice of the storage", "buffer"],
)
def test_storage_that_shows_memory_of_another_takes_none(
    share: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    before = torch.ones(13)

    def run() -> None:
        made = torch.sigmoid(before)
        seen, other = share(before), share(made)
        del made
        torch.cat([seen, before, other])

    joined = 13 + 2 * share(before).numel()
    assert memory_of(run).peak_bytes == (13 + 13 + joined) * F32


# -- sparse, nested and wrapped tensors ---------------------------------------------------------


def test_sparse_gradient_counts_with_its_rows() -> None:
    rows, width, looked_up = 1009, 5, 7
    model = nn.Embedding(rows, width, sparse=True)
    at = torch.arange(looked_up)

    def run() -> None:
        model(at).sum().backward()

    memory = memory_of(run, model)
    held = looked_up * I64 + looked_up * width * F32
    assert memory.by_role("backward")["parameters"] == rows * width * F32
    assert memory.by_role("backward")["gradients"] == held


def test_jagged_tensor_counts_with_values_and_offsets() -> None:
    lengths, width = (2, 4), 3
    parts = [torch.ones(length, width) for length in lengths]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    values = sum(lengths) * width * F32
    offsets = (len(lengths) + 1) * I64

    def run() -> None:
        nested * 2

    memory = memory_of(run)
    assert memory.by_role()["inputs"] == values + offsets
    assert memory.peak_bytes == values + offsets + values  # the offsets are shared


def test_wrapper_subclass_counts_with_all_its_parts() -> None:
    x = TwoTensor(torch.ones(13), torch.ones(13))

    def run() -> None:
        x.exp()

    memory = memory_of(run)
    assert memory.by_role()["inputs"] == 2 * 13 * F32
    assert memory.peak_bytes == 2 * 2 * 13 * F32


def test_subclass_with_memory_of_its_own_counts_as_a_tensor() -> None:
    class Named(torch.Tensor):
        pass

    x = torch.ones(13).as_subclass(Named)

    def run() -> None:
        x.exp()

    assert memory_of(run).peak_bytes == 2 * 13 * F32
