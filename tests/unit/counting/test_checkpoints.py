"""Activation checkpointing: recomputed operators are attributed to their module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils import checkpoint as checkpointing
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from tests.helpers.attributing import Work, plain, rows, train, work, work_of
from tests.helpers.profiling import profile_of

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "hooks"])
ROW = 5 * 5  # MACs per row of a square layer


class Stack(nn.Module):
    """Three layers, of which ``how`` calls the second one under a checkpoint."""

    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5, bias=False)
        self.core = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh())
        self.last = nn.Linear(5, 7, bias=False)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self.core, self.first(x)))


def stack_work(core: dict[str, int]) -> Work:
    return {
        "first": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "core.0": core,
        "last": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


@REENTRANT
def test_checkpointed_module_is_recomputed_once(reentrant: bool) -> None:
    model = Stack(lambda core, x: checkpoint(core, x, use_reentrant=reentrant))
    profile = profile_of(train, model, rows(2, 3), model=model)
    assert work_of(profile) == stack_work(
        {"forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW}
    )
    assert profile.node("core.0").calls == 1  # recomputation is not a call of the program
    assert profile.model_total().macs == profile.total().macs - 2 * ROW


@REENTRANT
def test_checkpointed_function_recomputes_the_modules_that_it_calls(reentrant: bool) -> None:
    model = Stack(lambda core, x: checkpoint(lambda x: core(x) * 2, x, use_reentrant=reentrant))
    profile = profile_of(train, model, rows(2, 3), model=model)
    assert work_of(profile) == stack_work(
        {"forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW}
    )


class ProductFirst(torch.autograd.Function):
    """Multiplies in backward before it asks for what it saved, which a checkpoint recomputes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad @ torch.eye(5)
        (x,) = ctx.saved_tensors
        return grad + (grad @ torch.eye(5)) * x


def test_recomputation_without_gradients_amid_a_node_is_told_from_its_backward() -> None:
    weight = torch.ones(5, 7)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = (x @ weight).sum()
        return ProductFirst.apply(x + shift)  # type: ignore[no-any-return]

    model = Stack(lambda core, x: checkpoint(function, x, use_reentrant=False))
    profile = profile_of(train, model, rows(2, 3), model=model)
    assert work_of(profile)[""] == {
        "forward": 2 * 5 * 7,
        "recompute": 2 * 5 * 7,
        "backward": 2 * 2 * ROW,
    }


# In a group, several backward passes share what is recomputed.
GROUP = getattr(checkpointing, "GraphExecGroup", None)  # not in every torch
CONTEXTS = [
    pytest.param(True, nullcontext, id="reentrant"),
    pytest.param(False, nullcontext, id="hooks"),
    pytest.param(False, GROUP, id="group", marks=pytest.mark.skipif(GROUP is None, reason="none")),
]


@pytest.mark.parametrize(("reentrant", "context"), CONTEXTS)
def test_operators_of_a_checkpointed_function_belong_to_its_caller(
    reentrant: bool, context: Callable[[], AbstractContextManager[Any]]
) -> None:
    """A product between two modules of the function belongs to the caller in every phase."""

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(5, 5, bias=False)
            self.b = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh())
            self.w = nn.Parameter(torch.randn(5, 5))

        def run(self, x: Tensor) -> Tensor:
            return self.b((self.a(x @ self.w) @ self.w).tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(3, 5, bias=False), Caller())
    wide = 2 * 5 * 7

    def run() -> None:
        with context():
            train(model, rows(2, 3))

    assert work(run, model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1": {"forward": 2 * 2 * ROW, "recompute": 2 * 2 * ROW, "backward": 2 * 2 * 2 * ROW},
        "1.a": {"forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW},
        "1.b.0": {"forward": wide, "recompute": wide, "backward": 2 * wide},
    }


@REENTRANT
def test_checkpointed_function_without_modules_belongs_to_its_caller(reentrant: bool) -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda x: (x @ self.w).tanh(), x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(3, 5, bias=False), Caller())
    assert work(train, model, rows(2, 3), model=model)["1"] == {
        "forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW,
    }  # fmt: skip


