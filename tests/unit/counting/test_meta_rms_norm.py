"""RMS norm on the meta device for CUDA: one operator, with the backward that autograd has there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatch_flops import FlopCounterMode, Profile

M, D = 3, 7  # rows and width
N = M * D
FUSED = "aten._fused_rms_norm.default"
# Of x̂, of the input's gradient with weights, and of the weights' gradient.
BACKWARD = N + (6 * N - M + N) + (2 * N - D)


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (D,))


def layer(device: str = "meta", dtype: torch.dtype = torch.float32) -> nn.RMSNorm:
    return nn.RMSNorm(D, device=device, dtype=dtype)


def profile_of(run: Callable[[Tensor], Tensor], device: str = "meta", **options: Any) -> Profile:
    model = run if isinstance(run, nn.Module) else None
    x = torch.ones(M, D, device=device, dtype=options.pop("dtype", torch.float32))
    with FlopCounterMode(model, **{"display": False, "target": "cuda", **options}) as counter:
        run(x)
    return counter.profile


def operators(profile: Profile) -> set[str]:
    return {op.op for node in profile.nodes() for op in node.ops if op.kind != "free"}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("run", [norm, layer()], ids=["without weights", "with weights"])
def test_norm_is_one_operator(run: Any, mode: Callable[[], Any]) -> None:
    with mode():
        profile = profile_of(run)
    assert operators(profile) == {FUSED}
    assert profile.total().flops == 3 * N + 2 * M + N * isinstance(run, nn.Module)


def test_backward_is_one_operator() -> None:
    def run(x: Tensor) -> Tensor:
        out: Tensor = model(x.requires_grad_())
        out.backward(torch.ones_like(out))
        return out

    model = layer()
    assert profile_of(run).total("backward").flops == BACKWARD


@pytest.mark.parametrize(
    ("dtype", "of_sum"), [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)]
)
def test_norm_keeps_its_result_and_what_backward_needs_of_each_row(
    dtype: torch.dtype, of_sum: int
) -> None:
    kept: list[Tensor] = []
    model = layer(dtype=dtype)
    model.register_forward_hook(lambda _, inputs, output: kept.append(output))
    profile = profile_of(model, dtype=dtype, memory=True)
    held, memory = profile.root.memory, profile.memory
    assert held is not None and memory is not None
    assert held.own.activations == N * dtype.itemsize + M * of_sum
    assert memory.peak_bytes == (2 * N + D) * dtype.itemsize + M * of_sum
    assert not memory.is_approximate


@pytest.mark.parametrize(("device", "target"), [("meta", "cpu"), ("cpu", "cuda"), ("cpu", "cpu")])
def test_norm_is_taken_apart_elsewhere(device: str, target: str) -> None:
    assert FUSED not in operators(profile_of(layer(device), device, target=target))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_norm_of_fake_tensors_is_one_operator(mode: Callable[[], Any]) -> None:
    with FakeTensorMode(), mode():
        profile = profile_of(layer("cpu"), "cpu")
    assert operators(profile) == {FUSED}


def test_backward_of_fake_tensors_is_one_operator_beside_a_formula_of_the_users() -> None:
    stated = 10_007

    def run(x: Tensor) -> Tensor:
        out: Tensor = model(x.requires_grad_())
        out.backward(torch.ones_like(out))
        return out

    with FakeTensorMode():
        model = layer("cpu")
        mapping = {torch.ops.aten._fused_rms_norm: lambda *_, **__: stated}
        profile = profile_of(run, "cpu", custom_mapping=mapping)
    assert profile.total("forward").flops == stated
    assert profile.total("backward").flops == BACKWARD


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_norm_of_two_dtypes_is_taken_apart_as_on_cuda() -> None:
    assert FUSED not in operators(profile_of(layer(dtype=torch.float32), dtype=torch.bfloat16))


def test_nothing_is_left_behind() -> None:
    profile_of(norm)
    out = norm(torch.ones(M, D, device="meta", requires_grad=True))
    assert "Fused" not in type(out.grad_fn).__name__
