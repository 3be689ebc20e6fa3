"""Costs of compiled graphs, compared to eager counts and closed forms."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from dispatch_flops import OpCost, Profile
from dispatch_flops.compile import Step, counting_backend
from dispatch_flops.compile.compilers import count_runs
from dispatch_flops.errors import ConfigError, TargetError
from tests.helpers.profiling import profile_of

# a warning of torch.compile at graph breaks
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

I, H, O = 5, 7, 11  # noqa: E741
BATCHES = (3, 4, 13)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(I, H)
        self.down = nn.Linear(H, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Model with a list of blocks, one of which it calls twice, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Parameter(torch.ones(I, O))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[0](x) @ self.head


class BrokenBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        torch._dynamo.graph_break()
        return self.down(torch.relu(hidden))


class BrokenNet(Net):
    """Model with a graph break inside a block: both forwards consist of two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BrokenBlock()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](torch.relu(x)) @ self.head


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.blocks[0], x, use_reentrant=False) @ self.head


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    counters.clear()


def train(model: Any, batches: tuple[int, ...] = BATCHES) -> None:
    for batch in batches:
        model(torch.ones(batch, I)).sum().backward()


def infer(model: Any, batches: tuple[int, ...] = BATCHES) -> None:
    with torch.no_grad():
        for batch in batches:
            model(torch.ones(batch, I))


def macs(profile: Profile, phase: Any) -> dict[str, int]:
    return {fqn: cost.macs for fqn, cost in profile.by_module(phase).items() if cost.macs}


def calls(profile: Profile) -> dict[str, int]:
    return {node.fqn: node.calls for node in profile.root.walk() if node.calls}


@pytest.mark.parametrize("run", [train, infer])
@pytest.mark.parametrize("net", [Net, BrokenNet])
@pytest.mark.parametrize("dynamic", [False, None, True])
def test_counting_backend_equals_eager_counts(
    run: Any, net: type[Net], dynamic: bool | None
) -> None:
    model = net()
    batches = BATCHES[:2] if dynamic is False else BATCHES  # each of a static program compiles
    eager = profile_of(run, model, batches, model=model)
    backend = counting_backend("aot_eager", model)
    run(torch.compile(model, backend=backend, dynamic=dynamic), batches)
    compiled = backend.profile()
    for phase in ("forward", "backward", "recompute"):
        assert macs(compiled, phase) == macs(eager, phase)
    assert calls(compiled) == calls(eager)
    assert compiled.root.total("forward") == eager.root.total("forward")
    assert not compiled.uncounted_ops()
    assert compiled.root.active_params == eager.root.active_params
    assert backend.total() == compiled.total()


def test_step_with_graph_breaks_has_its_closed_form() -> None:
    backend = counting_backend("aot_eager")
    train(torch.compile(BrokenNet(), backend=backend), (3,))
    # the input of the block has no gradient
    forward = 3 * (I * H + H * I + I * O)
    step = backend.step()
    assert step.costs["forward"].macs == forward
    assert step.costs["backward"].macs == 2 * forward - 3 * I * H


def test_dynamic_shapes_share_one_graph_with_exact_costs() -> None:
    backend = counting_backend("aot_eager")
    compiled = torch.compile(Net(), backend=backend, dynamic=True)
    for batch in (*BATCHES, *BATCHES):
        infer(compiled, (batch,))
        assert backend.step().total.macs == batch * (3 * 2 * I * H + I * O)
    assert len(backend.graphs) == 1
    assert counters["stats"]["unique_graphs"] == 1


def test_recomputation_of_a_checkpoint_is_a_phase_of_its_own() -> None:
    model = Checkpointed()
    eager = profile_of(train, model, (3,), model=model)
    backend = counting_backend("aot_eager", model)
    train(torch.compile(model, backend=backend), (3,))
    step, compiled = backend.step(), backend.profile()
    # backward does not need the last product of the block
    assert step.costs["recompute"].macs in (3 * I * H, 2 * 3 * I * H)
    assert step.model_total.macs == step.total.macs - step.costs["recompute"].macs
    for phase in ("forward", "backward"):
        assert macs(compiled, phase) == macs(eager, phase)


