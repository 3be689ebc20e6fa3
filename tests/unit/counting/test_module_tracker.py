"""Attribution of forward and backward to modules, for the graphs that forward passes make.

A linear layer on n rows takes n·in·out MACs in forward, the same for the gradient of its weight,
and the same for that of its input. All sizes are primes, so that no two layers have equal costs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.attributing import plain, rows, train, work, work_of
from tests.helpers.profiling import profile_of


def test_first_layer_has_no_gradient_of_its_input() -> None:
    model = plain(3, 5, 7)
    assert work(train, model, rows(2, 3), model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


def test_layer_with_an_input_that_requires_grad_has_both_gradients() -> None:
    model = plain(3, 5)
    assert work(train, model, rows(2, 3, grad=True), model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 2 * 3 * 5}
    }


def test_operators_of_a_container_are_its_own() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 5, bias=False)
            self.w = nn.Parameter(torch.randn(5, 7))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) @ self.w

    model = Product()
    assert work(train, model, rows(2, 3), model=model) == {
        "": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
        "inner": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
    }


class Shared(nn.Module):
    """Model with one square layer that two parents and the root hold."""

    class Parent(nn.Module):
        def __init__(self, core: nn.Module) -> None:
            super().__init__()
            self.core = core

        def forward(self, x: Tensor) -> Tensor:
            return self.core(x)

    def __init__(self) -> None:
        super().__init__()
        core = plain(5, 5)
        self.left = Shared.Parent(core)
        self.right = Shared.Parent(core)
        self.tail = core

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.right(self.right(self.left(x))))


def test_shared_module_is_recorded_under_the_parent_that_called() -> None:
    model = Shared()
    profile = profile_of(train, model, rows(2, 5), model=model)
    square = 2 * 5 * 5
    assert work_of(profile) == {
        "left.core.0": {"forward": square, "backward": square},
        "right.core.0": {"forward": 2 * square, "backward": 2 * 2 * square},
        "tail.0": {"forward": square, "backward": 2 * square},
    }
    assert {fqn: profile.node(fqn).calls for fqn in ("left.core", "right.core", "tail")} == {
        "left.core": 1, "right.core": 2, "tail": 1,
    }  # fmt: skip
    assert profile.total_params == 5 * 5


def test_module_called_three_times_has_three_times_the_cost() -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.Linear(5, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.core(x)
            return x

    model = Loop()
    profile = profile_of(train, model, rows(2, 5), model=model)
    square = 2 * 5 * 5
    assert work_of(profile) == {"core": {"forward": 3 * square, "backward": (1 + 2 + 2) * square}}
    assert profile.node("core").calls == 3


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 5, bias=False)
        self.a = nn.Linear(5, 5, bias=False)
        self.b = nn.Linear(5, 5, bias=False)


def test_residual_branches_are_attributed_to_their_modules() -> None:
    class Residual(Branches):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = x + self.a(x)
            return x + self.b(x)

    model = Residual()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 3), model=model) == {
        "stem": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "a": {"forward": square, "backward": 2 * square},
        "b": {"forward": square, "backward": 2 * square},
    }


def test_branches_of_an_input_without_gradient_have_weight_gradients_only() -> None:
    class Siblings(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    model = Siblings()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "a": {"forward": square, "backward": square},
        "b": {"forward": square, "backward": square},
    }


def test_detached_branch_has_no_backward() -> None:
    class Cut(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x).detach()

    model = Cut()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "a": {"forward": square, "backward": square},
        "b": {"forward": square},
    }


def test_in_place_operators_on_module_outputs_belong_to_the_caller() -> None:
    class InPlace(Branches):
        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x).relu_()
            z = self.a(y)
            z += y
            z.mul_(2)
            return self.b(z).sigmoid_()

    model = InPlace()
    profile = profile_of(train, model, rows(2, 3), model=model)
    square = 2 * 5 * 5
    assert work_of(profile) == {
        "stem": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "a": {"forward": square, "backward": 2 * square},
        "b": {"forward": square, "backward": 2 * square},
    }
    own = {(op.op, op.phase) for op in profile.root.ops}
    assert {("aten.relu_.default", "forward"), ("aten.sigmoid_backward.default", "backward"),
            ("aten.threshold_backward.default", "backward")} <= own  # fmt: skip


def test_copies_into_slices_keep_attribution_in_backward() -> None:
    class Slices(Branches):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(4, 5)
            out[:2] = self.a(x)
            half = out[2:]
            half.copy_(self.b(out[:2].clone()))
            out.mul_(3)
            return out

    model = Slices()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "a": {"forward": square, "backward": square},
        "b": {"forward": square, "backward": 2 * square},
    }


def test_embedding_backward_belongs_to_the_embedding() -> None:
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7, bias=False))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    profile = profile_of(train, model, tokens, model=model)
    assert work_of(profile) == {"1": {"forward": 6 * 5 * 7, "backward": 2 * 6 * 5 * 7}}
    assert "aten.embedding_dense_backward.default" in {op.op for op in profile.node("0").ops}


def test_frozen_layer_has_no_weight_gradient() -> None:
    model = plain(3, 5, 7, 11)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    assert work(train, model, rows(2, 3), model=model) == {
        "0": {"forward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 5 * 7},  # gradient of its weight
        "2": {"forward": 2 * 7 * 11, "backward": 2 * 7 * 11},  # gradient of its input
    }


class LoRA(nn.Module):
    """Frozen layer, and a trained product of rank 2 that is added to it."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out, bias=False).requires_grad_(False)
        self.down = nn.Linear(n_in, 2, bias=False)
        self.up = nn.Linear(2, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_lora_has_no_weight_gradient_of_its_frozen_base() -> None:
    model = nn.Sequential(LoRA(5, 7), LoRA(7, 11))
    base, down, up = 3 * 7 * 11, 3 * 7 * 2, 3 * 2 * 11
    assert work(train, model, rows(3, 5), model=model) == {
        "0.base": {"forward": 3 * 5 * 7},
        "0.down": {"forward": 3 * 5 * 2, "backward": 3 * 5 * 2},
        "0.up": {"forward": 3 * 2 * 7, "backward": 2 * 3 * 2 * 7},
        "1.base": {"forward": base, "backward": base},  # gradient of its input only
        "1.down": {"forward": down, "backward": 2 * down},
        "1.up": {"forward": up, "backward": 2 * up},
    }


def test_keyword_arguments_and_dataclass_outputs_keep_attribution() -> None:
    @dataclass
    class Output:
        hidden: Tensor
        extra: dict[str, Any]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = nn.Linear(5, 5, bias=False)
            self.w = nn.Parameter(torch.randn(5, 3))

        def forward(self, *, hidden: Tensor) -> Output:
            hidden = self.core(input=hidden)
            return Output(hidden, {"small": [hidden @ self.w]})

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            out = self.block(hidden=x)
            return out.hidden.sum() + out.extra["small"][0].sum()

    model = Outer()
    assert work(train, model, rows(2, 5), model=model) == {
        "block": {"forward": 2 * 5 * 3, "backward": 2 * 2 * 5 * 3},
        "block.core": {"forward": 2 * 5 * 5, "backward": 2 * 5 * 5},
    }


class Multiply(torch.autograd.Function):
    """x @ w, with an unneeded product in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        _ = x @ w
        return grad @ w.t(), x.t() @ grad


def test_custom_autograd_function_belongs_to_its_caller_in_backward() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Linear(3, 5, bias=False)
            self.w = nn.Parameter(torch.randn(5, 7))
            self.after = nn.Linear(7, 11, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(Multiply.apply(self.before(x), self.w))

    model = Custom()
    product = 2 * 5 * 7
    assert work(train, model, rows(2, 3), model=model) == {
        "": {"forward": product, "backward": 3 * product},
        "before": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "after": {"forward": 2 * 7 * 11, "backward": 2 * 2 * 7 * 11},
    }


def test_method_other_than_forward_is_outside_the_model() -> None:
    class Codec(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Linear(5, 3, bias=False)
            self.w = nn.Parameter(torch.randn(3, 7))

        def encode(self, x: Tensor) -> Tensor:
            return self.down(x) @ self.w

    model = Codec()
    profile = profile_of(train, model.encode, rows(2, 5), model=model)
    assert work_of(profile) == {
        "down": {"forward": 2 * 5 * 3, "backward": 2 * 5 * 3},
        "<outside>": {"forward": 2 * 3 * 7, "backward": 2 * 2 * 3 * 7},
    }
    assert (profile.root.calls, profile.node("down").calls) == (0, 1)


def test_forward_called_directly_counts_under_the_caller() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 5, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.forward(x)

    model = Direct()
    profile = profile_of(train, model, rows(2, 3), model=model)
    assert work_of(profile) == {"": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5}}
    assert profile.node("inner").calls == 0
    assert profile.root.active_params == 3 * 5


def test_recursive_module_counts_every_call() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(5, 5, bias=False)
            self.w = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor, depth: int) -> Tensor:
            x = self.step(x)
            if depth:
                x = self(x, depth - 1)
            return x @ self.w

    model = Tree()
    profile = profile_of(train, model, rows(2, 5), 3, model=model)
    square = 2 * 5 * 5
    assert work_of(profile) == {
        "": {"forward": 4 * square, "backward": 4 * 2 * square},
        "step": {"forward": 4 * square, "backward": (1 + 3 * 2) * square},
    }
    assert (profile.root.calls, profile.node("step").calls) == (4, 4)


def test_module_with_two_names_in_one_parent_counts_every_call() -> None:
    """The two calls cannot be told apart: the module has the first of its names."""
    layer = nn.Linear(5, 5, bias=False)
    model = nn.Sequential(layer, layer)
    profile = profile_of(train, model, rows(2, 5), model=model)
    assert sum(w["forward"] for w in work_of(profile).values()) == 2 * 2 * 5 * 5
    assert profile.total_params == 5 * 5


def test_generator_within_a_module_keeps_attribution() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(plain(5, 5, 5))

        def steps(self, x: Tensor) -> Iterator[Tensor]:
            for layer in self.layers:
                x = layer(x)
                yield x

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(list(self.steps(x))).sum(0)

    model = Lazy()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "layers.0": {"forward": square, "backward": square},
        "layers.1": {"forward": square, "backward": 2 * square},
    }


def test_copy_of_the_model_is_outside() -> None:
    model = plain(3, 5)
    teacher = copy.deepcopy(model)

    def distill() -> None:
        x = rows(2, 3)
        with torch.no_grad():
            target = teacher(x)
        (model(x) - target).square().sum().backward()

    assert work(distill, model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "<outside>.Sequential.0": {"forward": 2 * 3 * 5},
    }


def test_tensor_hook_belongs_to_the_module_of_its_node() -> None:
    """Operators of a tensor hook belong to the module that made the node."""
    model = plain(3, 5, 7)
    w = rows(5, 5)

    def call() -> None:
        h = model[0](rows(2, 3))
        h.register_hook(lambda g: g @ w)
        model[1](h).sum().backward()

    assert work(call, model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 5 * 5 + 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }
