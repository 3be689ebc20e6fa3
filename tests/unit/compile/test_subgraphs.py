"""Operators behind wrappers of the compiler and in the functions of higher-order operators.

Truth is the eager counter on the same program, and a product of sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_functional,
)
from torch._higher_order_ops.while_loop import while_loop
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dispatch_flops import OpCost
from dispatch_flops.compile import counting_backend
from dispatch_flops.compile.attribution import NodeAttribution
from dispatch_flops.compile.graph import GraphCost
from dispatch_flops.compile.opaque_regions import OpaqueRegions
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.errors import UncountedWarning
from dispatch_flops.operators.conventions import Conventions
from dispatch_flops.operators.registry import rules_from
from tests.helpers.custom_products import add_product, ordered_product, product, with_formulas
from tests.helpers.profiling import TRIAL_STEPS, profile_of

A, B, C, D = 3, 5, 7, 11


def accumulate(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(x.shape[0], y.shape[1])
    add_product(x, y, out)
    return out * 2


def ordered(x: Tensor, y: Tensor) -> Tensor:
    return ordered_product(x, y) * 2


def choose(x: Tensor, y: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0, lambda x, y: x @ y, lambda x, y: (x @ y).relu() @ y.t() @ y, (x, y)
    )


def repeat(x: Tensor, y: Tensor) -> Tensor:
    def step(carried: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return carried @ y @ y.t() + at, carried.sum()

    return scan(step, x, torch.ones(D, A, B))[0]


def loop(x: Tensor, y: Tensor) -> Tensor:
    return while_loop(
        lambda i, x: i < 3, lambda i, x: (i + 1, x @ y @ y.t()), (torch.tensor(0), x)
    )[1]


@pytest.fixture(autouse=True)
def formulas() -> Iterator[None]:
    with with_formulas():
        yield


def inputs(batch: int = A) -> tuple[Tensor, Tensor]:
    return torch.ones(batch, B), torch.ones(B, C)


def counted(function: Callable[..., Any], *batches: int, **options: Any) -> Any:
    """Return the backend after the compiled function ran on each batch."""
    backend = counting_backend("aot_eager")
    compiled = torch.compile(function, backend=backend, fullgraph=True, **options)
    for batch in batches:
        compiled(*inputs(batch))
    return backend


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [accumulate, ordered], ids=lambda f: f.__name__)
def test_counting_backend_asks_the_formula_of_a_wrapped_operator(
    function: Callable[..., Any], dynamic: bool
) -> None:
    eager = profile_of(function, *inputs())
    backend = counted(function, A, dynamic=dynamic)
    assert backend.total().macs == eager.total().macs == A * B * C
    assert backend.total().flops == eager.total().flops == 2 * A * B * C + A * C
    assert not backend.step().is_lower_bound
    assert not backend.profile().uncounted_ops()


def test_wrapped_operator_that_writes_is_counted_without_the_copies_of_functionalization() -> None:
    profile = counted(accumulate, A).profile()
    assert set(profile.by_operator()) == {
        "aten.zeros.default",
        "custom_products.add_product.default",
        "aten.mul.Tensor",
    }


def test_wrapped_operator_without_a_formula_is_listed() -> None:
    backend = counting_backend("aot_eager")

    @torch.library.custom_op("test_subgraphs::unknown", mutates_args={"out"})
    def unknown(x: Tensor, out: Tensor) -> None:
        out.add_(x)

    @unknown.register_fake
    def _(x: Tensor, out: Tensor) -> None:
        return None

    def function(x: Tensor) -> Tensor:
        out = torch.zeros(A, B)
        unknown(x, out)
        return out

    torch.compile(function, backend=backend)(torch.ones(A, B))
    assert backend.profile().uncounted_ops() == {"test_subgraphs.unknown.default": 1}


def test_cond_counts_as_its_costlier_branch_and_the_profile_says_so() -> None:
    backend = counted(choose, A)
    assert backend.total().macs == 3 * A * B * C
    assert any("costlier branch" in note for note in backend.profile().notes)
    assert not backend.step().is_lower_bound


def test_cond_whose_cheaper_branch_is_unknown_is_a_lower_bound() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, product, lambda x, y: x @ y, (x, y))

    backend = counting_backend("aot_eager")
    torch.compile(function, backend=backend)(*inputs())
    with pytest.warns(UncountedWarning, match="custom_products.product"):
        step = backend.step()
    assert step.total.macs == A * B * C
    assert step.uncounted == {"higher_order.cond": 1}


@pytest.mark.parametrize("dynamic", [False, True])
def test_scan_counts_its_body_times_its_length(dynamic: bool) -> None:
    eager = profile_of(repeat, *inputs())
    backend = counted(repeat, A, dynamic=dynamic)
    assert backend.total().macs == D * 2 * A * B * C
    assert eager.total().macs == (D + TRIAL_STEPS) * 2 * A * B * C


def test_while_loop_is_a_lower_bound_of_one_iteration() -> None:
    backend = counted(loop, A)
    with pytest.warns(match="number of iterations"):
        step = backend.step()
    assert step.total.macs == 2 * A * B * C
    assert step.uncounted == {"higher_order.while_loop": 1}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(B, C, bias=False)
        self.down = nn.Linear(C, D, bias=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(self.part, x, weight, use_reentrant=False)

    def part(self, x: Tensor, weight: Tensor) -> Tensor:
        hidden = nn.functional.dropout(self.up(x), 0.5) @ weight
        return self.down(nn.functional.dropout(hidden, 0.5)).sin()


def test_seeded_operators_under_a_checkpoint_are_counted_with_what_depends_on_them() -> None:
    model = Checkpointed()

    def train(compiled: Any) -> None:
        x = torch.ones(A, B, requires_grad=True)
        compiled(x, torch.eye(C)).sum().backward()

    backend = counting_backend("aot_eager", model)
    train(torch.compile(model, backend=backend))
    costs = backend.step().costs
    assert costs["forward"].macs == A * (B * C + C * C + C * D)
    assert costs["backward"].macs == A * (2 * B * C + C * C + 2 * C * D)  # ``weight`` has none
    assert costs["recompute"].macs == A * (B * C + C * C + C * D)
    assert not backend.profile().uncounted_ops()


class CheckpointedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(B, 2 * C, bias=False)
        self.down = nn.Linear(2 * C, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, x, use_reentrant=False)

    def part(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (2, C)).transpose(0, 1).unsqueeze(0)
        mixed = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.down(mixed[0].transpose(0, 1).flatten(1)).sin()


def test_fused_attention_under_a_checkpoint_is_recomputed_as_in_an_eager_program() -> None:
    """Torch takes its kernel for one that draws random numbers, also without dropout."""

    def train(model: Any) -> None:
        model(torch.ones(A, B)).sum().backward()

    model = CheckpointedAttention()
    eager = profile_of(train, model, model=model)
    backend = counting_backend("aot_eager", model)
    train(torch.compile(model, backend=backend))
    costs = backend.step().costs
    scores = 2 * A * A * C  # of each of two products of attention, with two heads
    assert costs["forward"].macs == A * 2 * C * (B + D) + 2 * scores
    assert costs["backward"].macs == A * 2 * C * (B + 2 * D) + 4 * scores
    assert costs["backward"].macs == eager.total("backward").macs
    # The backward kernel computes the scores once more. Eager code stops before the last product.
    assert costs["recompute"].macs == A * 2 * C * (B + D) + 2 * scores + scores


class Kernel:
    """Object with the attributes of a Triton kernel."""

    __name__ = "add_kernel"

    def fn(self) -> None: ...

    def run(self) -> None: ...


def test_triton_kernel_in_a_graph_is_asked_for_its_formula() -> None:
    kernel = Kernel()
    call = {
        "kernel_idx": kernel_side_table.add_kernel(kernel),  # type: ignore[arg-type]
        "constant_args_idx": kernel_side_table.add_constant_args({"BLOCK": 4}),
        "grid": [(4, 1, 1)],
        "tma_descriptor_metadata": {},
        "tensors_to_clone": ["out_ptr"],
    }

    def launch(x: Tensor, out: Tensor) -> Any:
        tensors = {"x_ptr": x, "out_ptr": out, "n": A * B}
        return triton_kernel_wrapper_functional(kwargs=tensors, **call)["out_ptr"]

    with FakeTensorMode() as fakes:
        x = torch.ones(A, B)
        graph = make_fx(launch)(x, x.clone())
        assert fakes is not None
    asked = []

    def formula(*, x_ptr: Any, n: int, BLOCK: int, grid: Any, **_: Any) -> OpCost:
        asked.append((x_ptr.shape, n, BLOCK, grid))
        return OpCost(flops=n)

    attribution = NodeAttribution(ModuleNames(()), graph, set())
    rules = rules_from({kernel: formula})
    cost = GraphCost(
        graph,
        attribution,
        regions=OpaqueRegions(attribution, graph, {}, (), is_rewritten=False),
        is_backward=False,
        conventions=Conventions(),
        own_rules=rules,
    ).cost((None, False, ()))
    assert cost.by_phase["forward"].flops == A * B
    assert asked == [((A, B), A * B, 4, [(4, 1, 1)])]
    assert not cost.uncounted
