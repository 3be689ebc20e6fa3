"""Which operator has which formula.

The registry maps an operator to a ``Rule``. A key is an overload, a packet (all its
overloads), a higher-order operator, a Triton kernel or an ``nn.Module`` class; the more
exact key wins. In-place and ``out=`` variants share the formula of the functional op.
``formulas/`` fills the registry on import; users add to it with ``register_flops``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from dispatch_flops.errors import DuplicateFormulaError, UnknownOperatorError
from dispatch_flops.operators.torch_formulas import accept_torch_style, registered_with_torch
from dispatch_flops.profile.cost import OpCost, Split

Formula = Callable[..., "OpCost | Split | int"]
F = TypeVar("F", bound=Formula)
Kind = Literal["formula", "pointwise", "reduction", "free"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How an operator is costed.

    kind: "formula", "pointwise" or "reduction" (the tables), or "free" (0, by declaration).
    note: for a free op the reason; for a table entry the cost per element.
    by_name: the formula wants its arguments under the schema's names.
    cacheable: the cost follows from shapes, dtypes and plain arguments alone.
    moves: False where no element is read or written, as for an allocation.
    builtin: ours, not the user's.
    """

    kind: Kind
    formula: Formula
    note: str = ""
    by_name: bool = False
    cacheable: bool = True
    moves: bool = True
    builtin: bool = True

    def answer(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> OpCost | Split | int:
        """What the formula says of a call of ``op`` that returned ``out``."""
        if not self.by_name:
            return self.formula(*args, out=out, **kwargs)
        names = (argument.name for argument in _schema_of(op).arguments)
        return self.formula(**{**dict(zip(names, args, strict=False)), **kwargs, "out": out})


class RuleReader(Protocol):
    """Whoever keeps rules that it has looked up."""

    def rules_changed(self) -> None: ...


_RULES: dict[Any, Rule] = {}
_READERS: weakref.WeakSet[RuleReader] = weakref.WeakSet()


def watch(reader: RuleReader) -> None:
    """While it lives, ``reader.rules_changed()`` is called when a rule is added or removed."""
    _READERS.add(reader)


def _changed() -> None:
    for reader in list(_READERS):
        reader.rules_changed()


def register_flops(
    targets: Any,
    *,
    override: bool = False,
    by_name: bool = False,
    cacheable: bool = True,
    note: str = "",
) -> Callable[[F], F]:
    """Register a formula for an operator, or for a list of operators.

    targets: ``torch.ops.lib.op`` (all overloads), ``torch.ops.lib.op.overload``, what
        ``torch.library.custom_op`` returns, a higher-order operator, a Triton kernel, an
        ``nn.Module`` class (its call is then one opaque op), the name ``"lib::op"`` of an
        operator whose library may not be loaded yet, or a list of these.
    override: replace an existing formula instead of refusing.
    by_name: for operators with a schema. Every argument comes under the schema's name for it, so
        that one formula may serve operators whose arguments stand in other places, and names those
        alone that it reads. An argument that is called ``out`` gives way to the result.
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

    keys = list(dict.fromkeys(_keys(targets)))
    if by_name:
        _refuse_without_schema(keys)

    def decorate(formula: F) -> F:
        builtin = str(formula.__module__).startswith("dispatch_flops.operators.formulas")
        if not override:
            _refuse_duplicates(keys if builtin else _replaced_by(keys))
        elif not builtin:
            _set_aside(keys)
        rule = Rule(
            kind="formula",
            formula=formula if builtin else accept_torch_style(formula),
            by_name=by_name,
            cacheable=cacheable,
            builtin=builtin,
            note=note,
        )
        for key in keys:
            add_rule(key, rule, override=True)
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


def _replaced_by(keys: Iterable[Any]) -> Iterator[Any]:
    """Keys of the rules that the user's formula for these would replace, and perhaps of others."""
    for key in keys:
        yield key
        if isinstance(key, OpOverloadPacket):
            yield _torch.packet_name(key)
            overloads = [getattr(key, name) for name in key.overloads()]
            yield from overloads
        else:
            overloads = [key] if isinstance(key, OpOverload) else []
        for overload in overloads:
            yield _full_name(overload)
            rule = _found(_RULES, overload)
            if rule is not None and rule.builtin:
                yield from _keys_of(overload)


def _refuse_without_schema(keys: Iterable[Any]) -> None:
    for key in keys:
        if not isinstance(key, (OpOverload, OpOverloadPacket, str)):
            raise UnknownOperatorError(
                f"{name_of(key)} has no schema, by which arguments have names: leave by_name out"
            )


def _set_aside(keys: Iterable[Any]) -> dict[Any, Rule]:
    """Take away the user's own rules that would go before rules under these keys."""
    found = {key: _RULES[key] for key in _replaced_by(keys) if key in _RULES}
    aside = {key: rule for key, rule in found.items() if not rule.builtin}
    for key in aside:
        del _RULES[key]
    return aside


def unregister_flops(targets: Any) -> None:
    """Remove the formulas of ``targets``; raises UnknownOperatorError where one has none, and
    removes none then.
    """
    keys = list(dict.fromkeys(map(_key_in_use, _keys(targets))))
    for key in keys:
        if key not in _RULES:
            raise UnknownOperatorError(f"{name_of(key)} has no formula to remove")
    for key in keys:
        del _RULES[key]
    _changed()


def _key_in_use(key: Any) -> Any:
    """The key itself, or the name that stood for it while its library was not loaded."""
    if key in _RULES or not isinstance(key, (OpOverload, OpOverloadPacket)):
        return key
    name = _full_name(key) if isinstance(key, OpOverload) else _torch.packet_name(key)
    return name if name in _RULES else key


def _full_name(op: OpOverload) -> str:
    """``"lib::op.overload"``, also of the overload that is called default."""
    return f"{_torch.packet_name(op.overloadpacket)}.{_torch.overload_name(op)}"


@contextlib.contextmanager
def overridden(mapping: Mapping[Any, Formula]) -> Iterator[None]:
    """Inside the block, ``mapping``'s formulas stand in for the registered ones."""
    layer = rules_from(mapping)
    aside = _set_aside(layer)
    saved = {key: _RULES.get(key) for key in layer} | aside
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
        key: Rule(kind="formula", formula=accept_torch_style(formula), builtin=False)
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
    for rules in (extra or {}, _RULES):
        rule = _found(rules, op)
        if rule is not None:
            return rule
    theirs = registered_with_torch(op)
    if theirs is None:
        return None
    return Rule(
        kind="formula", formula=theirs, note="registered with torch.utils.flop_counter",
        builtin=False,
    )  # fmt: skip


def _schema_of(op: OpOverload | OpOverloadPacket) -> torch.FunctionSchema:
    overload = op if isinstance(op, OpOverload) else getattr(op, op.overloads()[0])
    return _torch.schema_of(overload)


def _found(rules: Mapping[Any, Rule], op: Any) -> Rule | None:
    found = [rules[key] for key in _keys_of(op) if key in rules]
    return next((rule for rule in found if not rule.builtin), found[0] if found else None)


def _keys_of(op: Any) -> list[Any]:
    """Every key under which an operator's rule may stand, the most exact first."""
    if not isinstance(op, OpOverload):
        return [op]
    packet = op.overloadpacket
    name = _torch.packet_name(packet)
    functional = _functional_packet(packet)
    keys = [op, packet, functional, _full_name(op), name, name[:-1] if _is_in_place(name) else None]
    return [key for key in keys if key is not None]


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
        return _torch.packet_name(key).replace("::", ".")
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
        return _loaded(target) or target
    if isinstance(target, torch.library.CustomOpDef):
        return _torch.overload_of(target).overloadpacket
    if callable(getattr(target, "run", None)) and hasattr(target, "fn"):  # a Triton kernel
        return target
    raise UnknownOperatorError(
        f"{target!r} is no operator: pass torch.ops.<library>.<op>, one of its overloads, its name "
        "as 'library::op', what torch.library.custom_op returned, a higher-order operator, a "
        "Triton kernel, an nn.Module class, or a list of these"
    )


def _loaded(name: str) -> OpOverload | OpOverloadPacket | None:
    """The operator ``"lib::op"`` or ``"lib::op.overload"``, if its library is loaded."""
    library, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, library), packet, None)
    return getattr(found, overload, None) if overload else found


def _functional_packet(packet: OpOverloadPacket) -> OpOverloadPacket | None:
    """``aten.add_`` -> ``aten.add``: an in-place op costs what its functional form costs."""
    name = packet.__name__
    if not _is_in_place(name):
        return None
    library = _torch.packet_name(packet).split("::")[0]
    return getattr(getattr(torch.ops, library), name[:-1], None)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


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
        add_rule(key, Rule(kind="free", formula=formula, note=reason, moves=moves))
