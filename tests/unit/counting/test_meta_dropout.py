"""Dropout on tensors without data: the operator of the device that is the target."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode, OpCost, Profile

ROWS, COLUMNS = 7, 11
FUSED = {"aten.native_dropout.default", "aten.native_dropout_backward.default"}


def dropped(x: Tensor, target: Any, p: float = 0.3, *, training: bool = True) -> Profile:
    with FlopCounterMode(display=False, memory=True, target=target) as counter:
        out = F.dropout(x, p, training)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
    return counter.profile


def names(profile: Profile) -> set[str]:
    return {op.op for op in profile.op_totals() if "drop" in op.op or "bernoulli" in op.op}


def tensor(device: str = "meta", **options: Any) -> Tensor:
    return torch.ones(ROWS, COLUMNS, device=device, **options)


def test_target_cuda_drops_in_one_operator() -> None:
    profile = dropped(tensor(requires_grad=True), "cuda")
    assert names(profile) == FUSED
    assert not profile.uncounted_ops()
    memory = profile.memory
    assert memory is not None and not memory.is_lower_bound and not memory.is_approximate


def test_gradients_of_fake_tensors_take_nothing_for_target_cuda() -> None:
    """As in plans over a mesh; the CPU's kernel would take something."""
    with FakeTensorMode():
        memory = dropped(tensor("cpu", requires_grad=True), "cuda").memory
    assert memory is not None and not memory.is_lower_bound


def test_mask_of_target_cuda_is_of_booleans() -> None:
    memory = dropped(tensor(), "cuda").memory
    assert memory is not None
    assert memory.peak_bytes == ROWS * COLUMNS * (4 + 4 + 1)  # input, result, mask


def test_target_cpu_takes_dropout_apart_as_on_the_cpu() -> None:
    on_meta, on_cpu = (dropped(tensor(d, requires_grad=True), "cpu") for d in ("meta", "cpu"))
    assert names(on_meta) == names(on_cpu) == {"aten.bernoulli_.float"}
    assert on_meta.total() == on_cpu.total()


@pytest.mark.parametrize(
    ("rows", "p", "training"),
    [(ROWS, 0.0, True), (ROWS, 1.0, True), (ROWS, 0.3, False), (0, 0.3, True)],
    ids=["none", "all", "evaluation", "empty"],
)
def test_dropout_that_cuda_does_not_fuse_runs_as_on_the_cpu(
    rows: int, p: float, training: bool
) -> None:
    on_meta, on_cpu = (torch.ones(rows, COLUMNS, device=device) for device in ("meta", "cpu"))
    as_on_cuda = dropped(on_meta, "cuda", p, training=training)
    assert as_on_cuda.by_operator() == dropped(on_cpu, "cpu", p, training=training).by_operator()


def test_complex_values_drop_as_without_a_counter() -> None:
    x = tensor(dtype=torch.complex64, requires_grad=True)
    assert names(dropped(x, "cuda")) == {"aten.bernoulli_.float"}
    assert x.grad is not None


def test_tensors_with_data_keep_their_operators_under_target_cuda() -> None:
    assert names(dropped(tensor("cpu"), "cuda")) == {"aten.bernoulli_.float"}


def test_fake_tensors_and_inference_mode_drop_as_the_target() -> None:
    with FakeTensorMode():
        assert names(dropped(tensor("cpu"), "cuda")) == {"aten.native_dropout.default"}
    with torch.inference_mode():
        assert names(dropped(tensor(), "cuda")) == {"aten.native_dropout.default"}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own, as it exports
def test_exported_programs_are_those_without_a_counter() -> None:
    def exported() -> list[str]:
        torch.ops.aten.dropout.default._dispatch_cache.clear()  # of what other tests have traced
        program = torch.export.export(torch.nn.Dropout(), (tensor("cpu"),)).run_decompositions()
        return [str(node.target) for node in program.graph.nodes]

    with FlopCounterMode(display=False, target="cuda"):
        counted = exported()
    assert counted == exported()


def test_later_programs_are_torchs_own() -> None:
    x = tensor(requires_grad=True)
    dropped(x, "cuda")
    assert names(dropped(x, "cpu")) == {"aten.bernoulli_.float"}
    assert "MulBackward" in type(F.dropout(x, 0.3).grad_fn).__name__


def test_thread_without_a_counter_drops_as_without_one() -> None:
    """The kernels of a counter are those of the process while it is active."""
    x = tensor(requires_grad=True)
    with ThreadPoolExecutor(1) as threads, FlopCounterMode(display=False, target="cuda") as counter:
        out = threads.submit(F.dropout, x, 0.3).result()
    assert out.shape == (ROWS, COLUMNS)
    assert out.grad_fn is not None and "NativeDropout" not in out.grad_fn.name()
    assert counter.profile.total() == OpCost()