def test_early_stop_excludes_operators_that_are_not_needed() -> None:
    """Backward does not need the output of the last layer, which is therefore not recomputed."""
    model = nn.Sequential(plain(3, 5), plain(5, 5, 5))

    def call(early: bool) -> Any:
        with set_checkpoint_early_stop(early):
            h = model[0](rows(2, 3))
            return checkpoint(model[1], h, use_reentrant=False).sum().backward()

    both = {"forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW}
    whole = work(call, False, model=model)
    assert (whole["1.0"], whole["1.1"]) == (both, both)
    stopped = work(call, True, model=model)
    assert (stopped["1.0"], stopped["1.1"]) == (both, {"forward": 2 * ROW, "backward": 4 * ROW})


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@REENTRANT
def test_nested_checkpoints_recompute_the_inner_function_twice(reentrant: bool) -> None:
    """The inner layer is recomputed twice: by the outer checkpoint and by its own.

    The outer one, if reentrant, recomputes everything without saving inner activations.
    """
    again = partial(checkpoint, use_reentrant=reentrant)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh())
            self.b = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return again(self.b, self.a(x)).tanh()

    model = nn.Sequential(nn.Linear(3, 5, bias=False), Outer())
    found = work(lambda: again(model[1], model[0](rows(2, 3))).sum().backward(), model=model)
    assert found == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1.a.0": {"forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW},
        "1.b.0": {"forward": 2 * ROW, "recompute": 2 * 2 * ROW, "backward": 2 * 2 * ROW},
    }


@pytest.mark.parametrize("impl", list(CheckpointImpl))
def test_checkpoint_wrapper_is_recomputed_once(impl: CheckpointImpl) -> None:
    core = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh())
    model = nn.Sequential(nn.Linear(3, 5, bias=False), checkpoint_wrapper(core, impl))
    found = work(train, model, rows(2, 3), model=model)
    assert found == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1.0": {
            "forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW,
        },
    }  # fmt: skip


def test_checkpoint_sequential_recomputes_all_but_the_last_part() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh()) for _ in "abcd"))
    x = rows(2, 5, grad=True)
    found = work(
        lambda: checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward(),
        model=model,
    )
    once = {"forward": 2 * ROW, "backward": 2 * 2 * ROW}
    again = {**once, "recompute": 2 * ROW}
    assert found == {"0.0": again, "1.0": again, "2.0": once, "3.0": once}  # the last part is kept


@REENTRANT
def test_checkpointed_layers_are_recomputed_at_every_step(reentrant: bool) -> None:
    layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5, bias=False), nn.Tanh()) for _ in range(3))

    def step() -> None:
        x = rows(2, 5, grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=reentrant)
        x.sum().backward()

    found = work(lambda: (step(), step()), model=layers)
    each = {"forward": 2 * 2 * ROW, "recompute": 2 * 2 * ROW, "backward": 2 * 4 * ROW}
    assert found == {f"{i}.0": each for i in range(3)}


def test_gradient_within_a_checkpointed_forward_is_recomputed() -> None:
    """The gradient within forward is recomputed together with that forward.

    f = 2(x@w)wᵀ. Forward: x@w, recomputed for the gradient, and the product of the gradient.
    Backward: x@w and the gradient once more, then two gradients of each of two products.
    """

    class Forces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            energy = self.net(x).square().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0].tanh()

    model = Forces()
    x = rows(2, 5, grad=True)
    found = work(lambda: checkpoint(model, x, use_reentrant=False).sum().backward(), model=model)
    assert found == {
        "net": {"forward": 2 * 5, "recompute": (1 + 2) * 2 * 5, "backward": (1 + 4) * 2 * 5}
    }


@REENTRANT
def test_gradient_without_graph_in_a_checkpoint_is_recomputed(reentrant: bool) -> None:
    """The gradient of a guidance step within forward has no graph, and is recomputed as well."""

    class Guided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(5, 1, bias=False)
            self.out = nn.Linear(5, 7, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.score(y).sum(), y)
            return self.out(x + gradient).tanh()

    model = Guided()
    x = rows(2, 5, grad=True)
    found = work(
        lambda: checkpoint(model, x, use_reentrant=reentrant).sum().backward(), model=model
    )
    wide = 2 * 5 * 7
    assert found == {
        "out": {"forward": wide, "recompute": wide, "backward": 2 * wide},
        # Backward is the gradient in forward; everything later is recomputation.
        "score": {"forward": 2 * 5, "backward": 2 * 5, "recompute": 2 * 2 * 5},
    }


