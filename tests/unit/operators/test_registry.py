"""Which formula an operator gets: keys, precedence, duplicates, scopes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode
from dispatch_flops.errors import DuplicateFormulaError, UnknownOperatorError
from dispatch_flops.operators import registry
from dispatch_flops.operators.registry import lookup, overridden, register_flops, unregister_flops
from tests.helpers.profiling import profile_of

aten = torch.ops.aten


@torch.library.custom_op("dispatch_flops_test::one", mutates_args=())
def one(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("dispatch_flops_test::two", mutates_args=())
def two(x: Tensor) -> Tensor:
    return x.clone()


ONE, TWO = torch.ops.dispatch_flops_test.one, torch.ops.dispatch_flops_test.two


def costs(flops: int) -> Any:
    return lambda *args, **kwargs: flops


@pytest.fixture(autouse=True)
def registry_unchanged() -> Iterator[None]:
    before = registry.rules()
    yield
    assert registry.rules() == before


def flops_of(op: Any) -> int:
    return profile_of(op, torch.ones(2)).total().flops


@pytest.mark.parametrize("target", [one, ONE, ONE.default], ids=["def", "packet", "overload"])
def test_register_and_unregister(target: Any) -> None:
    formula = costs(3)
    assert register_flops(target)(formula) is formula
    assert flops_of(one) == 3
    unregister_flops(target)
    assert lookup(ONE.default) is None


def test_list_of_targets() -> None:
    register_flops([one, [TWO.default]])(costs(3))
    assert (flops_of(one), flops_of(two)) == (3, 3)
    unregister_flops([one, TWO.default])


def test_duplicates_are_refused_by_name() -> None:
    register_flops(one)(costs(3))
    with pytest.raises(DuplicateFormulaError, match=r"dispatch_flops_test\.one .*override=True"):
        register_flops(ONE)(costs(5))
    assert flops_of(one) == 3
    register_flops(ONE, override=True)(costs(5))
    assert flops_of(one) == 5
    unregister_flops(one)


def test_built_in_formulas_are_not_replaced_by_accident() -> None:
    with pytest.raises(DuplicateFormulaError, match=r"aten\.mm"):
        register_flops(aten.mm)(costs(5))


def test_an_overload_of_a_built_in_is_not_replaced_by_accident() -> None:
    with pytest.raises(DuplicateFormulaError, match=r"aten\.mm"):
        register_flops(aten.mm.default)(costs(5))


def test_a_target_said_twice_is_one() -> None:
    register_flops([ONE, one, "dispatch_flops_test::one"])(costs(3))
    assert flops_of(one) == 3
    with pytest.raises(DuplicateFormulaError, match=r"dispatch_flops_test\.one"):
        register_flops("dispatch_flops_test::one")(costs(3))
    unregister_flops("dispatch_flops_test::one")
    assert lookup(ONE.default) is None


def test_a_name_stands_for_the_operator_that_is_loaded_later() -> None:
    name = "dispatch_flops_test::loaded_later"
    register_flops(name)(costs(7))
    library = torch.library.Library("dispatch_flops_test", "FRAGMENT")
    library.define("loaded_later(Tensor x) -> Tensor")
    library.impl("loaded_later", lambda x: x.clone(), "CPU")
    later = torch.ops.dispatch_flops_test.loaded_later
    assert flops_of(later) == 7
    with pytest.raises(DuplicateFormulaError, match="loaded_later"):
        register_flops(later)(costs(5))
    unregister_flops(later)
    assert lookup(later.default) is None


def test_arguments_by_their_names() -> None:
    @register_flops([ONE, TWO], by_name=True)
    def elements(*, x: torch.Tensor, out: torch.Tensor, **_: Any) -> int:
        return 2 * x.numel() + out.numel()

    assert flops_of(one) == flops_of(two) == 2 * 2 + 2
    unregister_flops([one, two])


def test_unregister_all_or_none() -> None:
    register_flops(one)(costs(3))
    with pytest.raises(UnknownOperatorError, match=r"dispatch_flops_test\.two has no formula"):
        unregister_flops([one, two])
    assert flops_of(one) == 3
    unregister_flops(one)


def test_unregister_what_is_not_there() -> None:
    with pytest.raises(UnknownOperatorError, match=r"dispatch_flops_test\.one has no formula"):
        unregister_flops(one)


@pytest.mark.parametrize("target", [len, "mm", 3, torch.mm, nn.Linear(2, 2), int, [one, len]])
def test_what_is_no_operator(target: Any) -> None:
    with pytest.raises(UnknownOperatorError, match="is not an operator"):
        register_flops(target)(costs(1))
    unregister_if_there(one)


def unregister_if_there(target: Any) -> None:
    if lookup(ONE.default) is not None:
        unregister_flops(target)


def test_nearest_key_wins() -> None:
    """Overload before packet before functional form; a counter's own before the registry's."""
    with overridden({aten.add: costs(1), aten.add.Tensor: costs(10), aten.add_: costs(100)}):
        x = torch.ones(2)

        def call() -> None:
            torch.add(x, x)  # the overload's
            aten.add.Scalar(x, 1)  # the packet's
            x.add_(x)  # the in-place packet's

        assert profile_of(call).total().flops == 111
        own = profile_of(call, custom_mapping={aten.add: costs(1000)})
        assert own.total().flops == 3000


def test_overridden_ends_with_its_scope_and_nests() -> None:
    formula = flops_of(lambda x: x * x)
    with overridden({aten.mul: costs(7), one: costs(3)}):
        assert (flops_of(lambda x: x * x), flops_of(one)) == (7, 3)
        with overridden({aten.mul: costs(70)}):
            assert flops_of(lambda x: x * x) == 70
        assert flops_of(lambda x: x * x) == 7
    assert flops_of(lambda x: x * x) == formula == 2
    with pytest.raises(ValueError, match="no"), overridden({aten.mul: costs(7)}):
        raise ValueError("no")
    assert flops_of(lambda x: x * x) == 2


def test_scope_and_registration_inside_a_block() -> None:
    """A counter that is running takes a changed rule from the next call on."""
    x = torch.ones(2)
    with FlopCounterMode(display=False) as counter:
        seen = [0]

        def flops() -> int:
            _ = x * x
            seen.append(counter.get_total_flops())
            return seen[-1] - seen[-2]

        assert flops() == 2
        with overridden({aten.mul: costs(7)}):
            assert flops() == 7
        assert flops() == 2


def test_rules_are_named_and_sorted() -> None:
    names = list(registry.rules())
    assert names == sorted(names)
    assert "aten.mm" in names
    assert not any("::" in name for name in names if name.startswith("aten"))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        (aten.mm, "aten.mm"),
        (aten.mm.default, "aten.mm.default"),
        (torch.ops.higher_order.cond, "higher_order.cond"),
        (nn.Linear, "module.Linear"),
    ],
)
def test_names(key: Any, name: str) -> None:
    assert registry.name_of(key) == name


def flops_of_max(**options: Any) -> int:
    return profile_of(lambda: torch.max(torch.ones(5, 7)), **options).total().flops


def test_the_users_formula_of_an_operator_stands_in_for_the_packages_of_an_overload() -> None:
    assert flops_of_max() == 5 * 7 - 1
    assert flops_of_max(custom_mapping={aten.max: costs(1000)}) == 1000
    with overridden({aten.max: costs(1000)}):
        assert flops_of_max() == 1000
    with pytest.raises(DuplicateFormulaError, match=r"aten\.max"):
        register_flops(aten.max)(costs(1000))
    register_flops(aten.max, override=True)(costs(1000))
    assert flops_of_max() == 1000
    unregister_flops(aten.max)
    assert flops_of_max() == 5 * 7 - 1


def test_of_a_list_with_a_duplicate_nothing_is_registered() -> None:
    with pytest.raises(DuplicateFormulaError):
        register_flops([ONE, aten.mm])(costs(1))
    assert lookup(ONE.default) is None


def test_a_decorator_without_its_operator_is_refused() -> None:
    with pytest.raises(UnknownOperatorError):

        @register_flops
        def formula(x: Tensor, *, out: Tensor, **_: Any) -> int:
            return 0

    with pytest.raises(UnknownOperatorError):
        register_flops(5)


def test_an_override_prevails_over_what_is_more_exact() -> None:
    register_flops(ONE.default)(costs(1))
    with overridden({ONE: costs(99)}):
        assert flops_of(one) == 99
    assert flops_of(one) == 1
    register_flops(ONE, override=True)(costs(50))
    assert flops_of(one) == 50
    unregister_flops(ONE)
    assert lookup(ONE.default) is None


@pytest.mark.parametrize("target", [nn.Linear, torch.ops.higher_order.cond])
def test_arguments_have_names_where_there_is_a_schema(target: Any) -> None:
    with pytest.raises(UnknownOperatorError, match="has no schema"):
        register_flops(target, by_name=True)(costs(1))


def test_names_of_overloads_and_of_in_place_forms_that_are_loaded_later() -> None:
    register_flops(["dispatch_flops_test::exact.default", "dispatch_flops_test::plain"])(costs(7))
    library = torch.library.Library("dispatch_flops_test", "FRAGMENT")
    library.define("exact(Tensor x) -> Tensor")
    library.define("plain_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("exact", lambda x: x.clone(), "CPU")
    library.impl("plain_", lambda x: x.zero_(), "CPU")
    later = torch.ops.dispatch_flops_test
    assert (flops_of(later.exact), flops_of(later.plain_)) == (7, 7)
    unregister_flops(["dispatch_flops_test::exact.default", "dispatch_flops_test::plain"])
