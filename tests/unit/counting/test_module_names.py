"""Tree of modules: names, calls and parameters, and that costs add up."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode, Profile
from dispatch_flops.profile import add_costs
from dispatch_flops.profile.cost import PHASES
from tests.helpers.attributing import plain, rows, train, work_of
from tests.helpers.profiling import profile_of


def fqns(profile: Profile) -> list[str]:
    return [node.fqn for node in profile.root.walk()]


def calls(profile: Profile) -> dict[str, int]:
    return {node.fqn: node.calls for node in profile.root.walk() if node.calls}


def check_sums(profile: Profile) -> None:
    """Check that totals are own costs plus those of children, and sum to the profile's total."""
    for node in profile.nodes():
        for phase in PHASES:
            parts = [node.own(phase), *(child.total(phase) for child in node.children)]
            assert node.total(phase) == add_costs(parts)
    assert profile.total() == add_costs(node.own() for node in profile.nodes())


class Parts(nn.Module):
    """Model with every container class of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False)])
        self.named = nn.ModuleDict({"a": nn.Linear(7, 11, bias=False), "b": nn.Linear(2, 2)})
        self.weights = nn.ParameterList([torch.randn(11, 13), torch.randn(2, 2)])
        self.scales = nn.ParameterDict({"s": nn.Parameter(torch.randn(13))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.named["a"](self.items[1](self.items[0](x)))
        return x @ self.weights[0] * self.scales["s"]


def test_module_names_of_containers_are_those_of_named_modules() -> None:
    model = Parts()
    profile = profile_of(train, model, rows(2, 3), model=model)
    check_sums(profile)
    assert fqns(profile) == [name for name, _ in model.named_modules()]
    assert work_of(profile)[""] == {"forward": 2 * 11 * 13, "backward": 2 * 2 * 11 * 13}
    assert profile.uncalled_modules() == ["named.b"]
    root = profile.root
    used = 3 * 5 + 5 * 7 + 7 * 11 + 11 * 13 + 13
    assert (root.active_params, root.total_params) == (used, used + (2 * 2 + 2) + 2 * 2)
    assert profile.node("weights").total_params == 11 * 13 + 2 * 2
    assert profile.node("weights").active_params == 11 * 13


def test_tied_parameters_are_counted_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 5)
            self.head = nn.Linear(5, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model = Tied()
    profile = profile_of(model, torch.tensor([[1, 2, 3]]), model=model)
    assert (profile.total_params, profile.root.active_params) == (11 * 5, 11 * 5)
    assert [child.total_params for child in profile.root.children] == [11 * 5, 11 * 5]


def test_frozen_parameters_are_not_trainable() -> None:
    model = plain(3, 5, 7)
    model[0].requires_grad_(False)
    profile = profile_of(model, rows(2, 3), model=model)
    assert (profile.root.trainable_params, profile.total_params) == (5 * 7, 3 * 5 + 5 * 7)


def test_lazy_modules_have_no_parameters_before_their_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(5, bias=False), nn.LazyLinear(7, bias=False))
    before = profile_of(lambda: None, model=model)
    assert (before.total_params, before.uncalled_modules()) == (0, ["0", "1"])
    profile = profile_of(train, model, rows(2, 3), model=model)
    assert work_of(profile)["0"]["forward"] == 2 * 3 * 5
    assert profile.total_params == 3 * 5 + 5 * 7
    assert profile.node("0").class_name == "Linear"


def test_module_made_in_forward_is_named_below_its_caller() -> None:
    class Maker(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[nn.Module] = []

        def forward(self, x: Tensor) -> Tensor:
            x = nn.Linear(3, 5, bias=False)(x)
            if not hasattr(self, "late"):
                self.late = plain(5, 7)
            return self.late(x)

    model = Maker()

    def twice() -> None:
        train(model, rows(2, 3))
        train(model, rows(2, 3))

    profile = profile_of(twice, model=model)
    assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
        "<Linear>": 2 * 2 * 3 * 5,
        "late.0": 2 * 2 * 5 * 7,
    }
    check_sums(profile)


def test_module_that_is_back_after_another_took_its_place_has_its_parameters() -> None:
    model = plain(3, 5, 7)

    def replace_for_a_call() -> None:
        first, model[0] = model[0], nn.Linear(3, 5, bias=False)
        train(model, rows(2, 3))
        model[0] = first

    profile = profile_of(replace_for_a_call, model=model)
    model[0] = nn.Identity()
    assert work_of(profile)["0"]["forward"] == 2 * 3 * 5
    assert (profile.node("0").own_params, profile.node("0").active_params) == (3 * 5, 0)
    assert (profile.total_params, profile.root.active_params) == (3 * 5 + 5 * 7, 5 * 7)


def test_parameters_of_a_module_that_is_back_below_its_wrapper_count_once() -> None:
    model = plain(3, 5, 7)

    def wrap_for_a_call() -> None:
        first, model[0] = model[0], nn.Sequential(model[0])
        train(model, rows(2, 3))
        model[0] = first

    profile = profile_of(wrap_for_a_call, model=model)
    assert work_of(profile)["0.0"]["forward"] == 2 * 3 * 5
    assert profile.total_params == profile.root.active_params == 3 * 5 + 5 * 7


def test_several_models_are_named_by_class_and_number() -> None:
    generator, critic = plain(3, 5), plain(5, 7)
    with FlopCounterMode([generator, critic], display=False) as counter:
        train(lambda z: critic(generator(z)), rows(2, 3))
    profile = counter.profile
    check_sums(profile)
    assert work_of(profile) == {
        "Sequential.0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "Sequential_2.0": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }
    assert profile.total_params == 3 * 5 + 5 * 7
    assert profile.root.total("forward").macs == 2 * 3 * 5 + 2 * 5 * 7


def test_part_shared_by_two_models_is_named_below_each() -> None:
    trunk = plain(3, 5)
    a, b = nn.Sequential(trunk, *plain(5, 7)), nn.Sequential(trunk, *plain(5, 11))
    with FlopCounterMode([a, b], display=False) as counter:
        a(rows(2, 3))
        b(rows(2, 3))
        b(rows(2, 3))
    profile = counter.profile
    forward = {fqn: w["forward"] for fqn, w in work_of(profile).items()}
    assert forward == {
        "Sequential.0.0": 2 * 3 * 5, "Sequential.1": 2 * 5 * 7,
        "Sequential_2.0.0": 2 * 2 * 3 * 5, "Sequential_2.1": 2 * 2 * 5 * 11,
    }  # fmt: skip
    assert profile.total_params == 3 * 5 + 5 * 7 + 5 * 11


def test_model_given_with_one_of_its_parts_is_counted_once() -> None:
    model = plain(3, 5, 7)
    with FlopCounterMode([model, model[1]], display=False) as counter:
        model(rows(2, 3))
    assert counter.profile.total().macs == 2 * 3 * 5 + 2 * 5 * 7


def test_called_model_is_the_root_if_none_was_given() -> None:
    model = plain(3, 5, 7)
    profile = profile_of(train, model, rows(2, 3))
    assert work_of(profile) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }
    assert (profile.root.class_name, profile.root.calls) == ("Sequential", 1)


def test_two_called_models_are_roots_if_none_was_given() -> None:
    first, second = plain(3, 5), nn.Linear(5, 7, bias=False)
    profile = profile_of(lambda: second(first(rows(2, 3))))
    assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
        "Sequential.0": 2 * 3 * 5,
        "Linear": 2 * 5 * 7,
    }


def test_operators_without_a_module_are_outside() -> None:
    w = rows(3, 5)
    profile = profile_of(lambda: rows(2, 3) @ w)
    assert work_of(profile) == {"<outside>": {"forward": 2 * 3 * 5}}
    assert (profile.root.calls, profile.total_params) == (0, 0)


def test_model_that_was_not_given_is_outside() -> None:
    model, teacher = plain(3, 5), plain(3, 7)
    profile = profile_of(lambda: (model(rows(2, 3)), teacher(rows(2, 3))), model=model)
    assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
        "0": 2 * 3 * 5,
        "<outside>.Sequential.0": 2 * 3 * 7,
    }
    assert profile.total_params == 3 * 5


def test_replaced_module_keeps_the_name_and_adds_parameters() -> None:
    model = plain(3, 5, 7)

    def call() -> None:
        model(rows(2, 3))
        model[1] = nn.Linear(5, 11, bias=False)
        model(rows(2, 3))

    profile = profile_of(call, model=model)
    assert work_of(profile)["1"] == {"forward": 2 * 5 * 7 + 2 * 5 * 11}
    assert profile.node("1").calls == 2
    assert profile.total_params == 3 * 5 + 5 * 11


@pytest.mark.parametrize(("calls", "later"), [(1, 1), (3, 3), (3, 0)])
def test_module_that_moves_gets_the_name_of_its_new_place(calls: int, later: int) -> None:
    """Another takes its place: what ran there keeps that name."""
    model = nn.Sequential(plain(3, 5, 7), plain(7, 11))
    moved = model[0]

    def call() -> None:
        for _ in range(calls):
            model(rows(2, 3))
        model[0] = plain(3, 7)
        model.append(plain(11, 3))
        model.append(moved)
        for _ in range(later):
            model(rows(2, 3))

    profile = profile_of(call, model=model)
    macs = {fqn: profile.node(fqn).total().macs for fqn in ("0.0", "0.1", "3.0", "3.1")}
    assert macs == {
        "0.0": calls * 2 * 3 * 5 + later * 2 * 3 * 7, "0.1": calls * 2 * 5 * 7,
        "3.0": later * 2 * 3 * 5, "3.1": later * 2 * 5 * 7,
    }  # fmt: skip
    held = {fqn: profile.node(fqn).total_params for fqn in ("", "3", "3.0", "3.1")}
    assert held == {
        "": 3 * 7 + 7 * 11 + 11 * 3 + 3 * 5 + 5 * 7, "3": 3 * 5 + 5 * 7, "3.0": 3 * 5, "3.1": 5 * 7
    }  # fmt: skip
    check_sums(profile)


def test_parameters_are_those_that_the_model_holds_at_the_end() -> None:
    model = plain(3, 5, 7)

    def call() -> None:
        model(rows(2, 3))
        model[1] = nn.Linear(5, 11, bias=False)
        model.append(nn.Sequential(nn.Linear(11, 13, bias=False)))

    profile = profile_of(call, model=model)
    assert work_of(profile)["1"] == {"forward": 2 * 5 * 7}
    held = {node.fqn: node.total_params for node in profile.root.walk()}
    assert held == {
        "": 3 * 5 + 5 * 11 + 11 * 13, "0": 3 * 5, "1": 5 * 11, "2": 11 * 13, "2.0": 11 * 13
    }  # fmt: skip
    check_sums(profile)


@pytest.mark.parametrize("calls", [1, 2])
def test_module_that_was_put_into_another_has_a_name_below_it(calls: int) -> None:
    model = nn.Sequential(plain(3, 5, 7))

    def call() -> None:
        model(rows(2, 3))
        model[0] = nn.Sequential(model[0], nn.Linear(7, 11, bias=False))
        for _ in range(1, calls):
            model(rows(2, 3))

    profile = profile_of(call, model=model)
    assert profile.total_params == 3 * 5 + 5 * 7 + 7 * 11
    inner = profile.node("0.0")
    assert (inner.class_name, inner.own_params, inner.total_params) == (
        "Sequential", 0, 3 * 5 + 5 * 7
    )  # fmt: skip
    check_sums(profile)


def test_added_module_is_named_when_it_is_called() -> None:
    model = plain(3, 5)

    def call() -> None:
        model(rows(2, 3))
        model.append(nn.Sequential(nn.Linear(5, 7, bias=False)))
        model(rows(2, 3))

    profile = profile_of(call, model=model)
    assert work_of(profile)["1.0"] == {"forward": 2 * 5 * 7}
    check_sums(profile)


def test_compiled_wrapper_shares_the_name_of_its_module() -> None:
    model = nn.Sequential(plain(3, 5), nn.Linear(5, 7, bias=False))
    model[0] = torch.compile(model[0], backend="eager")
    whole = torch.compile(model, backend="eager")
    for given, called in ((whole, whole), (model, whole), (model, model), (whole, model)):
        profile = profile_of(train, called, rows(2, 3), model=given)
        assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
            "0.0": 2 * 3 * 5,
            "1": 2 * 5 * 7,
        }
        assert fqns(profile) == ["", "0", "0.0", "1"]
        assert calls(profile) == {"": 1, "0": 1, "0.0": 1, "1": 1}


# -- size --------------------------------------------------------------------------------------


class Shell(nn.Module):
    """Module around a module; the outermost one calls the innermost one directly."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        module = self.inner
        while isinstance(module, Shell):
            module = module.inner
        return module(x)


