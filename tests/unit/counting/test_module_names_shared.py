"""Modules that several parents hold: names, parameters and calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode, Profile, profile_model
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.errors import InconsistentProfileError
from dispatch_flops.profile import ModuleNode
from tests.helpers.profiling import profile_of

LINEAR = 8 * 9 + 9


def square(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size) for size in sizes))


def parameters_of(model: nn.Module) -> dict[str, int]:
    """Return ``{fqn: elements of the distinct parameters at or below it}`` as torch counts them."""
    return {
        fqn: sum(parameter.numel() for parameter in module.parameters())
        for fqn, module in model.named_modules()
    }


def profiled(model: nn.Module, *inputs: Tensor) -> Profile:
    return profile_of(model, *inputs, model=model)


class Features(nn.Module):
    """Model that calls the first layer of its backbone by another name."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
        self.stem = self.backbone[0]
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.head(self.stem(x).relu()))


def test_shared_module_has_the_name_that_named_modules_gives() -> None:
    model = Features()
    profile = profiled(model, torch.ones(2, 8))
    assert [name for name in parameters_of(model) if profile.node(name).fqn != name] == []
    assert profile.node("backbone").total_params == (8 * 16 + 16) + (16 * 10 + 10) == 314
    assert profile.node("backbone.0").calls == 0
    assert profile.node("stem").calls == 1
    assert profile.node("stem").own("forward").macs == 2 * 8 * 16
    assert [child.fqn for child in profile.root.children] == ["backbone", "stem", "head"]
    assert profile.total_params == 314 + (16 * 3 + 3)
    assert profile.uncalled_modules() == ["backbone.1", "backbone.2"]


class First(nn.Module):
    """Model that holds the first layer of its encoder, and then the encoder."""

    def __init__(self, encoder: nn.Sequential) -> None:
        super().__init__()
        self.first = encoder[0]
        self.enc = encoder

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.enc(x))


