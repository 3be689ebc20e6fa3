"""Every formula accepts the dispatcher's arguments, for every overload that it serves.

Arguments are passed by position or by keyword as in the schema, and those that equal their
defaults are omitted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest
import torch
from torch._ops import OpOverload
from torch.nn.attention import varlen  # noqa: F401  (brings its operators)

from dispatch_flops.operators import (
    formulas,  # noqa: F401  (fills the registry)
    registry,
)
from dispatch_flops.operators.composites import is_composite


def served() -> Iterator[tuple[OpOverload, registry.Rule]]:
    """Yield every overload on tensors that is not composite, with its rule."""
    for name in torch._C._dispatch_get_all_op_names():
        library, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, library), base, None)
        op = getattr(packet, overload or "default", None)
        if isinstance(op, OpOverload) and "Tensor" in str(op._schema) and not is_composite(op):
            rule = registry.lookup(op)
            if rule is not None:
                yield op, rule


def refusals(op: OpOverload, rule: registry.Rule) -> Iterator[str]:
    """Yield why the formula cannot be called, with all arguments or only the required ones."""
    inputs = [argument for argument in op._schema.arguments if not argument.is_out]
    required = [argument for argument in inputs if not argument.has_default_value()]
    signature = inspect.signature(rule.formula)
    for arguments in (inputs, required):
        by_position = [a for a in arguments if not (a.kwarg_only or rule.by_name)]
        named = {argument.name: None for argument in arguments if argument not in by_position}
        try:
            signature.bind(*(None for _ in by_position), **{**named, "out": None})
        except TypeError as error:
            yield f"{op}: {error}"


def test_every_formula_accepts_its_operators_arguments() -> None:
    pairs = list(served())
    assert len(pairs) > 2000
    assert [refusal for op, rule in pairs for refusal in refusals(op, rule)] == []


def other_defaults(op: OpOverload, rule: registry.Rule) -> Iterator[str]:
    """Yield the arguments whose default in the formula is not the operator's."""
    own = inspect.signature(rule.formula).parameters
    for argument in op._schema.arguments if rule.by_name else ():
        if argument.has_default_value() and argument.name in own and argument.name != "out":
            default = own[argument.name].default
            if default != argument.default_value:
                yield f"{op}: {argument.name} is {default}, not {argument.default_value}"


def test_every_formula_has_its_operators_defaults() -> None:
    assert [flaw for op, rule in served() for flaw in other_defaults(op, rule)] == []


def test_other_defaults_of_a_formula_with_another_default_finds_it() -> None:
    def formula(*, input: object, beta: float = 2.0, out: object, **_: object) -> int:
        return 0

    rule = registry.Rule(kind="formula", formula=formula, by_name=True)
    assert len(list(other_defaults(torch.ops.aten.softplus.default, rule))) == 1


def test_refusals_of_a_formula_that_lacks_an_argument_finds_it() -> None:
    def formula(self: object, mat2: object, *, out: object) -> int:
        return 0

    rule = registry.Rule(kind="formula", formula=formula)
    assert not list(refusals(torch.ops.aten.mm.default, rule))
    assert len(list(refusals(torch.ops.aten.mm.dtype, rule))) == 2


@pytest.mark.parametrize("bins", [{}, {"bins": 100}, {"bins": 7}])
def test_histogram_with_an_omitted_default_is_counted(bins: dict[str, int]) -> None:
    from tests.helpers.profiling import profile_of

    profile = profile_of(lambda: torch.histogram(torch.rand(50), **bins))
    assert not profile.uncounted_ops()
