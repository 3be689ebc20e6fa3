"""Which formula an operator gets: keys, precedence, duplicates, overrides, custom operators."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dispatch_flops import FlopCounterMode, OpCost
from dispatch_flops.errors import (
    DuplicateFormulaError,
    FormulaError,
    UncountedWarning,
    UnknownOperatorError,
)
from dispatch_flops.operators import registry
from dispatch_flops.operators.registry import lookup, overridden, register_flops, unregister_flops
from tests.helpers.profiling import profile_of

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("registry_unchanged")


@torch.library.custom_op("dispatch_flops_test::one", mutates_args=())
def one(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("dispatch_flops_test::two", mutates_args=())
def two(x: Tensor) -> Tensor:
    return x.clone()


ONE, TWO = torch.ops.dispatch_flops_test.one, torch.ops.dispatch_flops_test.two


def costs(flops: int) -> Any:
    return lambda *args, **kwargs: flops


def flops_of(op: Any) -> int:
    return profile_of(op, torch.ones(2)).total().flops


@pytest.mark.parametrize("target", [one, ONE, ONE.default], ids=["def", "packet", "overload"])
def test_register_flops_then_unregister_flops_restores_the_registry(target: Any) -> None:
    formula = costs(3)
    assert register_flops(target)(formula) is formula
    assert flops_of(one) == 3
    unregister_flops(target)
    assert lookup(ONE.default) is None


def test_register_flops_with_a_list_registers_all() -> None:
    register_flops([one, [TWO.default]])(costs(3))
    assert (flops_of(one), flops_of(two)) == (3, 3)
    unregister_flops([one, TWO.default])


def test_register_flops_of_a_duplicate_raises() -> None:
    register_flops(one)(costs(3))
    with pytest.raises(DuplicateFormulaError, match=r"dispatch_flops_test\.one .*override=True"):
        register_flops(ONE)(costs(5))
    assert flops_of(one) == 3
    register_flops(ONE, override=True)(costs(5))
    assert flops_of(one) == 5
    unregister_flops(one)


@pytest.mark.parametrize("target", [aten.mm, aten.mm.default], ids=["packet", "overload"])
def test_register_flops_of_a_built_in_operator_raises(target: Any) -> None:
    with pytest.raises(DuplicateFormulaError, match=r"aten\.mm"):
        register_flops(target)(costs(5))


def test_register_flops_with_a_repeated_target_registers_it_once() -> None:
    register_flops([ONE, one, "dispatch_flops_test::one"])(costs(3))
    assert flops_of(one) == 3
    with pytest.raises(DuplicateFormulaError, match=r"dispatch_flops_test\.one"):
        register_flops("dispatch_flops_test::one")(costs(3))
    unregister_flops("dispatch_flops_test::one")
    assert lookup(ONE.default) is None


def test_register_flops_by_name_applies_to_an_operator_loaded_later() -> None:
    name = "dispatch_flops_test_later::loaded_later"
    register_flops(name)(costs(7))
    library = torch.library.Library("dispatch_flops_test_later", "FRAGMENT")
    library.define("loaded_later(Tensor x) -> Tensor")
    library.impl("loaded_later", lambda x: x.clone(), "CPU")
    later = torch.ops.dispatch_flops_test_later.loaded_later
    assert flops_of(later) == 7
    with pytest.raises(DuplicateFormulaError, match="loaded_later"):
        register_flops(later)(costs(5))
    unregister_flops(later)
    assert lookup(later.default) is None


def test_register_flops_with_by_name_passes_arguments_by_schema_name() -> None:
    @register_flops([ONE, TWO], by_name=True)
    def elements(*, x: torch.Tensor, out: torch.Tensor, **_: Any) -> int:
        return 2 * x.numel() + out.numel()

    assert flops_of(one) == flops_of(two) == 2 * 2 + 2
    unregister_flops([one, two])


def test_unregister_flops_after_an_override_restores_the_built_in_formula() -> None:
    operands = (torch.ones(5), torch.ones(2, 3), torch.ones(3, 5))
    built_in = profile_of(torch.addmm, *operands).total()
    assert built_in.macs == 2 * 3 * 5
    register_flops(aten.addmm, override=True)(costs(7))
    register_flops(aten.addmm, override=True)(costs(11))
    assert profile_of(torch.addmm, *operands).total().flops == 11
    unregister_flops(aten.addmm)
    assert profile_of(torch.addmm, *operands).total() == built_in
    with pytest.raises(UnknownOperatorError, match=r"aten\.addmm .* built-in formula stays"):
        unregister_flops(aten.addmm)
    assert profile_of(torch.addmm, *operands).total() == built_in


def test_unregister_flops_with_an_unknown_target_removes_nothing() -> None:
    register_flops(one)(costs(3))
    with pytest.raises(UnknownOperatorError, match=r"dispatch_flops_test\.two has no formula"):
        unregister_flops([one, two])
    assert flops_of(one) == 3
    unregister_flops(one)


def test_unregister_flops_of_an_unregistered_operator_raises() -> None:
    with pytest.raises(UnknownOperatorError, match=r"dispatch_flops_test\.one has no formula"):
        unregister_flops(one)


@pytest.mark.parametrize("targets", [[], (), [[]]])
def test_registration_of_no_operator_raises(targets: Any) -> None:
    with pytest.raises(UnknownOperatorError, match="the list of operators is empty; pass one"):
        register_flops(targets)(costs(1))
    with pytest.raises(UnknownOperatorError, match="the list of operators is empty; pass one"):
        unregister_flops(targets)


@pytest.mark.parametrize(
    "target", [len, "mm", "::mm", "aten::", 3, nn.Linear(2, 2), int, [one, len]]
)
def test_register_flops_of_something_else_raises(target: Any) -> None:
    with pytest.raises(UnknownOperatorError, match="is not an operator"):
        register_flops(target)(costs(1))
    unregister_if_there(one)


@pytest.mark.parametrize("dtype", ["int8", torch.int8, lambda arguments: torch.int8])
def test_register_flops_takes_the_dtype_of_products_as_such_or_by_name(dtype: Any) -> None:
    register_flops(ONE, computes_in=dtype)(costs(5))
    try:
        totals = profile_of(ONE, torch.ones(2)).op_totals()
    finally:
        unregister_flops(ONE)
    assert [total.dtype for total in totals if total.op.startswith("dispatch_flops")] == ["int8"]


@pytest.mark.parametrize("dtype", ["int9", 5, torch.strided])
def test_register_flops_with_something_else_for_a_dtype_raises(dtype: Any) -> None:
    with pytest.raises(FormulaError, match='not a dtype; pass one, such as "int8"'):
        register_flops(ONE, computes_in=dtype)(costs(5))
    assert lookup(ONE.default) is None


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (torch.matmul, "aten.matmul"),
        (torch.Tensor.matmul, "aten.matmul"),
        (torch.nn.functional.gelu, "aten.gelu"),
        (torch.nn.functional.layer_norm, "aten.layer_norm"),
        (torch.nn.functional.scaled_dot_product_attention, "aten.scaled_dot_product_attention"),
        (torch.ops.aten.add.Tensor.op, None),
        (len, None),
        (math.exp, None),
        (torch.nn.functional.multi_head_attention_forward, None),
    ],
)
def test_register_flops_of_a_function_names_the_operator_that_it_runs(
    function: Any, operator: str | None
) -> None:
    with pytest.raises(UnknownOperatorError, match="is not an operator") as raised:
        register_flops(function)(costs(1))
    assert (f"pass torch.ops.{operator}" in str(raised.value)) is (operator is not None)


def unregister_if_there(target: Any) -> None:
    if lookup(ONE.default) is not None:
        unregister_flops(target)


def test_lookup_prefers_the_more_exact_key() -> None:
    """Overload, then packet, then functional form; a counter's own rules before the registry's."""
    with overridden({aten.add: costs(1), aten.add.Tensor: costs(10), aten.add_: costs(100)}):
        x = torch.ones(2)

        def call() -> None:
            torch.add(x, x)  # the overload's
            aten.add.Scalar(x, 1)  # the packet's
            x.add_(x)  # the in-place packet's

        assert profile_of(call).total().flops == 111
        own = profile_of(call, custom_mapping={aten.add: costs(1000)})
        assert own.total().flops == 3000


def test_overridden_nests_and_ends_with_its_block() -> None:
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


def test_overridden_blocks_that_overlap_end_each_by_itself() -> None:
    first, second = (
        overridden({aten.mul: costs(7)}),
        overridden({aten.mul: costs(70), one: costs(3)}),
    )
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert flops_of(lambda x: x * x) == 70
    second.__exit__(None, None, None)
    assert flops_of(lambda x: x * x) == 2
    assert lookup(ONE.default) is None


def test_overridden_in_overlapping_threads_leaves_nothing_and_reaches_no_other_thread() -> None:
    meet = threading.Barrier(3, timeout=30)
    seen: dict[int, list[int]] = {7: [], 70: []}

    def work(flops: int, *, leaves_first: bool) -> None:
        if not leaves_first:
            meet.wait()
        with overridden({aten.mul: costs(flops)}):
            if leaves_first:
                meet.wait()
            meet.wait()
            seen[flops].append(flops_of(lambda x: x * x))
            meet.wait()
        meet.wait()
        seen[flops].append(flops_of(lambda x: x * x))

    threads = [
        threading.Thread(target=work, args=(7,), kwargs={"leaves_first": True}),
        threading.Thread(target=work, args=(70,), kwargs={"leaves_first": False}),
    ]
    for thread in threads:
        thread.start()
    for _ in range(2):
        meet.wait()
    while_both_are_active = flops_of(lambda x: x * x)
    for _ in range(2):
        meet.wait()
    for thread in threads:
        thread.join()
    assert seen == {7: [7, 2], 70: [70, 2]}
    assert while_both_are_active == flops_of(lambda x: x * x) == 2


def test_overridden_in_the_counters_thread_applies_to_threads_that_join_it() -> None:
    """A thread's own block comes before that of the thread that entered the counter."""
    x, seen = torch.ones(2), []
    with FlopCounterMode(display=False) as counter:

        def work(*, has_own: bool) -> None:
            before = counter.get_total_flops()
            own = overridden({aten.mul: costs(70)}) if has_own else contextlib.nullcontext()
            with counter.in_thread(), own:
                _ = x * x
            seen.append(counter.get_total_flops() - before)

        with overridden({aten.mul: costs(7)}):
            for has_own in (False, True):
                thread = threading.Thread(target=work, kwargs={"has_own": has_own})
                thread.start()
                thread.join()
        _ = x * x
    assert seen == [7, 70]
    assert counter.get_total_flops() == 7 + 70 + 2