def test_fused_attention_recomputes_its_scores_in_backward() -> None:
    """Forward: q@kᵀ and p@v. Backward: dv, dp, dq, dk. The kernel recomputes q@kᵀ."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    model = Attention()
    q, k, v = (torch.randn(2, 3, s, 8, requires_grad=True) for s in (7, 11, 11))
    product = 2 * 3 * 7 * 11 * 8
    assert work(train, model, q, k, v, model=model) == {
        "": {"forward": 2 * product, "backward": 4 * product, "recompute": product}
    }


def test_module_that_a_custom_backward_calls_again_is_recomputed() -> None:
    """A custom function calls a module in backward once more: that call is recomputation."""
    layer = nn.Linear(5, 5, bias=False)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return layer(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = layer(x)
            return torch.autograd.grad(y, x, grad)[0]

    found = work(train, Again.apply, rows(2, 5, grad=True), model=layer)
    assert found == {"": {"forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * ROW}}


W = torch.ones(4, 4, requires_grad=True)
PRODUCT = 2 * 4 * 4


def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = x @ W
    return torch.tanh(x) * scale


def with_tensors_kept_elsewhere(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        hidden = torch.tanh(x @ W)
    return torch.tanh(hidden)


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.tanh(x @ W) @ W)


def nested(x: torch.Tensor, *, reentrant: bool) -> torch.Tensor:
    return torch.tanh(checkpoint(twice, torch.tanh(x @ W), use_reentrant=reentrant) @ W)


@pytest.mark.parametrize(
    ("function", "reentrant", "backward", "recompute"),
    [
        # The product has no gradients; it is recomputed.
        (without_gradients, False, 0, PRODUCT),
        (without_gradients, True, 0, PRODUCT),
        (with_tensors_kept_elsewhere, False, 2 * PRODUCT, PRODUCT),
        # Four products, each with two gradients. The outer function recomputes all four, the
        # inner one its two once more.
        (partial(nested, reentrant=False), False, 8 * PRODUCT, 6 * PRODUCT),
        (partial(nested, reentrant=True), True, 8 * PRODUCT, 6 * PRODUCT),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_every_operator_of_a_recomputed_function_is_recomputed(
    function: Any, reentrant: bool, backward: int, recompute: int
) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    profile = profile_of(lambda: checkpoint(function, x, use_reentrant=reentrant).sum().backward())
    assert profile.total("backward").macs == backward
    assert profile.total("recompute").macs == recompute


def test_gradient_that_a_checkpointed_function_takes_is_recomputed() -> None:
    """Forces from energies: rows of 6 through 6 -> 11 -> 6, with create_graph."""
    net = nn.Sequential(nn.Linear(6, 11, bias=False), nn.Tanh(), nn.Linear(11, 6, bias=False))
    x = torch.rand(5, 6, requires_grad=True)

    def forces(x: Tensor) -> Tensor:
        return torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]

    profile = profile_of(
        lambda: checkpoint(forces, x, use_reentrant=False).sum().backward(), model=net
    )
    one = 5 * 6 * 11
    # The function runs forward and the gradient of its input. Both are recomputed. Backward
    # through the product g @ w of that gradient has the gradients of g and of w.
    assert work_of(profile)["2"] == {"forward": one, "backward": one + one, "recompute": 2 * one}


def test_module_first_called_in_a_gradient_hook_is_backward() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 5, bias=False)
            self.gate = nn.Linear(5, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            out.register_hook(lambda grad: grad * self.gate(grad.detach()).sum().sigmoid().detach())
            return out

    model = Gated()
    profile = profile_of(lambda: model(torch.rand(2, 4)).sum().backward(), model=model)
    assert work_of(profile) == {
        "layer": {"forward": 2 * 4 * 5, "backward": 2 * 4 * 5},
        "gate": {"backward": 2 * 5 * 3},
    }
    assert (profile.node("gate").calls, profile.node("gate").active_params) == (1, 5 * 3)
    assert profile.uncalled_modules() == []


def test_backward_of_a_reentrant_checkpoint_with_saved_tensor_hooks_is_backward() -> None:
    """With hooks on saved tensors, the tracker looks at the callers of every node."""
    model = Stack(lambda core, x: checkpoint(core, x, use_reentrant=True))

    def run() -> None:
        with torch.autograd.graph.save_on_cpu():
            model(rows(2, 3)).sum().backward()

    assert work_of(profile_of(run, model=model)) == stack_work(
        {"forward": 2 * ROW, "recompute": 2 * ROW, "backward": 2 * 2 * ROW}
    )


def test_saved_tensor_hooks_that_are_not_functions_are_no_checkpoint() -> None:
    def keep(tensor: Tensor) -> Tensor:
        return tensor

    model = plain(3, 5)

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(partial(keep), partial(keep)):
            train(model, rows(2, 3))

    product = 2 * 3 * 5
    assert work(run, model=model) == {"0": {"forward": product, "backward": product}}
