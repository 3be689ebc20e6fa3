"""Composite operators with a formula in compiled code, as eager counts and closed forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dispatch_flops import OpCost, Profile, register_flops, unregister_flops
from dispatch_flops.compile import CountingBackend, counting_backend
from dispatch_flops.errors import UncountedWarning
from tests.helpers.composites import C, D, N, aten, stated
from tests.helpers.opaque_blocks import LINEAR, A, Block, H, I
from tests.helpers.profiling import profile_of

pytestmark = [
    pytest.mark.slow,
    # a warning of torch.compile at graph breaks
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Calls(nn.Module):
    """Model with one weight whose forward is a function of an input and the weight."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.call = call
        self.weight = nn.Parameter(torch.ones(*shape) + torch.arange(shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.weight)


class Region(nn.Module):
    """Layer whose calls share one subgraph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(I, I)

    @torch.compiler.nested_compile_region
    def region(self, x: Tensor) -> Tensor:
        return self.layer(x).exp()

    def forward(self, x: Tensor) -> Tensor:
        return self.region(self.region(self.region(x)))


class Custom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, torch.matmul(gradient.t(), ctx.saved_tensors[0])


def autocast_linear(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        return F.linear(x, weight).float()


def in_checkpoint(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = checkpoint(lambda x: F.linear(x, weight).exp(), x, use_reentrant=False)
    return found


def attention_in_checkpoint(x: Tensor, weight: Tensor) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x * weight).exp()

    found: Tensor = checkpoint(attend, x, use_reentrant=False)
    return found


class Program(NamedTuple):
    """Program with its MACs in forward, recomputation and backward."""

    op: Any
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    macs: tuple[int, int, int]


PROGRAMS = {
    "linear": Program(
        aten.linear, lambda: nn.Sequential(nn.Linear(C, D), nn.ReLU(), nn.Linear(D, C)), (N, C),
        (17 * N * D + 17 * N * C, 0, 3 * N * C * D),
    ),
    "matmul": Program(
        aten.matmul, lambda: Calls(lambda x, w: (x @ w).relu(), C, D), (2, N, C),
        (17 * 2 * N * D, 0, 2 * N * C * D),
    ),
    "conv2d": Program(
        aten.conv2d, lambda: nn.Conv2d(3, 5, 2, bias=False), (2, 3, N, C),
        (17 * 2 * 5 * (N - 1) * (C - 1), 0, 2 * 3 * 5 * 4 * (N - 1) * (C - 1)),
    ),
    "layer_norm": Program(aten.layer_norm, lambda: nn.LayerNorm(C), (N, C), (17 * N * C, 0, 0)),
    # In backward, the gradient of the values: one product.
    "attention": Program(
        aten.scaled_dot_product_attention,
        lambda: Calls(lambda x, w: F.scaled_dot_product_attention(x, x, x * w, dropout_p=0.5), D),
        (2, 3, N, D), (17 * 2 * 3 * N * D, 0, 2 * 3 * N * N * D),
    ),
    "einsum": Program(
        aten.einsum, lambda: Calls(lambda x, w: torch.einsum("nc,cd->nd", x, w), C, D), (N, C),
        (17 * N * D, 0, N * C * D),
    ),
    # Without a bias, linear calls matmul.
    "a composite that another one calls": Program(
        aten.matmul, lambda: nn.Linear(C, D, bias=False), (N, C), (17 * N * D, 0, N * C * D)
    ),
    "a call in backward": Program(
        aten.matmul, lambda: Calls(lambda x, w: torch.linalg.inv(x + torch.eye(N) * w), N), (N, N),
        (0, 0, 2 * 17 * N * N),
    ),
    "a checkpoint": Program(
        aten.linear, lambda: Calls(in_checkpoint, D, C), (N, C),
        (17 * N * D, 17 * N * D, N * C * D),
    ),
    # Its kernel is taken for a seeded one. That of backward has all four products and the scores.
    "attention in a checkpoint": Program(
        aten.scaled_dot_product_attention, lambda: Calls(attention_in_checkpoint, D), (2, 3, N, D),
        (17 * 2 * 3 * N * D, 17 * 2 * 3 * N * D + 2 * 3 * N * N * D, 4 * 2 * 3 * N * N * D),
    ),
    "a subgraph that runs thrice": Program(
        aten.linear, Region, (N, I), (3 * 17 * N * I, 0, 5 * N * I * I)
    ),
    "a function with a backward of its own": Program(
        aten.linear, lambda: Calls(lambda x, w: Custom.apply(x, w), D, C), (N, C),
        (17 * N * D, 0, N * C * D),
    ),
    "a call in such a backward": Program(
        aten.matmul, lambda: Calls(lambda x, w: Custom.apply(x, w), D, C), (N, C),
        (17 * N * D, 0, 17 * D * C),
    ),
    "autocast": Program(
        aten.linear, lambda: Calls(autocast_linear, D, C), (N, C), (17 * N * D, 0, N * C * D)
    ),
    "a call that does nothing": Program(
        aten.dropout, lambda: Calls(lambda x, w: F.dropout(x * w, training=False), C), (N, C),
        (17 * N * C, 0, 0),
    ),
    "function transforms": Program(
        aten.matmul, lambda: Calls(lambda x, w: torch.vmap(lambda x: torch.matmul(x, w))(x), C, D),
        (N, C), (17 * N * D, 0, N * C * D),
    ),
}  # fmt: skip

WAYS: dict[str, Callable[[nn.Module, CountingBackend], Any]] = {
    "whole": lambda model, backend: torch.compile(model, backend=backend),
    "dynamic": lambda model, backend: torch.compile(model, backend=backend, dynamic=True),
}


def compare(name: str, backend: str, way: str = "whole") -> None:
    """Check a program's counts against closed forms and, module by module, an eager run."""
    op, make, shape, macs = PROGRAMS[name]
    model, x = make(), torch.rand(shape)
    mapping = {op: stated}
    counting = counting_backend(backend, model, custom_mapping=mapping, strict=True)

    def run(called: Any) -> None:
        called(x).sum().backward()
        model.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedWarning)
        run(WAYS[way](model, counting))
        assert counting.step().total.macs == sum(macs)
    compiled = counting.profile()
    eager = profile_of(run, model, model=model, custom_mapping=mapping)
    for profile in (compiled, eager):
        found = tuple(profile.total(phase).macs for phase in ("forward", "recompute", "backward"))
        assert found == macs
    for phase in ("forward", "recompute", "backward"):
        assert macs_by_module(compiled, phase) == macs_by_module(eager, phase)
        assert calls_of(compiled, op, phase) == calls_of(eager, op, phase)
    assert not any("formula" in note for note in compiled.notes)


