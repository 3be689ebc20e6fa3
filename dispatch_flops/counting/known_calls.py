"""Costs of the calls of one operator that are like earlier ones.

A call is like another if its tensors have the same types, dtypes, devices, shapes and strides, and
its other arguments decide the cost alike. One comparison in C++ tells this of all tensors, which
takes less time than reading the shapes of two. What it cannot tell is looked up by signature.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from torch import Tensor
from torch.nn import Parameter

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.counting.signatures import call_signature
from dispatch_flops.counting.torch_functions import run_and_find
from dispatch_flops.operators.costing import CallCost
from dispatch_flops.operators.numbers import BY_VALUE, NUMBERS, NumberKeys

Comparison = Callable[[Any], bool]  # of a call's arguments with those of an earlier call

_AT_MOST = 4  # comparisons with calls of one kind; a signature takes as long as ten
_IS_NESTED = attrgetter("is_nested")
_share_storage = _torch.share_storage
_OPTIONAL = re.compile(r"Optional\[(.*)\]")

_TENSOR_TYPES = frozenset((Tensor, Parameter))  # not those of the program, with values to compare
_TENSORS = "List[Tensor]"
_WHOLE = frozenset(("int", "SymInt", "List[int]", "List[SymInt]"))
_COMPARABLE = _WHOLE | frozenset(
    (
        *("Tensor", _TENSORS, "number", "bool", "float", "str", "List[bool]", "List[float]"),
        *("ScalarType", "Layout", "Device", "MemoryFormat"),
    )
)


def _is_unlike(args: Any) -> bool:
    return False


@dataclass(slots=True, eq=False, kw_only=True)
class KnownCall:
    """A call, and what later ones like it cost.

    cost: what it costs. run: runs the operator for calls that are
    like it, where no mode for ``__torch_function__`` is in force; None: only the operator does.
    is_like: compares the arguments of another call with its own. The first is a tensor that is not
    nested; those given by keyword come last. keywords: their names. params: positions of parameters
    among the arguments. then: what followed when it was last found by a search.
    """

    cost: CallCost
    run: Callable[..., Any] | None = None
    is_like: Comparison = _is_unlike
    keywords: tuple[str, ...] = ()
    params: tuple[int, ...] = ()
    then: KnownCall = field(init=False)

    def __post_init__(self) -> None:
        self.then = self

    def to_be_run(self, func: OpOverload) -> None:
        """Let the next call find out which function of torch runs the operator."""

        def run(*args: Any, **kwargs: Any) -> Any:
            out, found = run_and_find(func, args, kwargs)
            self.run = found or run
            return out

        self.run = run


@dataclass(slots=True, eq=False, kw_only=True)
class Pair(KnownCall):
    """A call of two tensors and nothing else.

    is_same: compares two tensors with these. They share memory only if the address of the second,
    less that of the first, is between ``low`` and ``high``.
    """

    is_same: Callable[..., bool]
    low: int
    high: int


class CallRunner(Protocol):
    """What decides how calls run that are known by comparison."""

    def prepare(self, known: KnownCall, numbers: NumberKeys) -> None:
        """Set ``known.run``. numbers: those that calls like it have in common."""


_NOTHING = CallCost("", "unknown")


class KnownCalls:
    """Costs of the calls of an operator, by signature and by comparison.

    by_signature: a call of each signature (see ``call_signature``).
    latest: the last call that was found by comparison. Programs repeat themselves: what came after
        it before, ``latest.then``, is compared first.
    takes_tensors: what comes first in a call is a tensor, and no argument is a list of tensors.
    runner: see ``run_by``; None: calls run the operator alone.
    """

    def __init__(self, func: Any = None, numbers: NumberKeys = BY_VALUE) -> None:
        self.by_signature: dict[Any, KnownCall] = {}
        self.runner: CallRunner | None = None
        self.latest = KnownCall(cost=_NOTHING)
        self._func = func
        self._numbers = numbers
        # By the shape of the first tensor, the lengths of lists and the names of keyword arguments.
        self._by_kind: dict[Any, list[KnownCall]] = {}
        self._attempts: defaultdict[Any, int] = defaultdict(int)
        self._is_comparable = isinstance(func, OpOverload) and _is_comparable_call(func)
        self.takes_tensors = self._is_comparable and not _takes_lists(func)
        self._keywords = _comparable_keywords(func) if self._is_comparable else frozenset()

    def clear(self) -> None:
        """Forget all calls."""
        self.by_signature.clear()
        self._forget_comparisons()

    def run_by(self, runner: CallRunner) -> None:
        """Have ``runner`` decide what runs the calls that are known by comparison."""
        self.runner = runner
        self._forget_comparisons()

    def _forget_comparisons(self) -> None:
        self.latest = KnownCall(cost=_NOTHING)
        self._by_kind.clear()
        self._attempts.clear()

    def find(self, args: Any, kwargs: Any, used_params: set[int]) -> KnownCall:
        """Return the earlier call that a call is like.

        Adds the ids of parameters among the arguments to ``used_params``. Raises KeyError for
        another call, AttributeError for some of these, and what ``call_signature`` raises.
        """
        if not self._is_comparable or (kwargs and not self._keywords.issuperset(kwargs)):
            return self.by_signature[self.signature(args, kwargs, used_params)]
        given = args if self.takes_tensors else _flattened(args)
        keywords: tuple[str, ...] = ()
        if kwargs:
            given, keywords = (*given, *kwargs.values()), tuple(kwargs)
        shape = given[0].shape  # raises for a nested tensor
        known = self.latest.then
        if not self.takes_tensors or known.keywords != keywords or not known.is_like(given):
            lengths = () if self.takes_tensors else [len(a) for a in args if a.__class__ is list]
            kind = (shape, *lengths, *keywords)
            for known in self._by_kind.get(kind, ()):
                if known.is_like(given):
                    self.latest.then = known
                    break
            else:
                return self._find_by_signature(kind, args, kwargs, given, used_params)
        self.latest = known
        for index in known.params:
            used_params.add(id(given[index]))
        return known

    def signature(self, args: Any, kwargs: Any, used_params: set[int]) -> Any:
        """Return the signature of a call; see ``call_signature``."""
        return call_signature(args, kwargs, used_params, self._numbers)

    def _find_by_signature(
        self, kind: Any, args: Any, kwargs: Any, given: Any, used_params: set[int]
    ) -> KnownCall:
        """Find a call that is like none with which it was compared, and note it for comparisons.

        given: its arguments, the keyword ones last.
        """
        known = self.by_signature[self.signature(args, kwargs, used_params)]
        if self._attempts[kind] < _AT_MOST:
            self._attempts[kind] += 1
            self._add(kind, given, known.cost, tuple(kwargs or ()))
        return known

    def _add(self, kind: Any, args: Any, cost: Any, keywords: tuple[str, ...]) -> None:
        """Note a call for later comparisons, if they can tell its cost.

        Where tensors share a storage, the cost depends on what they show of it. The call has a
        signature, so no tensor is nested.
        """
        indices, repeats = _distinct_tensors(args)
        tensors = tuple([args[index] for index in indices])
        if _TENSOR_TYPES.issuperset(map(type, tensors)) and not _share_storage(tensors):
            values = self._comparison_of_values(args) if len(indices) < len(args) else None
            params = tuple([index for index in indices if args[index].__class__ is Parameter])
            is_same, known = _torch.tensor_comparison(tensors), KnownCall(cost=cost)
            if len(indices) == 1:
                is_like = _compare_one(is_same, len(args), values)
            elif len(indices) == 2:
                low, high = -_reach(tensors[1]), _reach(tensors[0])
                pair = Pair(cost=cost, is_same=is_same, low=low, high=high)
                is_like = _compare_two(pair, len(args), values, indices[1], tensors[1].__class__)
                if len(args) == 2 and not params and not keywords:
                    known = pair
            else:
                is_like = _compare_many(is_same, len(args), values, indices)
            if repeats:
                is_like = _with_repeats(is_like, repeats)
            known.is_like, known.params, known.keywords = is_like, params, keywords
            if self.runner is None:
                known.to_be_run(self._func)
            else:
                self.runner.prepare(known, self._numbers)
            self._by_kind.setdefault(kind, []).append(known)

    def _comparison_of_values(self, args: Any) -> Comparison:
        """Return what compares the arguments that are not tensors."""
        types, values = [], []
        for index, arg in enumerate(args):
            kind = arg.__class__
            if kind is Tensor or kind is Parameter:
                continue
            is_free = kind in NUMBERS and kind not in self._numbers.by_value
            types.append((index, kind))
            if not is_free or self._numbers.told_apart:
                values.append(index)
        pick = itemgetter(*values) if values else len
        known = pick(args)

        def has_same_values(args: Any) -> bool:
            for index, kind in types:
                if args[index].__class__ is not kind:
                    return False
            return bool(pick(args) == known)

        return has_same_values


def _distinct_tensors(args: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the positions of the tensors, and of each that is given again with its first one."""
    firsts: dict[int, int] = {}
    repeats = []
    for index, arg in enumerate(args):
        if isinstance(arg, Tensor):
            first = firsts.setdefault(id(arg), index)
            if first != index:
                repeats.append((index, first))
    return [*firsts.values()], repeats


