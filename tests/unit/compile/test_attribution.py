"""Modules and phases of compiled graphs, where neither is written in the graph.

Truth is the eager counter on the same program, and a product of sizes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from dispatch_flops import Profile
from dispatch_flops.compile import counting_backend
from tests.helpers.profiling import profile_of

# a warning of torch.compile about inputs that are not leaves
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

A, B, C, D = 3, 5, 7, 11
BLOCK = A * 2 * B * C


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(B, C)
        self.down = nn.Linear(C, B)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))) @ self.down.weight @ self.down.weight.t()


class Net(nn.Module):
    """Model of four blocks, of which one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(B, D)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[2]):
            x = block(x)
        return self.head(x)


def train(model: nn.Module, batches: tuple[int, ...] = (A,)) -> None:
    for batch in batches:
        model(torch.ones(batch, B)).sum().backward()


def infer(model: nn.Module, batches: tuple[int, ...] = (A,)) -> None:
    with torch.no_grad():
        for batch in batches:
            model(torch.ones(batch, B))


def macs(profile: Profile, phase: Any, *, under: str = "") -> dict[str, int]:
    costs = profile.by_module(phase)
    return {fqn: cost.macs for fqn, cost in costs.items() if cost.macs and fqn.startswith(under)}


def calls(profile: Profile, *, under: str) -> dict[str, int]:
    return {node.fqn: node.calls for node in profile.root.walk() if node.fqn.startswith(under)}


# -- blocks that share a graph ----------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("run", [train, infer])
@pytest.mark.parametrize("frozen", [False, True])
def test_blocks_compiled_one_by_one_are_shown_with_their_own_runs(
    run: Any, dynamic: bool, frozen: bool
) -> None:
    model = Net()
    if frozen:
        model.blocks[1].requires_grad_(False)
    batches = (A, 2 * A) if dynamic else (A,)
    eager = profile_of(run, model, batches, model=model)
    backend = counting_backend("aot_eager", model, strict=True)
    for block in model.blocks:
        block.compile(backend=backend, dynamic=dynamic)
    run(model, batches)
    profile = backend.profile()
    for phase in ("forward", "backward"):
        found = macs(profile, phase, under="blocks.")
        assert found == macs(eager, phase, under="blocks.")
    assert calls(profile, under="blocks.") == calls(eager, under="blocks.")
    graphs = {graph.function for graph in backend.graphs}
    assert len(graphs) < 4  # some blocks share one
    active = {node.fqn: node.active_params for node in profile.root.walk()}
    assert active["blocks.3"] == 2 * B * C + B + C


def test_block_made_after_the_backend_is_shown_with_its_own_runs() -> None:
    model = Net()
    backend = counting_backend("aot_eager", model)
    blocks = [torch.compile(block, backend=backend) for block in model.blocks]
    with torch.no_grad():
        for block in blocks:
            block(torch.ones(A, B))
        assert macs(backend.profile(), "forward", under="blocks.3.") == {
            "blocks.3.up": A * B * C,
            "blocks.3.down": A * B * C,
        }