def macs_by_module(profile: Profile, phase: Any) -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module(phase).items() if cost.macs}


def calls_of(profile: Profile, packet: Any, phase: Any) -> dict[str, tuple[int, int, int]]:
    """Return calls, MACs and FLOPs of a packet's overloads."""
    return {
        name: (total.calls, total.cost.macs, total.cost.flops)
        for name, total in profile.by_operator(phase).items()
        if name.startswith(f"aten.{packet.__name__}.")
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_composite_with_a_formula_counts_as_in_an_eager_program(name: str) -> None:
    compare(name, "aot_eager")


@pytest.mark.parametrize("name", ["linear", "attention", "a call in backward", "a checkpoint"])
def test_composite_with_a_formula_counts_as_in_an_eager_program_with_symbolic_sizes(
    name: str,
) -> None:
    compare(name, "aot_eager", "dynamic")


@pytest.mark.parametrize("name", PROGRAMS)
def test_composite_with_a_formula_counts_as_in_an_eager_program_under_inductor(name: str) -> None:
    compare(name, "inductor")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_composite_without_gradients_counts_once(mode: Callable[[], Any]) -> None:
    model = nn.Linear(C, D)
    backend = counting_backend("aot_eager", model, custom_mapping={aten.linear: stated})
    with mode():
        torch.compile(model, backend=backend)(torch.ones(N, C))
    assert backend.total().macs == 17 * N * D


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


BLOCK = 17 * A * (H + I)  # MACs of a block's two calls of linear


def test_composite_in_blocks_that_are_compiled_one_by_one_belongs_to_its_block() -> None:
    model = Blocks()
    backend = counting_backend("aot_eager", model, custom_mapping={aten.linear: stated})
    for block in model.blocks:
        block.compile(backend=backend)
    model(torch.ones(A, I)).sum().backward()
    profile = backend.profile()
    for index, gradients in enumerate((3, 4, 4)):  # the input has none
        node = profile.node(f"blocks.{index}")
        assert node.total("forward").macs == BLOCK
        assert profile.node(f"blocks.{index}.up").total("forward").macs == 17 * A * H
        assert node.total("backward").macs == gradients * LINEAR
    assert len(backend.graphs) < 2 * len(model.blocks)  # they share graphs


def test_composite_in_a_graph_that_ddp_splits_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Blocks(), bucket_cap_mb=100 / 2**20)
        mapping = {aten.linear: stated}
        backend = counting_backend("aot_eager", model, custom_mapping=mapping, strict=True)
        torch.compile(model, backend=backend)(torch.ones(A, I)).sum().backward()
        costs = backend.step().costs
    finally:
        dist.destroy_process_group()
    assert sum(not graph.is_backward for graph in backend.graphs) > 1
    assert (costs["forward"].macs, costs["backward"].macs) == (3 * BLOCK, 11 * LINEAR)


