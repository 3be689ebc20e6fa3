"""Which operator has which formula.

The registry maps an operator to a ``Rule``. A key is an overload, a packet (all its
overloads), a higher-order operator, a Triton kernel or an ``nn.Module`` class; the more
exact key wins. In-place and ``out=`` variants share the formula of the functional op.
``formulas/`` fills the registry on import; users add to it with ``register_flops``.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from dispatch_flops.cost import OpCost, Split
from dispatch_flops.errors import DuplicateFormulaError, UnknownOperatorError

Formula = Callable[..., "OpCost | Split | int"]
F = TypeVar("F", bound=Formula)
Kind = Literal["formula", "pointwise", "reduction", "free"]
Causal = Literal["full", "half"]
Subclass = Literal["executed", "logical"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How an operator is costed.

    kind: "formula", "pointwise" or "reduction" (the tables), or "free" (0, by declaration).
    note: for a free op the reason; for a table entry the cost per element.
    cacheable: the cost follows from shapes, dtypes and plain arguments alone.
    moves: False where no element is read or written, as for an allocation.
    builtin: ours, not the user's.
    """

    target: str
    kind: Kind
    formula: Formula
    note: str = ""
    cacheable: bool = True
    moves: bool = True
    builtin: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """What a counter lets its user choose.

    causal: "full" counts the whole Sq x Sk rectangle of attention, "half" the part that a
        causal kernel needs.
    subclass: of tensors that are made of others, such as DTensor and quantised weights,
        "executed" counts the operators that run on the inner ones (of a DTensor: on this
        rank), "logical" the operator on the whole.
    meta_value: answers ``.item()`` and its like on tensors without data; None: they raise.
    """

    causal: Causal = "full"
    subclass: Subclass = "executed"
    meta_value: float | None = None


class RuleReader(Protocol):
    """Whoever keeps rules that it has looked up."""

    def rules_changed(self) -> None: ...


_RULES: dict[Any, Rule] = {}
_CONVENTIONS: ContextVar[Conventions] = ContextVar("dispatch_flops_conventions")
_DEFAULT_CONVENTIONS = Conventions()
_READERS: weakref.WeakSet[RuleReader] = weakref.WeakSet()


def conventions() -> Conventions:
    """The conventions of the counter that is asking for a cost."""
    return _CONVENTIONS.get(_DEFAULT_CONVENTIONS)


@contextlib.contextmanager
def using(chosen: Conventions) -> Iterator[None]:
    """Formulas called inside see ``chosen``."""
    token = _CONVENTIONS.set(chosen)
    try:
        yield
    finally:
        _CONVENTIONS.reset(token)


def watch(reader: RuleReader) -> None:
    """While it lives, ``reader.rules_changed()`` is called when a rule is added or removed."""
    _READERS.add(reader)


def _changed() -> None:
    for reader in list(_READERS):
        reader.rules_changed()


def register_flops(
    targets: Any, *, override: bool = False, cacheable: bool = True, note: str = ""
) -> Callable[[F], F]:
    """Register a formula for an operator, or for a list of operators.

    targets: ``torch.ops.lib.op`` (all overloads), ``torch.ops.lib.op.overload``, what
        ``torch.library.custom_op`` returns, a higher-order operator, a Triton kernel, an
        ``nn.Module`` class (its call is then one opaque op), the name ``"lib::op"`` of an
        operator whose library may not be loaded yet, or a list of these.
    override: replace an existing formula instead of refusing.
    cacheable: pass False if the cost depends on more than shapes, dtypes and plain arguments.
    note: the cost in words, as ``dispatch-flops ops`` lists it; by default the docstring's.

    The decorated function is called as ``formula(*args, out=out, **kwargs)`` with the
    operator's own arguments and its result. It may read shapes, dtypes and layouts, never
    data. It returns an ``OpCost``, an int that means FLOPs, or a ``Split`` of the cost among
    phases and submodules.

    Raises DuplicateFormulaError if a target has a formula already, UnknownOperatorError if
    a target is no operator; nothing is registered then.

        @register_flops(torch.ops.mylib.fused_mlp)
        def fused_mlp(x, w1, w2, *, out, **_):
            return OpCost(macs=(m := x.shape[0] * (w1.numel() + w2.numel())), flops=2 * m)
    """

    keys = _keys(targets)

    def decorate(formula: F) -> F:
        adapted = accept_torch_style(formula)
        builtin = str(formula.__module__).startswith("dispatch_flops.formulas")
        if not override:
            _refuse_duplicates(keys if builtin else [*keys, *_overloads(keys)])
        for key in keys:
            add_rule(
                key,
                Rule(
                    target=name_of(key),
                    kind="formula",
                    formula=adapted,
                    cacheable=cacheable,
                    builtin=builtin,
                    note=note,
                ),
                override=override,
            )
        return formula

    return decorate