def test_overridden_inside_a_counters_block_applies_to_its_calls() -> None:
    """A running counter uses a changed rule from the next call on."""
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


def flops_of_max(**options: Any) -> int:
    return profile_of(lambda: torch.max(torch.ones(5, 7)), **options).total().flops


def test_register_flops_of_a_packet_replaces_the_built_in_formula_of_an_overload() -> None:
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


def test_register_flops_with_a_duplicate_in_a_list_registers_nothing() -> None:
    with pytest.raises(DuplicateFormulaError):
        register_flops([ONE, aten.mm])(costs(1))
    assert lookup(ONE.default) is None


def test_register_flops_without_an_operator_raises() -> None:
    with pytest.raises(UnknownOperatorError):

        @register_flops
        def formula(x: Tensor, *, out: Tensor, **_: Any) -> int:
            return 0

    with pytest.raises(UnknownOperatorError):
        register_flops(5)


def test_overridden_prevails_over_a_more_exact_key() -> None:
    register_flops(ONE.default)(costs(1))
    with overridden({ONE: costs(99)}):
        assert flops_of(one) == 99
    assert flops_of(one) == 1
    register_flops(ONE, override=True)(costs(50))
    assert flops_of(one) == 50
    unregister_flops(ONE)
    assert lookup(ONE.default) is None


