"""The tree of modules: names, calls, parameters, experts; and that it adds up."""

from __future__ import annotations

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
    """Every node's total is its own and its children's, and the root's is the sum of all own."""
    for node in profile.nodes():
        for phase in PHASES:
            parts = [node.own(phase), *(child.total(phase) for child in node.children)]
            assert node.total(phase) == add_costs(parts)
    assert profile.total() == add_costs(node.own() for node in profile.nodes())


class Parts(nn.Module):
    """Every container that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList([nn.Linear(3, 5, bias=False), nn.Linear(5, 7, bias=False)])
        self.named = nn.ModuleDict({"a": nn.Linear(7, 11, bias=False), "b": nn.Linear(2, 2)})
        self.weights = nn.ParameterList([torch.randn(11, 13), torch.randn(2, 2)])
        self.scales = nn.ParameterDict({"s": nn.Parameter(torch.randn(13))})

    def forward(self, x: Tensor) -> Tensor:
        x = self.named["a"](self.items[1](self.items[0](x)))
        return x @ self.weights[0] * self.scales["s"]


def test_containers() -> None:
    model = Parts()
    profile = profile_of(train, model, rows(2, 3), model=model)
    check_sums(profile)
    assert fqns(profile) == [name for name, _ in model.named_modules()]
    assert work_of(profile)[""] == {"forward": 2 * 11 * 13, "backward": 2 * 2 * 11 * 13}
    assert profile.uncalled_modules() == ["named.b", "weights", "scales"]
    root = profile.root
    used = 3 * 5 + 5 * 7 + 7 * 11 + 11 * 13 + 13
    assert (root.active_params, root.total_params) == (used, used + (2 * 2 + 2) + 2 * 2)
    assert profile.node("weights").total_params == 11 * 13 + 2 * 2
    assert profile.node("weights").active_params == 11 * 13


def test_tied_parameters_count_once() -> None:
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


def test_trainable_parameters() -> None:
    model = plain(3, 5, 7)
    model[0].requires_grad_(False)
    profile = profile_of(model, rows(2, 3), model=model)
    assert (profile.root.trainable_params, profile.total_params) == (5 * 7, 3 * 5 + 5 * 7)


def test_lazy_modules() -> None:
    model = nn.Sequential(nn.LazyLinear(5, bias=False), nn.LazyLinear(7, bias=False))
    before = profile_of(lambda: None, model=model)
    assert (before.total_params, before.uncalled_modules()) == (0, ["0", "1"])
    profile = profile_of(train, model, rows(2, 3), model=model)
    assert work_of(profile)["0"]["forward"] == 2 * 3 * 5
    assert profile.total_params == 3 * 5 + 5 * 7
    assert profile.node("0").class_name == "Linear"


def test_module_made_in_forward() -> None:
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


def test_several_models_in_one_block() -> None:
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


def test_models_that_share_a_part() -> None:
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


def test_model_and_its_own_part() -> None:
    model = plain(3, 5, 7)
    with FlopCounterMode([model, model[1]], display=False) as counter:
        model(rows(2, 3))
    assert counter.profile.total().macs == 2 * 3 * 5 + 2 * 5 * 7


def test_no_model_given_the_first_called_is_it() -> None:
    model = plain(3, 5, 7)
    profile = profile_of(train, model, rows(2, 3))
    assert work_of(profile) == {
        "0": {"forward": 2 * 3 * 5, "backward": 2 * 3 * 5},
        "1": {"forward": 2 * 5 * 7, "backward": 2 * 2 * 5 * 7},
    }
    assert (profile.root.class_name, profile.root.calls) == ("Sequential", 1)


def test_no_model_given_and_two_called() -> None:
    first, second = plain(3, 5), nn.Linear(5, 7, bias=False)
    profile = profile_of(lambda: second(first(rows(2, 3))))
    assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
        "Sequential.0": 2 * 3 * 5,
        "Linear": 2 * 5 * 7,
    }


def test_no_model_at_all() -> None:
    w = rows(3, 5)
    profile = profile_of(lambda: rows(2, 3) @ w)
    assert work_of(profile) == {"<outside>": {"forward": 2 * 3 * 5}}
    assert (profile.root.calls, profile.total_params) == (0, 0)


def test_another_model_beside_the_given_one() -> None:
    model, teacher = plain(3, 5), plain(3, 7)
    profile = profile_of(lambda: (model(rows(2, 3)), teacher(rows(2, 3))), model=model)
    assert {fqn: w["forward"] for fqn, w in work_of(profile).items()} == {
        "0": 2 * 3 * 5,
        "<outside>.Sequential.0": 2 * 3 * 7,
    }
    assert profile.total_params == 3 * 5


def test_module_replaced_between_calls() -> None:
    model = plain(3, 5, 7)

    def call() -> None:
        model(rows(2, 3))
        model[1] = nn.Linear(5, 11, bias=False)
        model(rows(2, 3))

    profile = profile_of(call, model=model)
    assert work_of(profile)["1"] == {"forward": 2 * 5 * 7 + 2 * 5 * 11}
    assert profile.node("1").calls == 2
    assert profile.total_params == 3 * 5 + 5 * 11


def test_module_added_between_calls() -> None:
    model = plain(3, 5)

    def call() -> None:
        model(rows(2, 3))
        model.append(nn.Sequential(nn.Linear(5, 7, bias=False)))
        model(rows(2, 3))

    profile = profile_of(call, model=model)
    assert work_of(profile)["1.0"] == {"forward": 2 * 5 * 7}
    check_sums(profile)


def test_compiled_wrappers_have_no_name_of_their_own() -> None:
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
    """A module in a module; the outermost calls the innermost, past all between."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        module = self.inner
        while isinstance(module, Shell):
            module = module.inner
        return module(x)