def test_parameters_of_a_shared_child_count_for_every_parent() -> None:
    model = First(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    with FlopCounterMode(model, display=False) as idle:
        pass
    profile = profiled(model, torch.ones(2, 8))
    for found in (idle.profile, profile):
        assert found.node("enc").total_params == (8 * 8 + 8) + (8 * 3 + 3)
        assert found.total_params == (8 * 8 + 8) + (8 * 3 + 3)
    assert idle.profile.node("enc").active_params == 0
    assert profile.node("enc").active_params == (8 * 8 + 8) + (8 * 3 + 3)
    assert profile.node("first").active_params == 8 * 8 + 8


def test_module_called_by_another_name_is_not_uncalled() -> None:
    model = First(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    with FlopCounterMode(model, display=False) as idle:
        pass
    assert idle.profile.uncalled_modules() == ["first", "enc.1"]
    profile = profiled(model, torch.ones(2, 8))
    assert (profile.node("first").calls, profile.node("enc.0").calls) == (0, 1)
    assert profile.uncalled_modules() == []
    again = Profile.from_json(profile.to_json())
    assert (again.ran_elsewhere, again.uncalled_modules()) == (("first",), [])


class Deep(nn.Module):
    """Model with a layer two levels down, which a list holds as well."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Sequential(nn.Linear(8, 9)))
        self.b = nn.ModuleList([self.a[0]])

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.a(x))


def test_list_of_shared_modules_has_their_parameters() -> None:
    profile = profiled(Deep(), torch.ones(2, 8))
    found = {fqn: profile.node(fqn) for fqn in ("", "a", "a.0", "b")}
    assert {fqn: node.total_params for fqn, node in found.items()} == dict.fromkeys(found, LINEAR)
    assert {fqn: node.active_params for fqn, node in found.items()} == dict.fromkeys(found, LINEAR)


def test_list_of_experts_with_a_shared_one_has_its_parameters() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            experts = [nn.Linear(12, 15) for _ in range(6)]
            self.shared = experts[0]
            self.experts = nn.ModuleList(experts)

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.shared(x) + self.experts[1](x))

    profile = profiled(Mixture(), torch.ones(2, 12))
    assert profile.node("experts").total_params == 6 * (12 * 15 + 15) == 1170
    assert profile.node("experts").active_params == 2 * (12 * 15 + 15)
    assert profile.node("shared").total_params == 12 * 15 + 15
    assert profile.total_params == 6 * (12 * 15 + 15)


class Circle(nn.Module):
    """Model with a cycle: a grandchild holds the child above it."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = square(8)
        self.outer.inner = square(9)
        self.outer.inner.back = self.outer
        self.tail = square(10)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.outer[0](x))


@pytest.mark.parametrize("model", [Features(), Deep(), Circle()])
def test_total_params_equal_those_of_torch_for_every_module(model: nn.Module) -> None:
    profile = profiled(model, torch.ones(2, 8))
    found = {fqn: profile.node(fqn).total_params for fqn in parameters_of(model)}
    assert found == parameters_of(model)


def _chain(modules: Iterable[nn.Module]) -> nn.Module:
    above = nn.Module()
    top = above
    for module in modules:
        above.below = module
        above = module
    return top


def test_deep_model_with_all_levels_shared_is_counted_in_time() -> None:
    depth = 500  # following every path through shared levels would never end
    levels = [square(1) for _ in range(depth)]
    model = nn.Module()
    model.registry = nn.ModuleList(reversed(levels))
    model.chain = _chain(levels)
    with FlopCounterMode(model, display=False) as counter:
        pass
    profile = counter.profile
    assert profile.node("registry.0").total_params == 2
    assert profile.node("chain").total_params == profile.total_params == depth * 2


# -- TorchScript's modules --------------------------------------------------------------------


def scripted() -> torch.jit.ScriptModule:
    return torch.jit.script(nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5)).eval())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_module_that_was_not_given_is_counted() -> None:
    model = scripted()
    with FlopCounterMode(display=False) as counter:
        found = model(torch.ones(6, 7))
    assert found.shape == (6, 5)
    assert counter.profile.total("forward").macs == 6 * 7 * 5


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_frozen_scripted_module_is_counted() -> None:
    """It has no attribute ``training``."""
    model = torch.jit.freeze(scripted())
    profile = profiled(model, torch.ones(6, 7))
    assert profile.total("forward").macs == 6 * 7 * 5
    assert profile.run.training is False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ignore_modules_accepts_parts_of_a_scripted_module() -> None:
    profile = profile_model(scripted(), (6, 7), ignore_modules=[nn.LayerNorm])
    assert profile.total("forward").macs == 6 * 7 * 5


# -- torch.compile's wrappers -----------------------------------------------------------------


def test_module_held_with_its_compiled_wrapper_counts_once() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Linear(8, 9)
            self.fast = torch.compile(self.plain, backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.fast(x))

    profile = profiled(Both(), torch.ones(2, 8))
    assert profile.node("plain").total_params == profile.node("fast").total_params == LINEAR
    assert profile.total_params == profile.root.active_params == LINEAR
    assert profile.uncalled_modules() == []
    assert (profile.node("plain").calls, profile.node("fast").calls) == (0, 1)


def test_compiled_wrapper_that_several_parents_hold_is_called_once_a_call() -> None:
    fast = torch.compile(nn.Linear(8, 8), backend="eager")
    model = nn.Sequential(nn.Sequential(fast), nn.Sequential(fast, fast))
    profile = profiled(model, torch.ones(2, 8))
    assert (profile.node("0.0").calls, profile.node("1.0").calls) == (1, 2)


# -- Profile.check() -------------------------------------------------------------------------


def test_check_accepts_only_as_many_parameters_as_other_modules_hold() -> None:
    first = ModuleNode(fqn="first", class_name="Linear", own_params=72, total_params=72)
    enc = ModuleNode(fqn="enc", class_name="Sequential", total_params=72)
    root = ModuleNode(fqn="", class_name="Net", total_params=72, children=(first, enc))
    assert Profile(root=root).check().node("enc").total_params == 72
    enc = dataclasses.replace(enc, total_params=73)
    root = dataclasses.replace(root, total_params=73, children=(first, enc))
    with pytest.raises(InconsistentProfileError, match="total_params = 73"):
        Profile(root=root).check()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_model_is_traced_within_the_block_as_outside() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    x = torch.ones(2, 7)
    with FlopCounterMode(display=False) as counter:
        traced = torch.jit.trace(model, x)  # raises where two traces differ
    assert torch.equal(traced(x), model(x))
    assert counter.profile.total_params == 7 * 5 + 5 + 5 * 3 + 3