def add_rule(key: Any, rule: Rule, *, override: bool = False) -> None:
    """Put one rule under one key; the tables of ``formulas/`` come in this way."""
    if not override:
        _refuse_duplicates([key])
    _RULES[key] = rule
    _changed()


def _refuse_duplicates(keys: Iterable[Any]) -> None:
    for key in keys:
        if key in _RULES:
            raise DuplicateFormulaError(
                f"{name_of(key)} already has a {_RULES[key].kind} rule; "
                "pass override=True to replace it, or use overridden(...) for one scope"
            )


def _overloads(keys: Iterable[Any]) -> Iterator[OpOverload]:
    """The overloads of the packets among the keys, which may have rules of their own."""
    for key in keys:
        if isinstance(key, OpOverloadPacket):
            yield from (getattr(key, name) for name in key.overloads())


def unregister_flops(targets: Any) -> None:
    """Remove the formulas of ``targets``; raises UnknownOperatorError where there is none."""
    for key in _keys(targets):
        if key not in _RULES:
            raise UnknownOperatorError(f"{name_of(key)} has no formula to remove")
        del _RULES[key]
        _changed()


@contextlib.contextmanager
def overridden(mapping: Mapping[Any, Formula]) -> Iterator[None]:
    """Inside the block, ``mapping``'s formulas stand in for the registered ones."""
    layer = rules_from(mapping)
    saved = {key: _RULES.get(key) for key in layer}
    _RULES.update(layer)
    _changed()
    try:
        yield
    finally:
        for key, rule in saved.items():
            if rule is None:
                _RULES.pop(key, None)
            else:
                _RULES[key] = rule
        _changed()


def rules_from(mapping: Mapping[Any, Formula]) -> dict[Any, Rule]:
    """A ``{operator: formula}`` mapping as rules; torch's own formula style is accepted."""
    if not isinstance(mapping, Mapping):
        raise UnknownOperatorError(
            f"a {type(mapping).__name__} is no mapping: pass {{operator: formula}}"
        )
    return {
        key: Rule(
            target=name_of(key), kind="formula", formula=accept_torch_style(formula), builtin=False
        )
        for target, formula in mapping.items()
        for key in _keys(target)
    }


def lookup(op: Any, extra: Mapping[Any, Rule] | None = None) -> Rule | None:
    """The rule for an operator that reached the mode, or None.

    Searched in this order: the overload, its packet, the functional op that it is the
    in-place variant of, its name; in ``extra`` (one counter's own rules) before the registry,
    and there the user's before the package's own; last, formulas that the user registered with
    torch's own flop counter.
    """
    keys = [op]
    if isinstance(op, OpOverload):
        packet = op.overloadpacket
        keys = [op, packet]
        functional = _functional_packet(packet)
        if functional is not None:
            keys.append(functional)
        keys.append(packet._qualified_op_name)
    for rules in (extra or {}, _RULES):
        found = [rules[key] for key in keys if key in rules]
        if found:
            return next((rule for rule in found if not rule.builtin), found[0])
    return _rule_from_torch(op)


def module_rules(extra: Mapping[Any, Rule]) -> dict[type, Rule]:
    """The rules of ``nn.Module`` classes; ``extra`` (one counter's own) before the registry's."""
    known = {**_RULES, **extra}
    return {key: rule for key, rule in known.items() if isinstance(key, type)}


def rules() -> dict[str, Rule]:
    """Every registered rule by the name of its operator, sorted."""
    return dict(sorted((name_of(key), rule) for key, rule in _RULES.items()))