def deep(levels: int) -> tuple[nn.Module, nn.Module]:
    """``levels`` shells around a layer, and that layer."""
    leaf = top = nn.Linear(3, 5, bias=False)
    for _ in range(levels):
        top = Shell(top)
    return top, leaf


def wide(children: int) -> tuple[nn.Module, nn.Module]:
    """A list of ``children`` modules, and the last."""
    items = nn.ModuleList(nn.Linear(3, 5, bias=False, device="meta") for _ in range(children))
    items.append(leaf := nn.Linear(3, 5, bias=False))
    return items, leaf


@pytest.mark.slow
@pytest.mark.parametrize(("build", "size"), [(deep, 2000), (wide, 10_000)])
def test_deep_and_wide_models(
    build: Callable[[int], tuple[nn.Module, nn.Module]], size: int
) -> None:
    model, leaf = build(size)
    profile = profile_of(leaf, rows(2, 3), model=model)
    assert len(fqns(profile)) == size + 1 + (build is wide)
    assert profile.root.total("forward").macs == 2 * 3 * 5
    assert len(profile.uncalled_modules()) == (size if build is wide else 0)
    assert Profile.from_json(profile.to_json()).root.total() == profile.root.total()


def test_module_replaced_deep_down() -> None:
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
    """How many Python and C functions ``fn()`` calls."""
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
def test_cost_of_entering_is_linear(
    build: Callable[[int], tuple[nn.Module, nn.Module]],
) -> None:
    def enter(model: nn.Module) -> None:
        with FlopCounterMode(model, display=False):
            pass

    nothing = events(lambda: enter(nn.Identity()))
    small, large = (events(partial(enter, build(n)[0])) - nothing for n in (400, 800))
    assert 1.8 < large / small < 2.2


# -- parameters that took part -----------------------------------------------------------------