def test_recomputation_in_compiled_autograd_is_a_phase_of_its_own() -> None:
    model = Checkpointed()
    eager = profile_of(train, model, (3,), model=model)
    backend = counting_backend("aot_eager", model)
    compiled = torch.compile(model, backend=backend)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        train(compiled, (3,))
    step = backend.step()
    assert step.costs["recompute"].macs in (3 * I * H, 2 * 3 * I * H)
    for phase in ("forward", "backward"):
        assert step.costs[phase].macs == eager.total(phase).macs
    assert step.model_total.macs == eager.model_total().macs


def test_compiled_function_is_outside_the_model() -> None:
    model = Block()
    backend = counting_backend("aot_eager", model)

    @torch.compile(backend=backend)
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return (model(x) @ x.T).sum()

    loss_of(model, torch.ones(3, I)).backward()
    profile = backend.profile()
    assert macs(profile, "forward") == {"": 3 * 2 * I * H, "up": 3 * I * H, "down": 3 * I * H}
    assert profile.outside.total("forward").macs == 3 * I * 3
    assert profile.root.calls == 1


def test_step_counts_runs_since_the_previous_step() -> None:
    backend = counting_backend("aot_eager")
    compiled = torch.compile(Block(), backend=backend)
    infer(compiled, (3,))
    first = backend.step()
    infer(compiled, (3, 3))
    second = backend.step()
    assert (first.total.macs, second.total.macs) == (3 * 2 * I * H, 6 * 2 * I * H)
    assert backend.step().total.flops == 0
    assert backend.total() == first.total + second.total
    assert second.seconds > 0
    peak = 1e12
    assert second.mfu(peak) == second.model_total.flops / second.seconds / peak
    assert second.flops_per_s == second.total.flops / second.seconds


def test_compiled_optimizer_is_a_phase_of_its_own() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend = counting_backend("aot_eager", model)
    compiled = torch.compile(model, backend=backend)
    update = torch.compile(optimizer.step, backend=backend)
    for _ in range(2):
        compiled(torch.ones(4, 8)).sum().backward()
        update()
        costs = backend.step().costs
    products, params = 4 * 8 * 8, 8 * 8 + 8
    assert (costs["forward"].macs, costs["forward"].flops) == (products, 2 * products + 4 * 8)
    assert costs["backward"].macs == products  # the input needs no gradient
    assert (costs["optimizer"].macs, costs["optimizer"].flops) == (0, 2 * params)
    profile = backend.profile()
    assert profile.outside.total("optimizer").flops == 2 * 2 * params
    assert profile.root.calls == 2


def test_compiled_adam_costs_as_much_per_parameter_as_an_eager_one() -> None:
    """lerp (3); mul, addcmul (4); sqrt, div, add (3); addcdiv (3)."""

    def step_flops(params: int) -> int:
        weight = nn.Parameter(torch.ones(params))
        weight.grad = torch.ones(params)
        optimizer = torch.optim.Adam([weight])
        backend = counting_backend("aot_eager", strict=True)
        torch.compile(optimizer.step, backend=backend)()
        return backend.step().costs["optimizer"].flops

    assert step_flops(64) - step_flops(8) == (64 - 8) * 13