@pytest.mark.parametrize("target", [nn.Linear, torch.ops.higher_order.cond])
def test_register_flops_with_by_name_and_no_schema_raises(target: Any) -> None:
    with pytest.raises(UnknownOperatorError, match="has no schema"):
        register_flops(target, by_name=True)(costs(1))


@pytest.mark.parametrize(
    ("given", "scale"), [({}, 1.0), ({"scale": 1.0}, 1.0), ({"scale": 3.0}, 3)]
)
def test_register_flops_with_by_name_passes_the_defaults_that_a_formula_requires(
    library: torch.library.Library, given: dict[str, float], scale: int
) -> None:
    library.define("scaled(Tensor x, int times, *, float scale=1.0, int more=5) -> Tensor")
    library.impl("scaled", lambda x, times, **_: x.clone(), "CPU")
    scaled = torch.ops.dispatch_flops_test.scaled

    @register_flops(scaled, by_name=True)
    def formula(*, times: int, scale: float, more: int = 7, out: Any, **_: Any) -> int:
        return times * int(scale) * 11 + more

    assert flops_of(lambda x: scaled(x, 2, **given)) == 2 * scale * 11 + 7
    unregister_flops(scaled)


def test_register_flops_by_name_applies_to_overloads_and_in_place_forms() -> None:
    register_flops(["dispatch_flops_forms::exact.default", "dispatch_flops_forms::plain"])(costs(7))
    library = torch.library.Library("dispatch_flops_forms", "FRAGMENT")
    library.define("exact(Tensor x) -> Tensor")
    library.define("plain_(Tensor(a!) x) -> Tensor(a!)")
    library.impl("exact", lambda x: x.clone(), "CPU")
    library.impl("plain_", lambda x: x.zero_(), "CPU")
    later = torch.ops.dispatch_flops_forms
    assert (flops_of(later.exact), flops_of(later.plain_)) == (7, 7)
    unregister_flops(["dispatch_flops_forms::exact.default", "dispatch_flops_forms::plain"])