def name_of(key: Any) -> str:
    """``aten.addmm``, ``aten.addmm.default``, ``higher_order.cond``, a class's or kernel's name."""
    if isinstance(key, OpOverloadPacket):
        return key._qualified_op_name.replace("::", ".")
    if isinstance(key, OpOverload):
        return str(key)
    if isinstance(key, HigherOrderOperator):
        return f"higher_order.{key.name()}"
    if isinstance(key, type):
        return f"module.{key.__name__}"
    if isinstance(key, str):
        return key.replace("::", ".")
    return str(getattr(key, "__name__", key))


def _keys(targets: Any) -> list[Any]:
    """Targets as registry keys."""
    if isinstance(targets, (list, tuple, set, frozenset)):
        return [key for target in targets for key in _keys(target)]
    return [_key(targets)]


def _key(target: Any) -> Any:
    if isinstance(target, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return target
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return target
    if isinstance(target, str) and target.count("::") == 1:
        return target
    if isinstance(target, torch.library.CustomOpDef):
        return target._opoverload.overloadpacket
    if callable(getattr(target, "run", None)) and hasattr(target, "fn"):  # a Triton kernel
        return target
    raise UnknownOperatorError(
        f"{target!r} is no operator: pass torch.ops.<library>.<op>, one of its overloads, its name "
        "as 'library::op', what torch.library.custom_op returned, a higher-order operator, a "
        "Triton kernel, an nn.Module class, or a list of these"
    )


def _functional_packet(packet: OpOverloadPacket) -> OpOverloadPacket | None:
    """``aten.add_`` -> ``aten.add``: an in-place op costs what its functional form costs."""
    name = packet.__name__
    if not name.endswith("_") or name.endswith("__"):
        return None
    library = packet._qualified_op_name.split("::")[0]
    return getattr(getattr(torch.ops, library), name[:-1], None)


def accept_torch_style(formula: Formula) -> Formula:
    """A formula as ``torch.utils.flop_counter`` wants it, made to take our arguments.

    Theirs are called with shapes in place of tensors and ``out_shape=`` (or, undecorated,
    with tensors and ``out_val=``) and return FLOPs; told by those parameter names.
    """
    if getattr(formula, "_get_raw", False):
        return lambda *args, out=None, **kwargs: formula(*args, out_val=out, **kwargs)
    try:
        # torch's own decorator wraps a formula of shapes in one of tensors: the outer one counts.
        outer = inspect.signature(formula, follow_wrapped=False).parameters
        names = outer if "out_val" in outer else inspect.signature(formula).parameters
    except (TypeError, ValueError):
        return formula
    if "out_shape" in names and "out" not in names:
        return lambda *args, out=None, **kwargs: formula(
            *_shapes(args), out_shape=_shapes(out), **_shapes(kwargs)
        )
    if "out_val" in names and "out" not in names:
        return lambda *args, out=None, **kwargs: formula(*args, out_val=out, **kwargs)
    return formula


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return type(value)(_shapes(item) for item in value)
    if isinstance(value, dict):
        return {name: _shapes(item) for name, item in value.items()}
    return value


def _rule_from_torch(op: Any) -> Rule | None:
    """What the user registered with ``torch.utils.flop_counter.register_flop_formula``."""
    if not isinstance(op, OpOverload) or op.namespace == "aten":
        return None
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(op.overloadpacket)
    if formula is None:
        return None
    return Rule(
        target=name_of(op.overloadpacket),
        kind="formula",
        formula=accept_torch_style(formula),
        note="registered with torch.utils.flop_counter",
        builtin=False,
    )


def _nothing(*_args: Any, **_kwargs: Any) -> OpCost:
    return OpCost()


def free(
    targets: Iterable[Any], reason: str, *, moves: bool = True, formula: Formula = _nothing
) -> None:
    """Declare operators that do no arithmetic worth counting, each with the reason.

    moves: False where no element is read or written either (metadata, bare allocation).
    formula: of the bytes, where they are not those of all tensors that go in and come out.
    """
    for key in _keys(list(targets)):
        add_rule(
            key, Rule(target=name_of(key), kind="free", formula=formula, note=reason, moves=moves)
        )