# -- whole steps ----------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(B, C)
        self.down = nn.Linear(C, B)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def test_compiled_gradient_of_a_function_is_backward() -> None:
    model = Two()
    parameters = dict(model.named_parameters())
    backend = counting_backend("aot_eager", model)

    @torch.compile(backend=backend)
    def gradient(parameters: dict[str, Tensor], x: Tensor) -> Any:
        return torch.func.grad(lambda p: functional_call(model, p, (x,)).sum())(parameters)

    gradient(parameters, torch.ones(A, B))
    costs = backend.step().costs
    assert costs["forward"].macs == 2 * A * B * C
    assert costs["backward"].macs == 3 * A * B * C  # the input has no gradient
    assert macs(backend.profile(), "forward") == {"": BLOCK, "up": BLOCK // 2, "down": BLOCK // 2}


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.t()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_module_without_parameters_has_its_own_work(is_in_place: bool) -> None:
    model = nn.Sequential(Squares(), Squares())
    backend = counting_backend("aot_eager", model)
    square: Any = model[1]
    if is_in_place:
        square.compile(backend=backend)
    else:
        square = torch.compile(square, backend=backend)
    square(torch.ones(A, B))
    assert macs(backend.profile(), "forward") == {"": A * B * A, "1": A * B * A}


def test_compiled_function_of_tensors_alone_is_outside_the_model() -> None:
    """A loss that is compiled by itself belongs to no module."""
    model = Two()
    backend = counting_backend("aot_eager", model)
    compiled = torch.compile(model, backend=backend)
    loss = torch.compile(lambda x, y: (x @ y.t()).sum(), backend=backend)
    loss(compiled(torch.ones(A, B)), torch.ones(D, B)).backward()
    profile = backend.profile()
    assert profile.root.total("forward").macs == 2 * A * B * C
    assert profile.outside.total("forward").macs == A * B * D
    assert profile.outside.total("backward").macs == A * B * D


class Broken(nn.Module):
    """A layer in which a graph ends."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(B, B)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


class AroundBreak(nn.Module):
    """Model with a product of its own behind layers, in the first of which a graph ends."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = Broken()
        self.head = nn.Linear(B, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.broken(x))
        return y @ y.t()


def test_work_after_a_graph_break_in_a_layer_belongs_to_the_model_that_calls_it() -> None:
    model = AroundBreak()
    eager = profile_of(train, model, model=model)
    backend = counting_backend("aot_eager", model)
    train(torch.compile(model, backend=backend))
    profile = backend.profile()
    assert profile.root.own("forward").macs == A * D * A
    for phase in ("forward", "backward"):
        assert macs(profile, phase) == macs(eager, phase)
    assert profile.root.calls == 1


def test_module_that_is_called_by_two_names_counts_every_call() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(B, B)
            self.layers = nn.ModuleList([self.layer, self.layer])

        def forward(self, x: Tensor) -> Any:
            for layer in (self.layer, *self.layers):
                x = layer(x)
            return x

    model = Named()
    backend = counting_backend("aot_eager", model)
    train(torch.compile(model, backend=backend))
    assert backend.profile().node("layer").calls == 3
    assert backend.profile().node("layer").total("forward").macs == 3 * A * B * B


def squares(layer: nn.Module, x: Tensor) -> Any:
    y = layer(x)
    return y @ y.t() @ x


class Calling(nn.Module):
    """Module that has a function call its layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first = nn.Linear(B, C)
        self.second = nn.Linear(B, C)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.second, self.function(self.first, x))


def test_compiled_function_belongs_to_the_module_that_calls_it() -> None:
    model = nn.Sequential(Calling(squares), Calling(squares), Calling(squares))
    eager = profile_of(train, model, model=model)
    backend = counting_backend("aot_eager", model)
    compiled = torch.compile(squares, backend=backend)
    for calling in model:
        calling.function = compiled
    train(model)
    profile = backend.profile()
    assert profile.node("2").own("forward").macs == 2 * (A * C * A + A * A * B)
    for phase in ("forward", "backward"):
        assert macs(profile, phase) == macs(eager, phase)
    assert len(backend.graphs) == 4, "calls but the first run the same code"
    assert profile.node("2").calls == 0, "its own forward is not compiled"
    assert profile.node("2.second").calls == 1


def test_compiled_method_that_is_not_called_by_the_model_is_outside() -> None:
    """As in an eager counter."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(B, C)

        def encode(self, x: Tensor) -> Tensor:
            y = self.up(x)
            return y @ y.t()

    model = Encoder()
    backend = counting_backend("aot_eager", model)
    torch.compile(model.encode, backend=backend)(torch.ones(A, B)).sum().backward()
    profile = backend.profile()
    assert macs(profile, "forward") == {"": A * B * C, "up": A * B * C}
    assert profile.outside.total("forward").macs == A * C * A
    assert profile.outside.total("backward").macs == 2 * A * C * A
    assert profile.root.calls == 0


def train_parts(run: Any, times: tuple[int, int]) -> None:
    for index, number in enumerate(times):
        for _ in range(number):
            run(index, torch.ones(A, B)).sum().backward()


def test_modules_that_are_passed_to_one_compiled_function_have_their_own_work() -> None:
    model = nn.ModuleList([Two(), Two()])
    backend = counting_backend("aot_eager", model)
    call = torch.compile(lambda module, x: module(x) @ x.t(), backend=backend)
    train_parts(lambda index, x: call(model[index], x), (1, 3))
    assert len(backend.graphs) == 2, "both run the same code"
    profile, product = backend.profile(), A * B * C
    for phase, products in (("forward", 2), ("backward", 3)):
        found = macs(profile, phase)
        assert (found["0"], found["1"]) == (products * product, 3 * products * product)
        assert found["1.down"] == 3 * product * (1 if phase == "forward" else 2)
        assert profile.outside.total(phase).macs == 4 * A * B * A
    assert profile.node("1").calls == 3


@pytest.mark.parametrize("is_trained", [False, True])
def test_model_that_the_backend_was_not_given_is_outside(is_trained: bool) -> None:
    """A teacher of the student's class runs the student's code."""
    student, teacher = Two(), Two()
    backend = counting_backend("aot_eager", student)
    compiled = [torch.compile(model, backend=backend) for model in (student, teacher)]
    if is_trained:
        train_parts(lambda index, x: compiled[index](x), (1, 3))
    else:
        with torch.no_grad():
            for index in (0, 1, 1, 1):
                compiled[index](torch.ones(A, B))
    profile, product = backend.profile(), A * B * C
    assert (profile.root.calls, profile.root.total("forward").macs) == (1, 2 * product)
    assert profile.outside.total("forward").macs == 3 * 2 * product
    assert profile.root.total("backward").macs == is_trained * 3 * product
    assert profile.outside.total("backward").macs == is_trained * 3 * 3 * product


def test_parameter_that_is_an_argument_does_not_tell_the_module() -> None:
    """A frozen model with a trained prompt that belongs to no model of the backend."""
    model = Two().requires_grad_(False)
    prompt = nn.Parameter(torch.ones(A, B))
    backend = counting_backend("aot_eager", model)
    torch.compile(model, backend=backend)(prompt).sum().backward()
    profile = backend.profile()
    assert profile.root.total("forward").macs == 2 * A * B * C
    assert profile.root.total("backward").macs == 2 * A * B * C


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(B, C)

    def forward(self, x: Tensor) -> Tensor:
        out: Any = checkpoint(lambda x: self.up(x.cos()).sin(), x, use_reentrant=False)
        return out


def test_recomputation_in_compiled_autograd_is_in_no_module_that_shares_its_code() -> None:
    """Blocks with one graph have one graph of compiled autograd, too."""
    model = nn.ModuleList([Recomputed(), Recomputed()])
    backend = counting_backend("aot_eager", model)
    for block in model:
        block.compile(backend=backend)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        for block in (model[0], model[1], model[1]):
            block(torch.ones(A, B, requires_grad=True)).sum().backward()
    profile = backend.profile()
    forward = macs(profile, "forward")
    assert (forward["0"], forward["1"]) == (A * B * C, 2 * A * B * C)
    assert macs(profile, "recompute") == {}
    assert profile.outside.total("recompute").macs == 3 * A * B * C
    assert profile.outside.total("backward").macs == 3 * 2 * A * B * C
    assert "compiled autograd: backward is in no module" in profile.notes


@pytest.mark.parametrize("is_forward_compiled", [False, True])
def test_compiled_autograd_is_backward(is_forward_compiled: bool) -> None:
    model = Two()
    backend = counting_backend("aot_eager", model)
    forward = torch.compile(model, backend=backend) if is_forward_compiled else model
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
        forward(torch.ones(A, B)).sum().backward()
    costs = backend.step().costs
    assert costs["forward"].macs == (2 * A * B * C if is_forward_compiled else 0)
    assert costs["backward"].macs == 3 * A * B * C
    assert backend.profile().root.calls == is_forward_compiled


class Adapted(nn.Module):
    """Layer with an adapter, whose result is multiplied by ones: inductor removes that."""

    def __init__(self, ones: Any) -> None:
        super().__init__()
        self.base = nn.Linear(B, C, bias=False)
        self.down = nn.Linear(B, D, bias=False)
        self.up = nn.Linear(D, C, bias=False)
        self.ones = ones

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * self.ones()


@pytest.mark.parametrize("ones", [lambda: 1.0, lambda: torch.ones(A, C)], ids=["number", "tensor"])
def test_products_before_what_inductor_removes_stay_in_their_modules(ones: Any) -> None:
    model = nn.Sequential(Adapted(ones))
    counting = counting_backend("inductor", model)
    compiled: Any = torch.compile(model, backend=counting)
    train(compiled)
    profile = counting.profile()
    # The inputs need no gradient.
    macs = {"base": (1, A * B * C), "down": (1, A * B * D), "up": (2, A * D * C)}
    for name, (products, size) in macs.items():
        assert profile.node(f"0.{name}").total("forward").macs == size
        assert profile.node(f"0.{name}").total("backward").macs == products * size


def test_passes_of_the_user_run_in_inductor() -> None:
    """The library's own would take their place."""
    graphs: list[Any] = []
    counting = counting_backend(
        "inductor", options={"joint_custom_pre_pass": lambda graph: graphs.append(graph)}
    )
    layer: Any = torch.compile(nn.Linear(B, C), backend=counting)
    train(layer)
    assert graphs
    assert counting.total().macs == 2 * A * B * C