class Reader:
    def rules_changed(self) -> None:
        pass


def test_register_flops_while_other_threads_begin_to_read_rules_does_not_raise() -> None:
    interval = sys.getswitchinterval()
    readers = [Reader() for _ in range(20_000)]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            watching = pool.submit(lambda: [registry.watch(reader) for reader in readers])
            while not watching.done():
                register_flops("dispatch_flops_threads::op", override=True)(costs(1))
            watching.result()
    finally:
        sys.setswitchinterval(interval)
        unregister_flops("dispatch_flops_threads::op")


# -- custom operators ------------------------------------------------------------------------

_NUMBERS = itertools.count()
B, I, O = 3, 5, 11  # noqa: E741


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("dispatch_flops_test", "FRAGMENT") as made:
        yield made


@pytest.fixture
def fused() -> Any:
    """A product with its own backward, opaque to dispatch, under a new name in each test."""

    @torch.library.custom_op(f"dispatch_flops_fused::product{next(_NUMBERS)}", mutates_args=())
    def product(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    product.register_autograd(
        lambda ctx, grad: (grad @ ctx.saved_tensors[1].T, ctx.saved_tensors[0].T @ grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return product


def test_custom_operator_without_a_formula_is_listed_and_its_backward_counts(fused: Any) -> None:
    x, w = (torch.ones(B, I, requires_grad=True), torch.ones(I, O, requires_grad=True))
    with pytest.warns(UncountedWarning, match="dispatch_flops_fused.product"):
        profile = profile_of(lambda: fused(x, w).sum().backward())
    assert profile.uncounted_ops() == {str(fused._opoverload): 1}
    assert profile.total("forward").macs == 0
    assert profile.total("backward").macs == 2 * B * I * O


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_custom_operator_with_a_formula_is_counted(fused: Any, device: str) -> None:
    @register_flops(fused)
    def cost(x: Tensor, w: Tensor, *, out: Tensor, **_: Any) -> OpCost:
        macs = out.numel() * x.shape[1]
        return OpCost(macs=macs, flops=2 * macs)

    try:
        x = torch.ones(B, I, device=device, requires_grad=True)
        w = torch.ones(I, O, device=device, requires_grad=True)
        profile = profile_of(lambda: fused(x, w).sum().backward())
    finally:
        unregister_flops(fused)
    assert profile.total("forward").macs == B * I * O
    assert profile.total("backward").macs == 2 * B * I * O


def test_operator_of_a_library_fragment_with_a_formula_is_counted(
    library: torch.library.Library,
) -> None:
    library.define("cube(Tensor x) -> Tensor")
    library.impl("cube", lambda x: x @ x @ x, "CPU")
    op = torch.ops.dispatch_flops_test.cube
    square = torch.ones(I, I)
    with pytest.warns(UncountedWarning, match="cube"):
        assert profile_of(op, square).total().macs == 0
    mapping = {
        op: lambda x, *, out, **_: OpCost(macs=2 * x.shape[0] ** 3, flops=4 * x.shape[0] ** 3)
    }
    assert profile_of(op, square, custom_mapping=mapping).total().macs == 2 * I**3


def test_triton_op_with_a_formula_is_one_operator() -> None:
    triton_op = pytest.importorskip("torch.library").triton_op

    @triton_op("dispatch_flops_triton::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x + x

    mapping = {double: lambda x, *, out, **_: x.numel()}
    profile = profile_of(double, torch.ones(B, I), custom_mapping=mapping)
    assert profile.total().flops == B * I


def test_formula_of_a_module_class_in_an_inner_block_replaces_that_of_an_outer_one() -> None:
    outer, inner = (lambda *_, out, **__: 3), (lambda *_, out, **__: 5)
    with registry.overridden({torch.nn.Linear: outer}):
        with registry.overridden({torch.nn.Linear: inner}):
            assert registry.module_rules({})[torch.nn.Linear].formula is inner
        assert registry.module_rules({})[torch.nn.Linear].formula is outer


def test_formula_of_an_operator_is_one_of_the_users() -> None:
    formula = lambda *_, out, **__: 3  # noqa: E731
    assert registry.formula_of(torch.ops.aten.mm.default, {}) is None
    with registry.overridden({torch.ops.aten.mm: formula}):
        assert "aten::mm" in registry.keys_with_formulas()
        found = registry.formula_of(torch.ops.aten.mm.default, {})
        assert found is not None and found.formula is formula
    assert "aten::mm" not in registry.keys_with_formulas()