def test_model_compiled_with_its_optimizer_stays_forward() -> None:
    model = nn.Linear(8, 8)
    model(torch.ones(4, 8)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backend = counting_backend("aot_eager", model)

    @torch.compile(backend=backend)
    def evaluate_and_update(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = model(x) * 3
        optimizer.step()
        return out

    evaluate_and_update(torch.ones(4, 8))
    costs = backend.step().costs
    assert costs["forward"].flops == 2 * 4 * 8 * 8 + 4 * 8 + 4 * 8
    assert costs["optimizer"].flops == 2 * (8 * 8 + 8)
    assert backend.profile().by_module("forward")[""].macs == 4 * 8 * 8


def test_operator_whose_size_depends_on_data_is_unknown() -> None:
    backend = counting_backend("aot_eager")

    @torch.compile(backend=backend)
    def pick(x: torch.Tensor) -> torch.Tensor:
        return x[torch.nonzero(x[:, 0]).squeeze(1)] @ x.T

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        pick(torch.ones(3, I))
    uncounted = backend.profile().uncounted_ops()
    assert uncounted["aten.mm.default"] == 1
    assert "data" in backend.profile().formula_errors()["aten.mm.default"]


def test_number_that_depends_on_data_leaves_costs_known() -> None:
    """It is read by the host and checked, both of which are free."""
    backend = counting_backend("aot_eager", strict=True)

    @torch.compile(backend=backend)
    def scale(x: torch.Tensor) -> torch.Tensor:
        number = x[0, 0].item()
        torch._check(number >= 0)
        return (x @ x.T) * number

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        scale(torch.ones(3, I))
    total = backend.total()
    assert (total.macs, total.flops) == (3 * I * 3, 2 * 3 * I * 3 + 3 * 3)


def test_custom_mapping_overrides_a_formula() -> None:
    backend = counting_backend(
        "aot_eager", custom_mapping={torch.ops.aten.relu: lambda x, *, out, **_: 17}
    )
    infer(torch.compile(Block(), backend=backend), (3,))
    assert backend.profile().by_operator()["aten.relu.default"].cost.flops == 17


def test_inductor_with_warm_caches_and_options_is_counted() -> None:
    model = Block()
    with torch._functorch.config.patch(enable_autograd_cache=True):
        train(torch.compile(model), (3,))  # now in AOTAutograd's cache
        torch._dynamo.reset()
        backend = counting_backend("inductor", model, options={"epilogue_fusion": True})
        train(torch.compile(model, backend=backend), (3, 3))
    eager = profile_of(train, model, (3, 3), model=model)
    for phase in ("forward", "backward"):
        assert macs(backend.profile(), phase) == macs(eager, phase)
    assert macs(backend.profile(), "forward")[""] == 2 * 3 * 2 * I * H


@pytest.mark.parametrize("backend", ["inductr", 3, None])
def test_counting_backend_refuses_what_is_not_a_backend(backend: Any) -> None:
    with pytest.raises(TargetError, match="is not a backend"):
        counting_backend(backend)


@pytest.mark.parametrize("dynamic", [False, True])
def test_count_runs_adds_less_than_20_microseconds(dynamic: bool) -> None:
    backend = counting_backend("aot_eager")
    infer(torch.compile(Net(), backend=backend, dynamic=dynamic), (3,))
    run = count_runs(backend.graphs[0], lambda inputs: None)
    inputs = [3] * 20 if dynamic else []
    best = min(_seconds(run, inputs) for _ in range(200))
    assert best < 20e-6


def _seconds(run: Any, inputs: list[Any]) -> float:
    begun = time.perf_counter()
    run(inputs)
    return time.perf_counter() - begun


@pytest.mark.parametrize("peak", [0, -1, float("nan"), float("inf"), "1e12", None])
def test_mfu_refuses_a_peak_that_is_not_a_positive_number(peak: Any) -> None:
    with pytest.raises(ConfigError, match="peak_flops_per_s=.*: pass FLOP/s above 0"):
        Step(seconds=1.0).mfu(peak)


def test_step_without_time_has_no_rates() -> None:
    step = Step(costs={"forward": OpCost(flops=6)}, seconds=0.0)
    assert step.flops_per_s is step.mfu(2.0) is None


@pytest.mark.parametrize("train", [False, True])
def test_graph_has_no_bytes_of_a_batch_norms_gradient_that_was_not_asked_for(train: bool) -> None:
    """In graphs, as on the meta device, the operator returns one for its input in any case."""
    layer = nn.BatchNorm1d(H).train(train)
    backend = counting_backend("aot_eager", strict=True)
    x = torch.ones(3, H, I)
    torch.compile(layer, backend=backend)(x).backward(x)
    backward = backend.profile().by_operator()["aten.native_batch_norm_backward.default"].cost
    assert backward is not None
    assert backward.bytes_written == 4 * (H + H)
