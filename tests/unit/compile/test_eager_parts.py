"""Code of a compiled program that runs outside its graphs: it is named, and never silently 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dispatch_flops.compile import counting_backend
from dispatch_flops.errors import UncountedOpsError, UncountedWarning
from tests.helpers.profiling import TORCH

# what torch says of graph breaks, of LSTMs and of the recompile limit is logged, not warned of
A, B, C = 3, 5, 7
ONE = A * B * B  # a product of one layer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(B, B)
        self.last = nn.Linear(B, B)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


@torch.compiler.disable
def eagerly(module: Any, x: Tensor) -> Tensor:
    return module(x)


class Disabled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return eagerly(self.last, self.first(x)).relu()


class DisabledFirst(Net):
    def forward(self, x: Tensor) -> Tensor:
        return eagerly(self.first, x)


class BreakInLoop(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            x = x @ layer.weight
            torch._dynamo.graph_break()
        return x


class BreakAfterOther(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(eagerly(torch.nn.functional.relu, self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(B, B)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class Printing(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        print("between")
        return self.last(x)


class Branching(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum() > float("-inf"):
            return self.last(x)
        return x


class Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)) * x.sum().item()


class Broken(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


class Checkpointed(Net):
    """torch.compile does not enter a checkpoint that it could not trace whole."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.function, self.first(x), use_reentrant=False)


def read_and_multiply(x: Tensor) -> Tensor:
    return x * x.sum().item() @ x.mT


class BreakingSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        torch._dynamo.graph_break()
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class BreakingBackward(BreakingSquare):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def report() -> None:
    print("between")


def read_each(x: Tensor) -> list[Any]:
    return [row.item() for row in x[:, 0]]


class Helped(Net):
    """Calls a function, which torch.compile inlines until a graph ends in it."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.function(x)
        return self.last(x)


def run(model: nn.Module, backend: Any, *batches: int, **options: Any) -> None:
    compiled = torch.compile(model, backend=backend, **options)
    with torch.no_grad():
        for batch in batches:
            compiled(torch.ones(batch, B))


@pytest.mark.parametrize(
    ("model", "macs", "name"),
    [
        (Disabled, ONE, "forward (test_eager_parts.py:"),
        (DisabledFirst, 0, "forward (test_eager_parts.py:"),
        (BreakInLoop, 0, "forward (test_eager_parts.py:"),
        (Recurrent, 0, "forward (test_eager_parts.py:"),
    ],
)
def test_code_that_is_left_eager_is_named_and_makes_a_lower_bound(
    model: Any, macs: int, name: str
) -> None:
    backend = counting_backend("aot_eager")
    run(model(), backend, A)
    with pytest.warns(UncountedWarning, match="eager code"):
        step = backend.step()
    assert step.total.macs == macs
    assert step.is_lower_bound
    assert all(calls == 1 for calls in step.uncounted.values())
    assert any(name in found for found in step.uncounted)
    profile = backend.profile()
    assert profile.is_lower_bound
    assert set(profile.uncounted_ops()) == set(step.uncounted)


def test_recompile_limit_is_named() -> None:
    backend = counting_backend("aot_eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        run(Net(), backend, 2, 3, 5, 7, dynamic=False)
    with pytest.warns(UncountedWarning, match="recompile limit"):
        step = backend.step()
    assert step.total.macs == (2 + 3) * 2 * B * B
    assert step.is_lower_bound


def test_code_over_the_recompile_limit_is_named_for_a_backend_made_later() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        run(Net(), counting_backend("aot_eager"), 2, 3, 5, dynamic=False)
        backend = counting_backend("aot_eager", strict=True)
        run(Net(), backend, 2, dynamic=False)
    with pytest.raises(UncountedOpsError, match="recompile limit"):
        backend.step()


def test_backend_names_no_failure_of_another_once_it_has_graphs() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        run(Net(), counting_backend("aot_eager"), 2, 3, 5, dynamic=False)
    backend = counting_backend("aot_eager", strict=True)
    run(nn.Linear(B, B), backend, A)
    assert backend.step().total.macs == ONE


@pytest.mark.filterwarnings("ignore:no cost is known:UserWarning")
def test_backend_without_a_graph_names_nothing_that_others_have_compiled() -> None:
    """It names what failed in the process before."""
    failed = counting_backend("aot_eager").step().uncounted
    torch.compile(Net(), backend="eager")(torch.ones(A, B))
    assert counting_backend("aot_eager").step().uncounted.keys() <= failed.keys()


def test_strict_backend_raises_where_code_is_left_eager() -> None:
    backend = counting_backend("aot_eager", strict=True)
    run(Disabled(), backend, A)
    with pytest.raises(UncountedOpsError, match="disable"):
        backend.step()


def broken_in_sequential() -> nn.Module:
    return nn.Sequential(Broken(), nn.Linear(B, B))


def broken_in_nested_sequentials() -> nn.Module:
    return nn.Sequential(nn.Sequential(Broken(), Net()), Net())


@pytest.mark.parametrize("named", [True, False])
def test_layer_of_torch_beside_a_graph_break_is_named(named: bool) -> None:
    model = broken_in_sequential()
    backend = counting_backend("aot_eager", model if named else None)
    run(model, backend, A)
    with pytest.warns(UncountedWarning, match=r"forward \(container.py:.*torch's own layers"):
        step = backend.step()
    assert step.total.macs == 2 * ONE


def test_modules_of_the_program_beside_a_graph_break_are_counted() -> None:
    model = broken_in_nested_sequentials()
    backend = counting_backend("aot_eager", model, strict=True)
    run(model, backend, A)
    assert backend.step().total.macs == 3 * 2 * ONE


def outer_of_layers() -> nn.Module:
    return Sequence(Net(), nn.Linear(B, B))


class Sequence(nn.Sequential):
    """Container of the program's own."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def compile_children(model: nn.Module, backend: Any) -> None:
    for child in model.children():
        child.compile(backend=backend)


