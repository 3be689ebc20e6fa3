"""Plans and prices that outlast a counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dispatch_flops import (
    FlopCounterMode,
    OpCost,
    UncountedWarning,
    register_flops,
    unregister_flops,
)
from dispatch_flops.counting import dispatch_mode, plans
from dispatch_flops.counting.dispatch_mode import CountingMode
from dispatch_flops.counting.plans import SHARED_PLANS
from dispatch_flops.operators import registry
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.registry import Rule
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("no_plans")
M, K, N = 3, 5, 7
MACS = M * K * N


@pytest.fixture
def unpriced(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function from whose call on no operator may be priced."""

    def refuse(name: str, *_: Any, **__: Any) -> Any:
        raise AssertionError(f"{name} is priced again")

    return lambda: monkeypatch.setattr(dispatch_mode, "cost_of_call", refuse)


def product(m: int = M, **options: Any) -> FlopCounterMode:
    with FlopCounterMode(display=False, **options) as counter:
        torch.ones(m, K) @ torch.ones(K, N)
    return counter


def shared_costs() -> int:
    return sum(len(plan.calls.by_signature) for plan in SHARED_PLANS._plans.values())


@pytest.mark.parametrize("options", [{}, {"latency": True}])
def test_second_counter_prices_nothing_that_the_first_priced(
    unpriced: Any, options: dict[str, Any]
) -> None:
    product(**options)  # calibrates
    SHARED_PLANS.rules_changed()
    first = product().get_total_macs()
    unpriced()
    assert product(**options).get_total_macs() == first == MACS
    with pytest.raises(AssertionError, match="priced again"):
        product(M + 1)


def test_shared_plans_are_dropped_when_a_formula_changes() -> None:
    assert product().get_total_flops() == 2 * MACS

    @register_flops(aten.mm, override=True)
    def eleven(a: Any, b: Any, *, out: Any, **_: Any) -> int:
        return 11

    try:
        assert product().get_total_flops() == 11
    finally:
        unregister_flops(aten.mm)
    assert product().get_total_flops() == 2 * MACS


def test_plan_made_while_a_formula_changes_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    make = CountingMode._make_plan

    def make_meanwhile(mode: CountingMode, func: Any) -> plans.Plan:
        plan = make(mode, func)
        if func is aten.mm.default:
            registry._notify_readers()
        return plan

    monkeypatch.setattr(CountingMode, "_make_plan", make_meanwhile)
    assert product().get_total_macs() == MACS
    assert not [plan for plan in SHARED_PLANS._plans.values() if plan.func is aten.mm.default]


def test_plan_of_an_operator_that_runs_elsewhere_is_made_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FlopCounterMode(display=False) as counter:
        mode = counter._active["session"]._mode
        rule = mode.rule_of(aten.mm.default)
        monkeypatch.delattr(CountingMode, "_decide")
        assert mode.rule_of(aten.mm.default) is rule


def test_conventions_do_not_share_costs() -> None:
    def run(**options: Any) -> int:
        with FlopCounterMode(display=False, **options) as counter:
            torch.nn.functional.gelu(torch.ones(M))
        return counter.get_total_flops()

    assert run() > 0
    assert run(flops="contractions") == 0
    assert run() > 0


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.float64, 8)])
def test_costs_are_those_of_the_default_dtype(dtype: torch.dtype, size: int) -> None:
    """That of the result of integers divided, and the one in which they are compared with 0.5."""
    numbers = torch.arange(6)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype is torch.float32 else torch.float32)
    try:
        profile_of(lambda: (numbers / 2, numbers > 0.5))
        torch.set_default_dtype(dtype)
        profile = profile_of(lambda: (numbers / 2, numbers > 0.5))
    finally:
        torch.set_default_dtype(before)
    quotient, comparison = profile.by_operator().values()
    assert f"torch.{quotient.dtype}" == f"torch.{comparison.dtype}" == str(dtype)
    assert quotient.cost is not None
    assert quotient.cost.bytes_written == size * 6


def test_custom_mapping_neither_gives_nor_takes_shared_plans() -> None:
    eleven = {aten.mm: lambda *_, **__: 11}
    assert product().get_total_flops() == 2 * MACS
    assert product(custom_mapping=eleven).get_total_flops() == 11
    assert product().get_total_flops() == 2 * MACS


def test_failed_formula_is_tried_again_by_the_next_counter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def formula(a: Any, b: Any, *, out: Any, **_: Any) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise ValueError("not now")
        return 13

    monkeypatch.setitem(registry._BUILTIN, "aten::mm", Rule(kind="formula", formula=formula))
    with (
        pytest.warns(UncountedWarning, match=r"mm.default \(2 calls"),
        FlopCounterMode(display=False) as counter,
    ):
        for _ in range(2):
            torch.ones(M, K) @ torch.ones(K, N)
    assert len(tries) == 1
    assert counter.profile.uncounted_ops() == {"aten.mm.default": 2}
    assert product().get_total_flops() == 13
    assert product().get_total_flops() == 13
    assert len(tries) == 2


def test_formula_of_the_user_is_asked_by_every_counter() -> None:
    asked = []
    with torch.library._scoped_library("plans", "DEF") as library:
        library.define("mystery(Tensor x) -> Tensor")
        library.impl("mystery", torch.clone, "CompositeExplicitAutograd")

        @register_flops(torch.ops.plans.mystery)
        def mystery(x: Any, *, out: Any, **_: Any) -> int:
            asked.append(1)
            return 17

        for times in (1, 2):
            with FlopCounterMode(display=False) as counter:
                for _ in range(3):
                    torch.ops.plans.mystery(torch.ones(3))
            assert counter.get_total_flops() == 3 * 17
            assert len(asked) == times
        unregister_flops(torch.ops.plans.mystery)


def test_shared_prices_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_LIMIT", 7)
    for m in range(1, 30):
        assert product(m).get_total_macs() == m * K * N
        assert len(SHARED_PLANS._plans) <= 7
        assert shared_costs() <= 7


def test_signature_that_keeps_an_object_alive_is_not_shared() -> None:
    plan = plans.Plan(aten.mm.default, "aten.mm.default", torch.mm, None)
    cost = CallCost("aten.mm.default", "formula", cost=OpCost(macs=1))
    weights = torch.ones(1)
    assert not SHARED_PLANS.add_cost(plan, (torch.Size((3,)), lambda: weights), cost)
    assert not plan.calls.by_signature
    assert SHARED_PLANS.add_cost(plan, (torch.Size((3,)), 1.5), cost)
    assert len(plan.calls.by_signature) == 1


@pytest.mark.parametrize(
    ("signature", "is_plain"),
    [
        ((torch.Size((3, 5)), torch.float32, (int, 3), (1.5, None, "mean")), True),
        ((torch.Tensor, torch.strided, torch.device("cpu"), torch.contiguous_format), True),
        ((3, lambda: 0), False),
        (((torch.Generator(),),), False),
        ((type("Weight", (torch.Tensor,), {}), 3), False),
    ],
)
def test_is_plain_accepts_only_values(signature: Any, is_plain: bool) -> None:
    assert plans._is_plain(signature) == is_plain


def test_cost_that_depends_on_the_device_is_not_kept() -> None:
    rule = registry.lookup(aten._addmm_activation.default)
    assert rule is not None
    assert not rule.cacheable