def test_attention_uses_a_projection_that_it_never_calls() -> None:
    model = nn.MultiheadAttention(6, 2, bias=False)
    x = torch.randn(3, 2, 6)
    profile = profile_of(lambda: model(x, x, x), model=model)
    assert profile.uncalled_modules() == ["out_proj"]
    assert profile.node("out_proj").active_params == 6 * 6
    assert (profile.root.active_params, profile.total_params) == (4 * 36, 4 * 36)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 7, bias=False)
        self.down = nn.Linear(7, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Mixture(nn.Module):
    """Row i goes to expert ``routes[i]``."""

    def __init__(self, experts: int, container: str = "experts") -> None:
        super().__init__()
        self.container = container
        self.add_module(container, nn.ModuleList(Expert(5) for _ in range(experts)))

    def forward(self, x: Tensor, routes: list[int]) -> Tensor:
        flat = x.reshape(-1, 5)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(getattr(self, self.container)):
            chosen = torch.tensor([row for row, route in enumerate(routes) if route == i])
            if len(chosen):
                out = out.index_add(0, chosen, expert(flat[chosen]))
        return out


def test_mixture_of_experts() -> None:
    model = Mixture(4)
    routes = [0, 2, 2, 0, 2, 3]
    profile = profile_of(train, model, torch.randn(2, 3, 5), routes, model=model)
    expert = 5 * 7 + 7 * 5
    assert (profile.root.active_params, profile.total_params) == (3 * expert, 4 * expert)
    tokens = {node.fqn: node.tokens for node in profile.root.walk() if node.tokens is not None}
    assert tokens == {"experts.0": 2, "experts.1": 0, "experts.2": 3, "experts.3": 1}
    assert profile.node("experts.2").total("forward").macs == 3 * expert
    assert profile.node("experts.1").calls == 0


def test_tokens_of_two_steps_add_up_and_recomputation_adds_none() -> None:
    from torch.utils.checkpoint import checkpoint

    model = Mixture(2)
    x = torch.randn(3, 5, requires_grad=True)

    def steps() -> None:
        for routes in ([0, 0, 1], [0, 1, 1]):
            checkpoint(model, x, routes, use_reentrant=False).sum().backward()

    profile = profile_of(steps, model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(2)] == [2 + 1, 1 + 2]
    assert profile.node("experts.0.up").own("recompute").macs == 3 * 5 * 7


def test_lists_of_other_modules_have_no_tokens() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(plain(3, 5))
    model.expertise = nn.Sequential(nn.Linear(3, 5))
    profile = profile_of(model.layers[0], rows(2, 3), model=model)
    assert all(node.tokens is None for node in profile.nodes())


def test_tokens_of_experts_called_by_keyword_and_of_compiled_ones() -> None:
    model = nn.Module()
    model.experts = nn.ModuleList(
        [Expert(5), torch.compile(Expert(5), backend="eager"), Expert(5)]  # type: ignore[list-item]
    )

    def run() -> None:
        model.experts[0](x=torch.ones(3, 5))
        model.experts[1](torch.ones(2, 5))
        model.experts[1](x=torch.ones(2, 2, 5))

    profile = profile_of(run, model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(3)] == [3, 2 + 2 * 2, 0]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::torch.jit.TracerWarning",
    "ignore::dispatch_flops.errors.UncountedWarning",  # of what has a symbol for a size
)
def test_tokens_are_counts_also_where_a_model_is_traced() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([Expert(5), Expert(5)])

        def forward(self, x: Tensor) -> Tensor:
            return self.experts[1](self.experts[0](x))  # type: ignore[no-any-return]

    model, x = Chain(), torch.ones(3, 7, 5)
    profile = profile_of(lambda: torch.jit.trace(model, x, check_trace=False), model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(2)] == [3 * 7, 3 * 7]
    rows = torch.export.Dim("rows", min=2, max=64)
    with FlopCounterMode(model, display=False) as counter:
        torch.export.export(model, (x,), dynamic_shapes=({0: rows},), strict=False)
    counter.profile.to_json()


def test_tokens_of_what_returns_no_bare_tensor() -> None:
    class Mapped(Expert):
        def forward(self, x: Tensor | None = None) -> Any:
            return {"y": super().forward(x)} if x is not None else "nothing"

    model = nn.Module()
    model.experts = nn.ModuleList([Mapped(5), Mapped(5), Mapped(5)])

    def run() -> None:
        model.experts[0](x=torch.ones(7, 5))
        model.experts[1]()

    profile = profile_of(run, model=model)
    assert [profile.node(f"experts.{i}").tokens for i in range(3)] == [7, None, 0]


def test_experts_told_by_their_class() -> None:
    model = Mixture(2, container="ffn")
    profile = profile_of(model, torch.randn(3, 5), [0, 1, 1], model=model)
    assert [profile.node(f"ffn.{i}").tokens for i in range(2)] == [1, 2]


def test_profile_inside_the_block_grows() -> None:
    model = plain(3, 5)
    with FlopCounterMode(model, display=False) as counter:
        seen = []
        for _ in range(3):
            model(rows(2, 3))
            seen.append((counter.profile.total().macs, counter.profile.root.calls))
    assert seen == [(2 * 3 * 5 * n, n) for n in (1, 2, 3)]
    assert counter.profile.total().macs == 3 * 2 * 3 * 5