leaves_layers_eager = pytest.mark.skipif(TORCH >= (2, 14), reason="this torch compiles them")


@leaves_layers_eager
@pytest.mark.parametrize(
    ("make", "macs", "name"),
    [
        (lambda: nn.Linear(B, B), 0, "Linear.forward (linear.py:"),
        (lambda: nn.Sequential(nn.Linear(B, B)), 0, "Linear.forward (linear.py:"),
        (lambda: nn.Sequential(Net(), nn.Linear(B, B)), 2 * ONE, "Linear.forward (linear.py:"),
        (
            lambda: nn.TransformerEncoderLayer(B, 1, C),
            0,
            "TransformerEncoderLayer.forward (transformer.py:",
        ),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_layer_of_torch_that_is_compiled_in_place_is_named(
    make: Callable[[], nn.Module], macs: int, name: str, is_sharded: bool
) -> None:
    model = make()
    backend = counting_backend("aot_eager", model)
    model.compile(backend=backend)
    with one_rank() if is_sharded else nullcontext():
        if is_sharded:
            fully_shard(model)
        model(torch.ones(A, B))
    with pytest.warns(UncountedWarning, match=r"leaves torch's own layers eager.*compile\(layer"):
        step = backend.step()
    assert step.total.macs == macs
    assert [found.startswith(f"eager code: {name}") for found in step.uncounted] == [True]
    assert backend.profile().is_lower_bound


def test_layer_of_torch_that_is_compiled_in_place_in_other_code_is_counted() -> None:
    model = outer_of_layers()
    backend = counting_backend("aot_eager", model, strict=True)
    compile_children(model, backend)
    model.compile(backend=backend)
    model(torch.ones(A, B))
    assert backend.step().total.macs == 3 * ONE


@pytest.mark.parametrize("is_in_place", [False, True])
def test_traced_module_in_a_compiled_model_is_named(is_in_place: bool) -> None:
    """Its class has no function ``forward``."""
    model = nn.Sequential(torch.jit.trace(Net(), torch.ones(A, B)), Net())
    backend = counting_backend("aot_eager", model)
    if is_in_place:
        model.compile(backend=backend)
        with torch.no_grad():
            model(torch.ones(A, B))
    else:
        run(model, backend, A)
    with pytest.warns(UncountedWarning, match="eager code"):
        assert backend.step().total.macs == 2 * ONE


def test_layer_of_torch_in_a_sequential_with_a_forward_of_its_own_is_compiled_with_it() -> None:
    class Skipping(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[0](x)

    model = Skipping(nn.Linear(B, B), nn.Linear(B, C))
    backend = counting_backend("aot_eager", model, strict=True)
    model.compile(backend=backend)
    model(torch.ones(A, B))
    assert backend.step().total.macs == ONE


@leaves_layers_eager
def test_layer_of_torch_that_is_compiled_in_place_for_another_backend_is_not_named() -> None:
    model = outer_of_layers()
    backend = counting_backend("aot_eager", model, strict=True)
    model[0].compile(backend=backend)
    model[1].compile(backend="aot_eager")
    model(torch.ones(A, B))
    assert backend.step().total.macs == 2 * ONE


@pytest.mark.parametrize("model", [Net, Printing, Branching, Reading, Broken])
def test_break_at_which_no_arithmetic_runs_is_exact(model: Any) -> None:
    backend = counting_backend("aot_eager", strict=True)
    run(model(), backend, A)
    step = backend.step()
    assert step.total.macs == 2 * ONE
    assert not step.uncounted


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Branching, "forward"),
        (Printing, "forward"),
        (lambda: Helped(lambda x: print(x.shape)), "forward"),
        (lambda: read_and_multiply, "read_and_multiply"),
    ],
)
def test_graph_break_in_a_checkpoint_leaves_it_eager_and_is_named(
    make: Callable[[], Any], name: str
) -> None:
    backend = counting_backend("aot_eager")
    run(Checkpointed(make()), backend, A)
    with pytest.warns(UncountedWarning, match=rf"eager code: {name} \(test_eager_parts.py:"):
        step = backend.step()
    assert step.total.macs == ONE