def deep(levels: int) -> tuple[nn.Module, nn.Module]:
    """Return ``levels`` shells around a layer, and that layer."""
    leaf = top = nn.Linear(3, 5, bias=False)
    for _ in range(levels):
        top = Shell(top)
    return top, leaf


def wide(children: int) -> tuple[nn.Module, nn.Module]:
    """Return a list of ``children`` modules and one more, and the last one."""
    items = nn.ModuleList(nn.Linear(3, 5, bias=False, device="meta") for _ in range(children))
    items.append(leaf := nn.Linear(3, 5, bias=False))
    return items, leaf


@pytest.mark.slow
@pytest.mark.parametrize(("build", "size"), [(deep, 2000), (wide, 10_000)])
def test_deep_and_wide_models_are_profiled_without_recursion(
    build: Callable[[int], tuple[nn.Module, nn.Module]], size: int
) -> None:
    model, leaf = build(size)
    profile = profile_of(leaf, rows(2, 3), model=model)
    assert len(fqns(profile)) == size + 1 + (build is wide)
    assert profile.root.total("forward").macs == 2 * 3 * 5
    assert len(profile.uncalled_modules()) == (size if build is wide else 0)
    assert Profile.from_json(profile.to_json()).root.total() == profile.root.total()


def test_module_replaced_deep_in_a_model_is_named() -> None:
    model, leaf = deep(2000)
    shell = model
    while shell.inner is not leaf:
        shell = shell.inner

    def call() -> None:
        shell.inner = nn.Linear(3, 7, bias=False)
        model(rows(2, 3))

    profile = profile_of(call, model=model)
    assert work_of(profile) == {".".join(["inner"] * 2000): {"forward": 2 * 3 * 7}}
    assert profile.total_params == 3 * 7


