"""RMS norm on the meta device for CUDA: one operator, with the backward that autograd has there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dispatch_flops import FlopCounterMode, Profile, _torch
from dispatch_flops.counting import meta_rms_norm
from dispatch_flops.counting.plans import SHARED_PLANS

M, D = 3, 7  # rows and width
N = M * D
FUSED = "aten._fused_rms_norm.default"
PARTS = {
    f"aten.{name}"
    for name in ("pow.Tensor_Scalar", "mean.dim", "add_.Scalar", "rsqrt.default", "mul.Tensor")
}
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


def step_of(device: str = "meta") -> Callable[[Tensor], Tensor]:
    """Return a forward and backward pass of a layer that it makes here."""
    model = layer(device)

    def run(x: Tensor) -> Tensor:
        out: Tensor = model(x.requires_grad_())
        out.backward(torch.ones_like(out))
        return out

    return run


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
    assert profile_of(step_of()).total("backward").flops == BACKWARD


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


@pytest.fixture
def built_for_cuda() -> Iterator[None]:
    """Give torch a kernel for CUDA, if it was built without: it is never run."""
    SHARED_PLANS.rules_changed()
    with torch.library._scoped_library("aten", "IMPL") as library:
        if not _torch.has_kernel("aten::_fused_rms_norm", "CUDA"):
            library.impl("_fused_rms_norm", lambda *_: None, "CUDA")
        yield
    SHARED_PLANS.rules_changed()


@pytest.mark.usefixtures("built_for_cuda")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_norm_is_taken_apart_by_the_device_where_torch_was_built_for_cuda(mode: Any) -> None:
    model, found = layer(), {}
    with mode():
        for device, target in itertools.product(("cpu", "meta"), ("cpu", "cuda")):
            model.to_empty(device=device)
            profile = profile_of(model, device, target=target, memory=True)
            assert profile.memory is not None
            found[device, target] = operators(profile), profile.memory.peak_bytes
    assert found["cpu", "cpu"] == found["cpu", "cuda"] == found["meta", "cpu"]
    assert found["meta", "cpu"][0] == PARTS
    assert found["meta", "cuda"] == ({FUSED}, (2 * N + D + M) * 4)


@pytest.mark.usefixtures("built_for_cuda")
def test_norm_of_fake_tensors_on_cuda_is_one_operator_in_inference_mode() -> None:
    with FakeTensorMode(), torch.inference_mode():
        assert operators(profile_of(layer("cuda"), "cuda", target="cpu")) == {FUSED}


@pytest.mark.usefixtures("built_for_cuda")
def test_formula_of_the_users_is_asked_of_the_whole_norm() -> None:
    stated = 10_007
    rule = {torch.ops.aten._fused_rms_norm: lambda *_, out, **__: stated}
    with torch.inference_mode():
        profile = profile_of(layer("cpu"), "cpu", target="cpu", custom_mapping=rule)
    assert profile.total().flops == stated


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize(("device", "target"), [("meta", "cpu"), ("cpu", "cuda"), ("cpu", "cpu")])
def test_norm_is_taken_apart_elsewhere(
    device: str, target: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    with mode():
        profile = profile_of(layer(device), device, target=target)
    assert operators(profile) == PARTS


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_norm_of_fake_tensors_is_one_operator(mode: Callable[[], Any]) -> None:
    with FakeTensorMode(), mode():
        profile = profile_of(layer("cpu"), "cpu")
    assert operators(profile) == {FUSED}


@pytest.mark.parametrize(("device", "mode"), [("cpu", FakeTensorMode), ("meta", nullcontext)])
def test_backward_is_one_operator_beside_a_formula_of_the_users(device: str, mode: Any) -> None:
    stated = 10_007

    with mode():
        mapping = {torch.ops.aten._fused_rms_norm: lambda *_, **__: stated}
        profile = profile_of(step_of(device), device, custom_mapping=mapping)
    assert profile.total("forward").flops == stated
    assert profile.total("backward").flops == BACKWARD


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_norm_of_two_dtypes_is_taken_apart_as_on_cuda() -> None:
    found = operators(profile_of(layer(dtype=torch.float32), dtype=torch.bfloat16))
    assert found >= PARTS and FUSED not in found


@pytest.mark.parametrize(("device", "mode"), [("cpu", FakeTensorMode), ("meta", nullcontext)])
def test_counters_within_another_agree(device: str, mode: Any) -> None:
    inner: list[Profile] = []

    def run(x: Tensor) -> Tensor:
        inner.append(profile_of(step, device))
        return x

    with mode():
        step = step_of(device)
        outer = profile_of(run, device)
    assert operators(outer) == operators(inner[0])
    for profile in (outer, *inner):
        assert profile.total("forward").flops == 4 * N + 2 * M
        assert profile.total("backward").flops == BACKWARD


def test_innermost_counter_says_what_autograd_runs() -> None:
    found: list[Profile] = []

    def run(x: Tensor) -> Tensor:
        found.append(profile_of(step_of(), target="cpu"))
        return x

    outer = profile_of(run)
    alone = profile_of(step_of(), target="cpu")
    assert operators(found[0]) == operators(outer) == operators(alone)


def test_other_threads_run_what_they_run_alone() -> None:
    def node() -> str:
        return type(norm(torch.ones(M, D, device="meta", requires_grad=True)).grad_fn).__name__

    def elsewhere() -> tuple[str, set[str]]:
        return node(), operators(profile_of(step_of(), target="cpu"))

    found = []

    def run(x: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(elsewhere).result())
        return x

    profile_of(run)
    assert found == [elsewhere()]


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_trace_has_the_operators_that_it_has_without_a_counter(device: str, mode: Any) -> None:
    x = torch.ones(M, D, device=device)

    def trace() -> list[str]:
        graph = make_fx(norm, tracing_mode=mode)(x).graph
        return [str(node.target) for node in graph.nodes]

    with FlopCounterMode(display=False, target="cuda"):
        found = trace()
    assert found == trace()


def test_graph_that_is_traced_of_a_step_computes_what_the_step_does() -> None:
    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(norm(x).square().sum(), x)[0]

    x = torch.arange(float(N)).view(M, D)
    with FlopCounterMode(display=False, target="cuda"):
        graph = make_fx(gradient, tracing_mode="fake")(x)
    torch.testing.assert_close(graph(x), gradient(x))


def test_kernel_of_autograd_is_never_a_counters_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outer counter finds the program's kernel in that place, and the inner one the other's."""
    monkeypatch.setattr(meta_rms_norm, "_of_autograd", [])
    with ExitStack() as stack:
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("_fused_rms_norm", lambda *_: None, "AutogradMeta")
            stack.enter_context(FlopCounterMode(display=False, target="cuda"))
        profile = profile_of(step_of())
    assert operators(profile) > PARTS


def test_kernels_of_rms_norm_are_gone_after_the_block() -> None:
    def kernels() -> list[str]:
        keys = ("Meta", "AutogradMeta", "AutogradCPU")
        return [key for key in keys if _torch.has_kernel("aten::_fused_rms_norm", key)]

    with FlopCounterMode(display=False, target="cuda"):
        assert len(kernels()) == 3
    assert not kernels()