@pytest.mark.parametrize("function", [BreakingSquare, BreakingBackward])
def test_backward_of_an_autograd_function_with_a_graph_break_is_named(function: Any) -> None:
    backend = counting_backend("aot_eager")
    x = torch.ones(A, B, requires_grad=True)
    torch.compile(function.apply, backend=backend)(x).sum().backward()
    with pytest.warns(UncountedWarning, match="eager code: .*ward"):
        assert backend.step().is_lower_bound


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch._dynamo.graph_break(),
        lambda x: report(),
        lambda x: any([x.sum() > 0, x.sum() > 1]),
        read_each,
        Branching(),
        Printing(),
        torch.no_grad()(lambda x: x.sum().item()),
    ],
)
def test_break_in_a_function_that_has_graphs_of_its_own_is_exact(function: Any) -> None:
    backend = counting_backend("aot_eager", strict=True)
    model = Helped(function)
    for _ in range(2):  # the second model finds the function compiled
        run(model, backend, A)
    step = backend.step()
    own = 2 if isinstance(function, Net) else 0
    assert step.total.macs == 2 * (2 + own) * ONE
    assert not step.uncounted


def test_backend_does_not_name_what_was_left_eager_before_it_was_made() -> None:
    run(Disabled(), "eager", A)
    torch._dynamo.reset()
    backend = counting_backend("aot_eager", strict=True)
    run(Net(), backend, A)
    assert backend.step().total.macs == 2 * ONE


# -- two backends in a process ------------------------------------------------------------------


@pytest.mark.parametrize("other", ["counting", "aot_eager"])
@pytest.mark.parametrize("model", [Disabled, BreakAfterOther])
def test_graph_break_is_named_for_the_backend_of_the_graph_alone(model: Any, other: str) -> None:
    broken = counting_backend("aot_eager")
    whole = counting_backend("aot_eager", strict=True)
    run(Net(), whole, A)
    run(model(), broken if other == "counting" else "aot_eager", A)
    run(Net(), whole, A)
    step = whole.step()
    assert step.total.macs == 2 * 2 * ONE
    assert not step.uncounted
    if other == "counting":
        with pytest.warns(UncountedWarning, match="eager code"):
            assert broken.step().is_lower_bound


def test_graph_break_is_named_for_each_backend_that_compiles_the_code() -> None:
    model, backends = Disabled(), [counting_backend("aot_eager") for _ in range(2)]
    for backend in backends:
        run(model, backend, A)
    for backend in backends:
        with pytest.warns(UncountedWarning, match="eager code"):
            step = backend.step()
        assert step.total.macs == ONE


def test_function_that_cannot_be_compiled_is_named_for_every_backend() -> None:
    """torch.compile marks the code: the second backend is not asked, and nothing is recorded."""
    model, backends = Recurrent(), [counting_backend("aot_eager") for _ in range(2)]
    run(model, "eager", A)
    for backend in backends:
        run(model, backend, A)
        with pytest.warns(UncountedWarning, match="eager code"):
            assert backend.step().is_lower_bound


def test_graph_break_after_a_reset_is_named() -> None:
    backend = counting_backend("aot_eager")
    run(Net(), backend, A)
    torch._dynamo.reset()
    run(Disabled(), backend, A)
    with pytest.warns(UncountedWarning, match="eager code"):
        assert backend.step().is_lower_bound


def test_graph_break_after_a_reset_is_named_where_as_many_breaks_were_known() -> None:
    run(Disabled(), counting_backend("aot_eager"), A)
    backend = counting_backend("aot_eager")
    torch._dynamo.reset()
    run(Disabled(), backend, A)
    with pytest.warns(UncountedWarning, match="eager code"):
        assert backend.step().is_lower_bound