def events(fn: Callable[[], Any]) -> int:
    """Return the number of Python and C functions that ``fn()`` calls."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("build", [deep, wide])
def test_entering_a_counter_takes_linear_time_in_the_modules(
    build: Callable[[int], tuple[nn.Module, nn.Module]],
) -> None:
    def enter(model: nn.Module) -> None:
        with FlopCounterMode(model, display=False):
            pass

    nothing = events(lambda: enter(nn.Identity()))
    small, large = (events(partial(enter, build(n)[0])) - nothing for n in (400, 800))
    assert 1.8 < large / small < 2.2


def test_profile_within_the_block_holds_all_calls_so_far() -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        seen = []
        for _ in range(3):
            model(rows(2, 3))
            seen.append((counter.profile.total().macs, counter.profile.root.calls))
    assert seen == [(2 * 3 * 5 * n, n) for n in (1, 2, 3)]
    assert counter.profile.total().macs == 3 * 2 * 3 * 5


class OddNames(nn.Module):
    """Children whose names are the outside's, nothing, and a path to another module."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("<outside>", nn.Linear(3, 5, bias=False))
        self.sub = nn.Sequential(nn.Linear(3, 7, bias=False))
        self._modules[""] = nn.Linear(3, 11, bias=False)
        self.sub._modules[""] = nn.Linear(3, 13, bias=False)
        self._modules["sub.0"] = nn.Linear(3, 17, bias=False)

    def forward(self, x: Tensor) -> None:
        for module in [*self._modules.values(), *self.sub._modules.values()]:
            if module is not self.sub and module is not None:
                module(x)