def test_module_at_the_address_of_one_that_is_gone_does_not_share_its_name() -> None:
    child = nn.Linear(2, 2)
    inner = nn.Sequential(child)
    model = nn.Sequential(inner)
    names = ModuleNames([model])
    gone, address = names.by_fqn["0.0"], id(child)
    del inner[0], child
    new = nn.Linear(2, 2)
    names._by_id[id(new)] = names._by_id.pop(address)  # as if the new one were where it was
    inner.append(new)
    model.append(nn.Sequential(inner))
    names.find(model[1], names.roots)
    assert names.by_fqn["0"].is_shared
    assert not gone.is_shared


def test_module_that_joins_a_shared_one_in_the_block_is_shared() -> None:
    shared = nn.Sequential(nn.Linear(3, 3, bias=False))
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    with FlopCounterMode(model, display=False) as counter:
        shared.append(nn.Linear(3, 3, bias=False))
        model(torch.ones(2, 3))
    macs = {fqn: cost.macs for fqn, cost in counter.profile.by_module().items()}
    assert macs["0"] == macs["1"] == 2 * 2 * 3 * 3
    assert macs["0.0.1"] == macs["1.0.1"] == 2 * 3 * 3


class Integrated(nn.Module):
    """Model that calls a part of it through a module that each forward makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(3, 5, bias=False))
        self.head = nn.Linear(5, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        solver = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Sequential(self.part))
        return cast(Tensor, self.head(solver(x)))


def test_part_that_is_called_through_a_module_made_in_forward_keeps_its_name() -> None:
    profile = profiled(Integrated(), torch.ones(2, 3))
    macs = {fqn: cost.macs for fqn, cost in profile.by_module("forward").items()}
    assert macs["part"] == macs["part.0"] == 2 * 3 * 5
    assert macs["<Sequential>"] == macs["<Sequential>.0"] == 2 * 3 * 3
    assert macs["head"] == 2 * 5 * 7
    assert macs[""] == 2 * 3 * 5 + 2 * 3 * 3 + 2 * 5 * 7


def test_part_that_is_called_through_a_module_outside_the_model_keeps_its_name() -> None:
    model = Integrated()
    with FlopCounterMode(model, display=False) as counter:
        nn.Sequential(model.part, nn.Linear(5, 11, bias=False))(torch.ones(2, 3))
    macs = {fqn: cost.macs for fqn, cost in counter.profile.by_module().items()}
    assert macs["part"] == macs["part.0"] == macs[""] == 2 * 3 * 5
    assert counter.profile.total().macs == 2 * 3 * 5 + 2 * 5 * 11


def test_module_below_a_further_name_of_a_shared_one_keeps_its_name_outside_the_model() -> None:
    shared = nn.Sequential(nn.Linear(3, 3, bias=False))
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    with FlopCounterMode(model, display=False) as counter:
        joined = nn.Linear(3, 5, bias=False)
        shared.append(joined)
        model[1](torch.ones(2, 3))
        nn.Sequential(joined)(torch.ones(7, 3))
    macs = {fqn: cost.macs for fqn, cost in counter.profile.by_module().items()}
    assert macs["1.0.1"] == (2 + 7) * 3 * 5
    assert macs[""] == 2 * 3 * 3 + (2 + 7) * 3 * 5


def test_part_that_forward_wraps_anew_has_one_name_with_its_wrapper() -> None:
    class Wrapping(Integrated):
        def forward(self, x: Tensor) -> Tensor:
            part = torch.compile(self.part, backend="eager")
            return cast(Tensor, self.head(part(x)))

    profile = profiled(Wrapping(), torch.ones(2, 3))
    assert [node.fqn for node in profile.root.walk()] == ["", "part", "part.0", "head"]
    assert (profile.node("part").calls, profile.node("part").total().macs) == (1, 2 * 3 * 5)
