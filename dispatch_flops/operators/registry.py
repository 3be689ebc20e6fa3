"""Registry of formulas: maps an operator to the rule that gives its cost.

A key is the name of an operator (all its overloads) or of one overload, a higher-order operator, a
Triton kernel or an ``nn.Module`` class. The more exact key wins.
In-place and ``out=`` variants share the rule of the functional operator. Importing ``formulas``
fills the registry with the package's rules. The user's rules are kept apart from them:
``register_flops`` adds rules for the process, ``overridden`` for a block of one thread.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import torch

from dispatch_flops.errors import DuplicateFormulaError, FormulaError, UnknownOperatorError
from dispatch_flops.operators.access import has_stated_bytes
from dispatch_flops.operators.formula_signatures import check_formula, required_defaults
from dispatch_flops.operators.misspelt_names import warn_of_misspelt
from dispatch_flops.operators.operator_keys import (
    candidate_keys,
    check_not_empty,
    find,
    full_name,
    lacking,
    name_of,
    overloads_of,
    schema_of,
    to_keys,
)
from dispatch_flops.operators.tensors import name_of_dtype
from dispatch_flops.operators.torch_formulas import accept_torch_style, registered_with_torch
from dispatch_flops.profile.cost import OpCost, Split

Formula = Callable[..., "OpCost | Split | int"]
ComputesIn = str | torch.dtype | Callable[[Mapping[str, Any]], str | torch.dtype | None]
F = TypeVar("F", bound=Formula)
Kind = Literal["formula", "pointwise", "reduction", "free"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How the cost of an operator's calls is found.

    kind: "formula", "pointwise" or "reduction" (the tables), or "free" (0 by declaration).
    note: the reason why an operator is free, or a table entry's cost per element.
    by_name: the formula takes its arguments under the schema's names.
    cacheable: the cost depends on shapes, dtypes and plain arguments only.
    moves: False if no element is read or written, as for an allocation.
    is_recorded: False for queries of a tensor's metadata and annotations, which appear in no
        profile.
    builtin: True for the package's own rules, False for the user's.
    computes_in: the dtype of the products, where operands and results are of another; or a
        function of the arguments and the result by name that returns it.
    """

    kind: Kind
    formula: Formula
    note: str = ""
    by_name: bool = False
    cacheable: bool = True
    moves: bool = True
    is_recorded: bool = True
    builtin: bool = True
    computes_in: ComputesIn | None = None

    @property
    def states_bytes(self) -> bool:
        """True if the formula states the bytes of every call, which may be 0."""
        is_free = self.kind == "free" and self.formula is not _nothing
        return is_free or has_stated_bytes(self.formula)

    def answer(
        self, op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> OpCost | Split | int:
        """Return the formula's result for a call of ``op`` that returned ``out``."""
        if not self.by_name:
            return self.formula(*args, out=out, **kwargs)
        schema = schema_of(op)
        names = (argument.name for argument in schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **kwargs, "out": out}
        # torch omits arguments that are equal to their defaults.
        omitted = {} if self.builtin else required_defaults(self.formula, schema)
        return self.formula(**{**omitted, **given})


class RuleReader(Protocol):
    """An object that caches rules."""

    def rules_changed(self) -> None:
        """Drop the cached rules."""


@dataclass(frozen=True, slots=True, eq=False)
class _Override:
    """The rules of one active ``overridden`` block, and the thread that entered it."""

    thread: int
    rules: Mapping[Any, Rule]


_BUILTIN: dict[Any, Rule] = {}
_USER: dict[Any, Rule] = {}
_OVERRIDES: list[_Override] = []  # of all threads, in the order of entry
_READERS: weakref.WeakSet[RuleReader] = weakref.WeakSet()
_readers_lock = threading.RLock()  # a set may not grow while another thread reads it
_changes = 0


def watch(reader: RuleReader) -> None:
    """Call ``reader.rules_changed()`` on every change of a rule, for as long as it lives."""
    with _readers_lock:
        _READERS.add(reader)


def changes() -> int:
    """Return how often rules have changed; the number grows before readers are called."""
    return _changes


def _notify_readers() -> None:
    global _changes
    _changes += 1
    with _readers_lock:
        readers = list(_READERS)
    for reader in readers:
        reader.rules_changed()


def register_flops(
    targets: Any,
    *,
    override: bool = False,
    by_name: bool = False,
    cacheable: bool = True,
    note: str = "",
    computes_in: ComputesIn | None = None,
) -> Callable[[F], F]:
    """Register the decorated function as the formula of an operator, or of several.

    The function is called as ``formula(*args, out=out, **kwargs)`` with the operator's own
    arguments and its result. It may read shapes, dtypes and layouts, never data. It returns an
    ``OpCost``, an int meaning FLOPs, or a ``Split`` of the cost among submodules and phases.
    Formulas written for ``torch.utils.flop_counter`` are accepted too. A name that a loaded
    library lacks is accepted with a warning.

    targets: ``torch.ops.lib.op`` (all overloads), ``torch.ops.lib.op.overload``, the result of
        ``torch.library.custom_op``, a higher-order operator, a Triton kernel, an ``nn.Module``
        class (each call then counts as one operator, and operators that its backward pass runs
        count as they are; a subclass needs a formula of its own), the name ``"lib::op"`` of an
        operator whose library may not be loaded yet, or a list of these.
    override: replace an existing formula instead of raising.
    by_name: pass every argument under its name in the schema. One formula can then serve
        operators with different argument orders, and names only the arguments that it reads. One
        that a call omits has the schema's default, or that of the formula's parameter. An
        operator's argument called ``out`` is replaced by the result.
    cacheable: pass False if the cost depends on more than shapes, dtypes and plain arguments.
    note: the cost in words for ``dispatch-flops ops``; by default taken from the docstring.
    computes_in: the dtype that the operator computes in, such as ``"int8"``, where it is not that
        of its tensors: a dynamically quantised layer takes and returns reals. Where it depends on
        the call, pass a function of the arguments by name, ``{"input": ..., "out": result}``, that
        returns it. Of a module class the names are those of its ``forward``, with ``self``.

    Raises, before anything is registered:
        DuplicateFormulaError: a target already has a formula and ``override`` is False.
        UnknownOperatorError: a target is not an operator, or has no schema for ``by_name``, or
            the list of targets is empty.
        FormulaError: the formula is not a function, no call of a target fits its parameters, or
            with ``by_name`` a parameter is not an argument of the operators, or ``computes_in``
            is not a dtype.

    Example::

        @register_flops(torch.ops.mylib.fused_mlp)
        def fused_mlp(x, w1, w2, *, out, **_):
            macs = x.shape[0] * (w1.numel() + w2.numel())
            return OpCost(macs=macs, flops=2 * macs)
    """
    keys = list(dict.fromkeys(to_keys(targets)))
    if by_name:
        _refuse_without_schema(keys)
    if computes_in is not None and not callable(computes_in):
        name_of_dtype(computes_in)

    def decorate(formula: F) -> F:
        module = str(getattr(formula, "__module__", ""))
        builtin = module.startswith("dispatch_flops.operators.formulas")
        if not builtin:  # torch's release may lack operators that have a built-in formula
            check_not_empty(keys)
        if not override:
            _refuse_duplicates(keys if builtin else _keys_replaced_by(keys))
        rule = Rule(
            kind="formula",
            formula=formula if builtin else _accepted(formula, keys, by_name=by_name),
            by_name=by_name,
            cacheable=cacheable,
            builtin=builtin,
            note=note,
            computes_in=computes_in,
        )
        if override and not builtin:
            _remove_user_rules(keys)
        add_rules(keys, rule, override=True)
        return formula

    return decorate


def _accepted(formula: Formula, keys: Iterable[Any], *, by_name: bool = False) -> Formula:
    """Return the user's formula as rules call it; raises FormulaError as ``register_flops``."""
    if not callable(formula):
        raise FormulaError(f"{formula!r:.60} is not a function; pass the formula itself")
    keys = list(keys)
    warn_of_misspelt(keys)
    accepted = accept_torch_style(formula)
    if accepted is formula:
        check_formula(formula, keys, by_name=by_name)
    return accepted


def add_rules(keys: Sequence[Any], rule: Rule, *, override: bool = False) -> None:
    """Register ``rule`` under all keys; raises DuplicateFormulaError as ``register_flops`` does."""
    if not override:
        _refuse_duplicates(keys)
    if keys:
        (_BUILTIN if rule.builtin else _USER).update(dict.fromkeys(keys, rule))
        _notify_readers()


def _refuse_duplicates(keys: Iterable[Any]) -> None:
    for key in keys:
        rule = _USER.get(key) or _BUILTIN.get(key)
        if rule is not None:
            raise DuplicateFormulaError(
                f"{name_of(key)} already has a {rule.kind} rule; "
                "pass override=True to replace it, or use overridden(...) to replace it in a block"
            )


def _keys_replaced_by(keys: Iterable[Any]) -> Iterator[Any]:
    """Yield every key whose rule a user's formula for ``keys`` would take precedence over."""
    for key in keys:
        yield key
        for overload in overloads_of(key):
            yield full_name(overload)
            if find(_USER, overload) is None and find(_BUILTIN, overload) is not None:
                yield from candidate_keys(overload)


def _refuse_without_schema(keys: Iterable[Any]) -> None:
    for key in keys:
        if not isinstance(key, str):
            raise UnknownOperatorError(
                f"{name_of(key)} has no schema that names its arguments; omit by_name"
            )


def _remove_user_rules(keys: Iterable[Any]) -> None:
    """Remove the user's rules that would take precedence over rules for ``keys``."""
    for key in list(_keys_replaced_by(keys)):
        _USER.pop(key, None)


def unregister_flops(targets: Any) -> None:
    """Remove formulas that ``register_flops`` added; the built-in formulas apply again.

    targets: as for ``register_flops``; each one as it was registered.

    Raises UnknownOperatorError if a target is not an operator or has no formula of the user's, or
    the list of targets is empty; nothing is removed then. Built-in formulas cannot be removed, only
    replaced.

    Example::

        register_flops(torch.ops.mylib.fused_mlp)(lambda x, w1, w2, *, out, **_: 2 * x.numel())
        unregister_flops(torch.ops.mylib.fused_mlp)  # such as to run a notebook's cell again
    """
    keys = list(dict.fromkeys(to_keys(targets)))
    check_not_empty(keys)
    for key in keys:
        if key not in _USER:
            raise UnknownOperatorError(
                f"{name_of(key)} has no formula to remove: none was registered under this name"
                + ("; its built-in formula stays" if key in _BUILTIN else "")
            )
    for key in keys:
        del _USER[key]
    _notify_readers()


@contextlib.contextmanager
def overridden(mapping: Mapping[Any, Formula]) -> Iterator[None]:
    """Replace registered formulas inside the block.

    mapping: ``{operator: formula}``, with operators and formulas as ``register_flops`` takes
        them. A formula also replaces those of more exact keys: one for ``torch.ops.aten.max``
        applies to all its overloads.

    Counters that are running use the replacement for calls inside the block: those of the thread
    that entered it, of autograd on its behalf, and of threads that joined a counter of that thread
    and have no replacement of their own. Blocks of other threads are independent. Blocks nest, and
    a replacement ends with its block, also after an exception.

    Raises UnknownOperatorError if ``mapping`` is not a mapping or a key is not an operator, and
    FormulaError as ``register_flops`` does.

    Example::

        with overridden({torch.ops.aten.gelu: lambda x, *_, out, **__: x.numel()}):
            model(x)
    """
    override = _Override(threading.get_ident(), rules_from(mapping))
    _OVERRIDES.append(override)
    _notify_readers()
    try:
        yield
    finally:
        _OVERRIDES.remove(override)
        _notify_readers()


def is_overridden(op: Any) -> bool:
    """Return True if an ``overridden`` block is active in any thread with a rule for ``op``."""
    return any(find(override.rules, op) is not None for override in list(_OVERRIDES))


def _overrides_in(*threads: int) -> Iterator[Mapping[Any, Rule]]:
    """Yield the rules of active blocks: of the first thread before others', inner before outer."""
    active = list(reversed(_OVERRIDES))
    for thread in dict.fromkeys(threads):
        yield from (override.rules for override in active if override.thread == thread)


def rules_from(mapping: Mapping[Any, Formula]) -> dict[Any, Rule]:
    """Return the rules of a ``{operator: formula}`` mapping; raises as ``overridden`` does."""
    if not isinstance(mapping, Mapping):
        raise UnknownOperatorError(
            f"formulas are given as an object of type {type(mapping).__name__}; pass a dict, "
            "{operator: formula}"
        )
    return {
        key: Rule(kind="formula", formula=_accepted(formula, [key]), builtin=False)
        for target, formula in mapping.items()
        for key in to_keys(target)
    }


def own_rules(custom_mapping: Mapping[Any, Formula] | None) -> dict[Any, Rule]:
    """Return the rules of one counter's ``custom_mapping``, whose name errors give."""
    if custom_mapping is None:
        return {}
    try:
        return rules_from(custom_mapping)
    except (UnknownOperatorError, FormulaError) as error:
        raise type(error)(f"custom_mapping: {error}") from None


def lookup(
    op: Any, extra: Mapping[Any, Rule] | None = None, *, home: int | None = None
) -> Rule | None:
    """Return the rule of an operator, or None.

    extra: one counter's own rules, which come first.
    home: the thread that entered the counter, if another one asks.

    Then come the active ``overridden`` blocks of this thread and of ``home``, the user's rules, the
    package's rules, and the formulas that the user registered with ``torch.utils.flop_counter``.
    Within each, the keys are tried in this order: the overload, all overloads of the operator, all
    those of the functional operator of an in-place one.
    """
    this = threading.get_ident()
    overrides = _overrides_in(this, this if home is None else home)
    for rules in (extra or {}, *overrides, _USER, _BUILTIN):
        rule = find(rules, op)
        if rule is not None:
            return rule
    formula = registered_with_torch(op)
    if formula is None:
        return None
    note = "registered with torch.utils.flop_counter"
    return Rule(kind="formula", formula=formula, note=note, builtin=False)


def keys_with_formulas(*extras: Mapping[Any, Rule]) -> set[Any]:
    """Return the keys that have a formula of the user's.

    extras: counters' own rules.
    """
    layers = (_USER, *(override.rules for override in list(_OVERRIDES)), *extras)
    return {key for rules in layers for key in list(rules)}


def formulas_in_force() -> Hashable:
    """Return a value that differs if other formulas of the user's apply in this thread."""
    changes, value = getattr(_in_force, "known", (-1, None))
    if changes != _changes:
        changes, layers = _changes, (*_overrides_in(threading.get_ident()), _USER)
        value = tuple(
            frozenset((key, rule.kind, rule.formula) for key, rule in dict(rules).items())
            for rules in layers
        )
        _in_force.known = changes, value
    return value


_in_force = threading.local()  # known: the number of changes, and the value then


def module_rules(extra: Mapping[Any, Rule]) -> dict[type, Rule]:
    """Return the rules of ``nn.Module`` classes; those in ``extra`` replace the registry's."""
    overrides = reversed(list(_overrides_in(threading.get_ident())))
    layers = (_USER, *overrides, extra)
    return {
        key: rule for rules in layers for key, rule in dict(rules).items() if isinstance(key, type)
    }


def formula_of(target: Any, extra: Mapping[Any, Rule]) -> Rule | None:
    """Return the rule of the user's for an operator or a module class, or None."""
    if isinstance(target, type):
        return module_rules(extra).get(target)
    rule = lookup(target, extra)
    return None if rule is None or rule.builtin else rule


def rules() -> dict[str, Rule]:
    """Return the rule that applies outside ``overridden`` by each operator's name, sorted.

    Operators of the package's rules that the installed release of torch lacks are left out.
    """
    absent = lacking(_BUILTIN)
    builtin = {key: rule for key, rule in _BUILTIN.items() if key not in absent}
    return dict(sorted((name_of(key), rule) for key, rule in {**builtin, **_USER}.items()))


def _nothing(*_args: Any, **_kwargs: Any) -> OpCost:
    return OpCost()


def declare_free(
    targets: Iterable[Any],
    reason: str,
    *,
    moves: bool = True,
    is_recorded: bool = True,
    formula: Formula = _nothing,
) -> None:
    """Declare that operators do no arithmetic.

    reason: why they are free, as ``dispatch-flops ops`` lists it.
    moves, is_recorded: see ``Rule``.
    formula: returns the bytes, where they are not those of all input and output tensors.
    """
    rule = Rule(kind="free", formula=formula, note=reason, moves=moves, is_recorded=is_recorded)
    add_rules(to_keys(list(targets)), rule)