def test_module_with_a_reserved_or_empty_name_is_counted_under_another() -> None:
    model = OddNames()
    profile = profile_of(model, rows(2, 3), model=model)
    assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
        "<module> <outside>": 2 * 3 * 5,
        "sub.0": 2 * 3 * 7,
        "<unnamed>": 2 * 3 * 11,
        "sub.<unnamed>": 2 * 3 * 13,
        "sub.0_2": 2 * 3 * 17,
    }
    assert profile.total_params == 3 * (5 + 7 + 11 + 13 + 17)


@pytest.mark.slow
def test_counter_without_a_model_forgets_modules_that_are_gone() -> None:
    with FlopCounterMode(display=False) as counter:
        for _ in range(50):
            plain(3, 5)(rows(2, 3))
        gc.collect()
        known = counter._active["session"]._names._by_id
        assert len(known) == 0
    assert counter.get_total_macs() == 50 * 2 * 3 * 5


def test_submodules_that_are_gone_are_not_remembered_in_any_thread() -> None:
    model: Any = nn.Sequential(plain(3, 5))
    with FlopCounterMode(model, display=False) as counter:
        others = [nn.Sequential(plain(3, 5)) for _ in range(50)]
        for other in others:
            other(rows(2, 3))
        model(rows(2, 3))
        del other, others
        gc.collect()
        [remembered] = counter._active["session"]._names.remembered_in
        assert set(remembered) == {id(module) for module in (model[0], model[0][0])}
    assert counter.get_total_macs() == 51 * 2 * 3 * 5