# What follows returns functions that compare the arguments of a call with those of an earlier one.
# is_same compares the tensors, and values the other arguments; arity is the number of all. To
# compare a nested tensor ends the process, or destroys the interpreter's state, although its
# operator may have no kernel for nested tensors: it has not run yet. The first is not one.


def _compare_one(is_same: Callable[..., bool], arity: int, values: Comparison | None) -> Comparison:
    def is_like(args: Any) -> bool:
        return len(args) == arity and is_same(args[0]) and (values is None or values(args))

    return is_like


def _compare_two(
    pair: Pair, arity: int, values: Comparison | None, index: int, kind: type[Tensor]
) -> Comparison:
    """Compare with a call of two tensors; the second is of type ``kind``, at position ``index``."""
    is_same, low, high = pair.is_same, pair.low, pair.high

    def is_like(args: Any) -> bool:
        if len(args) != arity or args[index].__class__ is not kind or args[index].is_nested:
            return False
        first, second = args[0], args[index]
        if not is_same(first, second) or not (values is None or values(args)):
            return False
        if not low < second.data_ptr() - first.data_ptr() < high:
            return True
        return not _share_storage((first, second))  # the addresses of meta tensors are 0

    return is_like


def _compare_many(
    is_same: Callable[..., bool],
    arity: int,
    values: Comparison | None,
    indices: Sequence[int],
) -> Comparison:
    """Compare with a call of three tensors or more, at the positions ``indices``."""
    pick = itemgetter(*indices)

    def is_like(args: Any) -> bool:
        if len(args) != arity:
            return False
        tensors = pick(args)
        try:
            if True in map(_IS_NESTED, tensors):
                return False
        except AttributeError:  # what is not a tensor
            return False
        if not is_same(*tensors) or not (values is None or values(args)):
            return False
        return not _share_storage(tensors)

    return is_like


