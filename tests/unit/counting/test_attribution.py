"""Which module, which phase: the graphs that forward passes make.

A linear layer on n rows takes n·in·out MACs forward, as many for its weight's gradient, and as
many for its input's where that needs one. Every size is a prime, so that no two layers agree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.attributing import plain, rows, train, work, work_of
from tests.helpers.profiling import profile_of


def test_first_layer_needs_no_input_gradient() -> None:
    model = plain(3, 5, 7)
    assert work(train, model, rows(2, 3), model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


def test_input_that_needs_a_gradient() -> None:
    model = plain(3, 5)
    assert work(train, model, rows(2, 3, grad=True), model=model) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 2 * 3 * 5}
    }


def test_own_products_of_a_container() -> None:
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
    """One square layer, held by two parents and by the root."""

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


def test_module_called_three_times_by_one_parent() -> None:
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


def test_residual() -> None:
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


def test_branches_fed_by_an_input_without_gradient() -> None:
    class Siblings(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x)

    model = Siblings()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "a": {"forward": square, "backward": square},
        "b": {"forward": square, "backward": square},
    }


def test_branch_cut_off_by_detach_has_no_backward() -> None:
    class Cut(Branches):
        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x).detach()

    model = Cut()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "a": {"forward": square, "backward": square},
        "b": {"forward": square},
    }


def test_in_place_operators_on_module_outputs() -> None:
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


def test_views_and_copies_into_slices() -> None:
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


def test_embedding() -> None:
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 7, bias=False))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    profile = profile_of(train, model, tokens, model=model)
    assert work_of(profile) == {"1": {"forward": 6 * 5 * 7, "backward": 2 * 6 * 5 * 7}}
    assert "aten.embedding_dense_backward.default" in {op.op for op in profile.node("0").ops}


def test_frozen_layers() -> None:
    model = plain(3, 5, 7, 11)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    assert work(train, model, rows(2, 3), model=model) == {
        "0": {"forward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 5 * 7},  # its weight's alone
        "2": {"forward": 2 * 7 * 11, "backward": 2 * 7 * 11},  # its input's alone
    }


class LoRA(nn.Module):
    """A frozen layer and, beside it, a product of rank 2 that is trained."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.base = nn.Linear(n_in, n_out, bias=False).requires_grad_(False)
        self.down = nn.Linear(n_in, 2, bias=False)
        self.up = nn.Linear(2, n_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_lora() -> None:
    model = nn.Sequential(LoRA(5, 7), LoRA(7, 11))
    base, down, up = 3 * 7 * 11, 3 * 7 * 2, 3 * 2 * 11
    assert work(train, model, rows(3, 5), model=model) == {
        "0.base": {"forward": 3 * 5 * 7},
        "0.down": {"forward": 3 * 5 * 2, "backward": 3 * 5 * 2},
        "0.up": {"forward": 3 * 2 * 7, "backward": 2 * 3 * 2 * 7},
        "1.base": {"forward": base, "backward": base},  # gradients pass, none stays
        "1.down": {"forward": down, "backward": 2 * down},
        "1.up": {"forward": up, "backward": 2 * up},
    }


def test_keyword_arguments_and_dataclass_outputs() -> None:
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
    """x @ w, whose backward takes one product more than it needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        _ = x @ w
        return grad @ w.t(), x.t() @ grad


def test_custom_autograd_function() -> None:
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


def test_modules_called_through_other_methods() -> None:
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


def test_recursion() -> None:
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


class Fragile(nn.Module):
    def __init__(self, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5, bias=False)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise self.error("no")


def test_exception_caught_inside_a_model() -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Fragile()
            self.good = nn.Linear(5, 7, bias=False)
            self.w = nn.Parameter(torch.randn(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            try:
                x = self.bad(x)
            except ValueError:
                x = x @ self.w
            return self.good(x)

    model = Catching()
    square = 2 * 5 * 5
    assert work(train, model, rows(2, 5), model=model) == {
        "": {"forward": square, "backward": square},
        "bad.inner": {"forward": square},
        "good": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_out_of_a_layer_and_another_call(error: type[BaseException]) -> None:
    model = nn.ModuleDict({"bad": nn.Sequential(Fragile(error)), "good": plain(3, 5)})

    def call() -> None:
        with pytest.raises(error):
            model["bad"](rows(2, 5))
        train(model["good"], rows(2, 3))

    assert work(call, model=model) == {
        "bad.0.inner": {"forward": 2 * 5 * 5},
        "good.0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
    }


def test_work_after_an_exception_is_outside_the_layer_that_raised() -> None:
    model, w = Fragile(), rows(5, 7)

    def call() -> None:
        with pytest.raises(ValueError, match="no"):
            model(rows(2, 5))
        _ = rows(2, 5) @ w

    assert work(call, model=model) == {
        "inner": {"forward": 2 * 5 * 5},
        "<outside>": {"forward": 2 * 5 * 7},
    }


def test_module_met_twice_under_two_names_of_one_parent() -> None:
    """Two names, one parent: the first of them is the module's."""
    layer = nn.Linear(5, 5, bias=False)
    model = nn.Sequential(layer, layer)
    profile = profile_of(train, model, rows(2, 5), model=model)
    assert sum(w["forward"] for w in work_of(profile).values()) == 2 * 2 * 5 * 5
    assert profile.total_params == 5 * 5


def test_generator_inside_a_module() -> None:
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


def test_copied_model_has_its_own_name() -> None:
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


def test_hooks_of_the_user_count_where_they_run() -> None:
    """A tensor hook's work belongs to the module whose node it hangs on."""
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