def test_composite_in_a_module_with_a_formula_is_not_counted_besides() -> None:
    model = Blocks()
    mapping = {aten.linear: stated, Block: lambda module, x, *, out: OpCost(macs=5, flops=10)}
    backend = counting_backend("aot_eager", model, custom_mapping=mapping)
    torch.compile(model, backend=backend)(torch.ones(A, I)).sum().backward()
    costs = backend.step().costs
    assert (costs["forward"].macs, costs["backward"].macs) == (3 * 5, 11 * LINEAR)


def test_composite_in_another_one_with_a_formula_is_not_counted_besides() -> None:
    mapping = {aten.linear: stated, aten.matmul: lambda *_, out: OpCost(macs=5, flops=10)}
    backend = counting_backend("aot_eager", custom_mapping=mapping)
    torch.compile(nn.Linear(C, D, bias=False), backend=backend)(torch.ones(N, C))
    assert backend.total().macs == 17 * N * D


def test_composite_formula_is_asked_for_each_size_of_a_dynamic_graph() -> None:
    backend = counting_backend("aot_eager", custom_mapping={aten.linear: stated})
    compiled = torch.compile(nn.Linear(C, D), backend=backend, dynamic=True)
    for size in (2, 5, 3):
        compiled(torch.ones(size, C))
        assert backend.step().costs["forward"].macs == 17 * size * D


def test_composite_of_a_library_counts_by_its_formula(library: torch.library.Library) -> None:
    library.define("twice(Tensor x, Tensor w) -> Tensor")
    library.impl("twice", lambda x, w: x @ w @ w.t(), "CompositeImplicitAutograd")
    library.define("own(Tensor x, Tensor w) -> Tensor")
    library.impl("own", lambda x, w: Product.apply(x, w), "Autograd")
    ops = torch.ops.test_composite_regions
    for op, macs, backward in ((ops.twice, 17 * N * C, 4), (ops.own, 17 * N * D, 1)):
        torch._dynamo.reset()
        backend = counting_backend("aot_eager", custom_mapping={op: stated}, strict=True)
        weight = torch.ones(C, D, requires_grad=True)
        torch.compile(lambda x, w, op=op: op(x, w), backend=backend)(
            torch.ones(N, C), weight
        ).sum().backward()
        costs = backend.step().costs
        assert costs["forward"].macs == macs
        assert costs["backward"].macs == (3 if backward == 4 else 1) * N * C * D


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, ctx.saved_tensors[0].t() @ gradient


class BothProducts(torch.autograd.Function):
    """Product whose backward calls ``aten.matmul`` for the gradient of each argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


def in_compiled_autograd(
    function: Callable[[Tensor], Tensor], backend: CountingBackend, dynamic: bool | None = None
) -> None:
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, dynamic=dynamic)):
        compiled(torch.ones(N, C, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_call_of_autograd_in_compiled_autograd_counts_by_its_formula(compiler: str) -> None:
    weight = torch.ones(C, D, requires_grad=True)
    backend = counting_backend(compiler, custom_mapping={aten.matmul: stated}, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedWarning)
        in_compiled_autograd(lambda x: BothProducts.apply(x, weight), backend)
        costs = backend.step().costs
    assert costs["forward"].macs == 17 * N * D
    assert costs["backward"].macs == 17 * (N * C + C * D)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_composite_that_a_checkpoint_recomputes_in_compiled_autograd_counts_again(
    compiler: str,
) -> None:
    layer = nn.Linear(C, D)
    block = lambda x: torch.sin(layer(torch.cos(x)))  # noqa: E731
    backend = counting_backend(compiler, custom_mapping={aten.linear: stated}, strict=True)
    in_compiled_autograd(lambda x: checkpoint(block, x, use_reentrant=False), backend)
    costs = backend.step().costs
    assert costs["forward"].macs == costs["recompute"].macs == 17 * N * D
    assert costs["backward"].macs == 2 * N * C * D


def test_call_of_autograd_in_compiled_autograd_of_varying_sizes_is_not_asked() -> None:
    weight = torch.ones(C, D, requires_grad=True)
    backend = counting_backend("aot_eager", custom_mapping={aten.matmul: stated})
    in_compiled_autograd(lambda x: BothProducts.apply(x, weight), backend, dynamic=True)
    profile = not_asked(backend, "aten.matmul", "compiled autograd traces a backward pass")
    assert profile.total("backward").macs == 2 * N * C * D


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("test_composite_regions", "DEF") as found:
        yield found


# -- where a formula is not asked ---------------------------------------------------------------


def not_asked(backend: CountingBackend, op: str, reason: str) -> Profile:
    """Check that a warning, issued once, and a note say why a formula is not asked."""
    with pytest.warns(UncountedWarning, match=f"{op} are counted; .* asked: {reason}") as warned:
        backend.step()
    backend.total()
    assert len(warned) == 1
    profile = backend.profile()
    assert any(note.startswith(f"{op}: ") and reason in note for note in profile.notes)
    return profile


def test_formula_of_a_composite_in_cond_is_not_asked() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        found: Tensor = torch.cond(x.sum() > 0, lambda x: F.linear(x, w), lambda x: x @ w.t(), (x,))
        return F.linear(found, w)

    backend = counting_backend("aot_eager", custom_mapping={aten.linear: stated})
    with torch.no_grad():
        torch.compile(function, backend=backend)(torch.ones(N, C), torch.ones(C, C))
    profile = not_asked(backend, "aten.linear", "the call is in cond")
    assert profile.total().macs == N * C * C + 17 * N * C


def test_formula_of_composites_that_inductor_merges_is_not_asked() -> None:
    def attention(q: Tensor) -> Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) / 2, dim=-1) @ q

    backend = counting_backend("inductor", custom_mapping={aten.matmul: stated})
    torch.compile(attention, backend=backend)(torch.ones(2, 3, N, 4))
    profile = not_asked(backend, "aten.matmul", "the compiler merged its operators")
    assert profile.total().macs == 2 * 2 * 3 * N * N * 4  # of the fused kernel


def test_formula_of_a_composite_that_is_registered_after_compiling_is_not_asked() -> None:
    backend = counting_backend("aot_eager")
    compiled = torch.compile(nn.Linear(C, D), backend=backend)
    compiled(torch.ones(N, C))
    register_flops(aten.linear, override=True)(stated)
    try:
        profile = not_asked(backend, "aten.linear", "it was registered after")
        assert profile.total().macs == N * C * D
    finally:
        unregister_flops(aten.linear)
    assert not any("formula" in note for note in backend.profile().notes)


def test_formula_of_a_composite_that_is_taken_back_leaves_its_operators() -> None:
    backend = counting_backend("aot_eager")
    register_flops(aten.linear, override=True)(stated)
    try:
        torch.compile(nn.Linear(C, D), backend=backend)(torch.ones(N, C))
        assert backend.total().macs == 17 * N * D
    finally:
        unregister_flops(aten.linear)
    assert backend.total().macs == N * C * D


def test_calls_that_the_compiler_removes_do_not_count() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        F.linear(x, w)
        return F.linear(x, w) + F.linear(x, w)

    backend = counting_backend("aot_eager", custom_mapping={aten.linear: stated})
    weight = torch.ones(D, C, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(function, backend=backend)(torch.ones(N, C), weight)
        assert backend.step().total.macs == 17 * N * D


def test_calls_that_a_compiler_traces_for_itself_are_not_recorded() -> None:
    def partition(*args: Any, **kwargs: Any) -> Any:
        make_fx(lambda x: x @ x)(torch.ones(2, 2))  # as inductor traces its patterns
        return min_cut_rematerialization_partition(*args, **kwargs)

    other = aot_autograd(fw_compiler=lambda graph, _: graph, partition_fn=partition)
    backend = counting_backend(other, custom_mapping={aten.matmul: stated}, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncountedWarning)
        compiled = torch.compile(nn.Linear(C, D, bias=False), backend=backend)
        compiled(torch.ones(N, C)).sum().backward()
        assert backend.step().costs["forward"].macs == 17 * N * D