def _with_repeats(is_like: Comparison, repeats: Sequence[tuple[int, int]]) -> Comparison:
    """Compare with a call that is given tensors again: as the others, at the same positions."""

    def is_like_with_repeats(args: Any) -> bool:
        return is_like(args) and all(args[index] is args[first] for index, first in repeats)

    return is_like_with_repeats


def _reach(tensor: Tensor) -> int:
    """Return the number of bytes from a tensor's first element to the end of its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return (last + 1) * tensor.itemsize if tensor.numel() else 0


def _is_comparable_call(func: OpOverload) -> bool:
    """Return True if calls of ``func`` can be compared: tensors come first, then plain values."""
    arguments = [a for a in _torch.schema_of(func).arguments if not a.kwarg_only]
    kinds = [_kind(argument) for argument in arguments]
    return kinds[:1] in (["Tensor"], [_TENSORS]) and _COMPARABLE.issuperset(kinds)


def _takes_lists(func: OpOverload) -> bool:
    return any(_kind(argument) == _TENSORS for argument in _torch.schema_of(func).arguments)


def _flattened(args: Any) -> tuple[Any, ...]:
    """Return the arguments with tensors in the place of lists of tensors.

    A number in a list counts by its value where one outside may not: other lists stay.
    """
    parts = [arg if _is_list_of_tensors(arg) else (arg,) for arg in args]
    return tuple(chain.from_iterable(parts))


def _is_list_of_tensors(arg: Any) -> bool:
    """Return True for a list of tensors, some of which may be None, as in ``x[:, indices]``."""
    return arg.__class__ is list and bool(arg) and (arg[0] is None or isinstance(arg[0], Tensor))


def _comparable_keywords(func: OpOverload) -> frozenset[str]:
    """Return the names of keyword-only arguments that can be compared."""
    arguments = [a for a in _torch.schema_of(func).arguments if a.kwarg_only]
    return frozenset(a.name for a in arguments if _kind(a) in _COMPARABLE - {_TENSORS})


def _kind(argument: Any) -> str:
    return _OPTIONAL.sub(r"\1", str(argument.real_type))


def differs_in_numbers(func: OpOverload) -> bool:
    """Return True if calls differ in one tensor and in whole numbers, all of which are given.

    No overload takes other arguments of these types: a function of torch that runs one call of
    such a view runs those of all shapes and numbers.
    """
    arguments = _torch.schema_of(func).arguments
    kinds = [str(argument.real_type) for argument in arguments]
    is_variable = any(a.kwarg_only or a.has_default_value() for a in arguments)
    return kinds[:1] == ["Tensor"] and _WHOLE.issuperset(kinds[1:]) and not is_variable
