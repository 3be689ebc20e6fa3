"""Which values that are passed to a call are taken to cost the same."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dispatch_flops.profilers.value_description import OpaqueValueError, describe


class Number(int):
    pass


class Text(str):
    __slots__ = ()


class Listed(list[Any]):
    pass


class Mapped(dict[str, Any]):
    pass


class Users(collections.UserDict[str, Any]):
    pass


class Rows(collections.UserDict[str, Any]):
    """Iterates over its rows, as a TensorDict does, and not over its keys."""

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*self.data.values(), strict=True))


class Slotted:
    __slots__ = ("__hidden", "shown")

    def __init__(self, shown: Any, hidden: Any) -> None:
        self.shown, self.__hidden = shown, hidden


class DerivedFromSlotted(Slotted):
    """Has a ``__dict__`` as well, which does not hold the slots."""


@dataclasses.dataclass
class Batch:
    x: Any

    def method(self) -> Any:
        return self.x


class Mode(enum.Flag):
    A = 1
    B = 2


def with_attribute(value: Any, x: Any) -> Any:
    value.x = x
    return value


def adding(number: Any) -> Callable[[Any], Any]:
    return lambda y: y + number


def with_default(number: Any) -> Callable[[Any], Any]:
    def function(y: Any, number: Any = number) -> Any:
        return y

    return function


ONE, TWO = torch.ones(1), torch.ones(2)
A, B = nn.Linear(2, 3), nn.Linear(2, 3)

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "shapes": (ONE, TWO),
    "whole numbers": (1, 2),
    "number and flag": (1, True),
    "float 0": (0.0, 0.5),
    "number of another class": (Number(1), Number(2)),
    "text of another class": (Text("a"), Text("b")),
    "attribute of a number": (with_attribute(Number(1), ONE), with_attribute(Number(1), TWO)),
    "attribute of a list": (with_attribute(Listed([1]), ONE), with_attribute(Listed([1]), TWO)),
    "entries of a list": (Listed([1]), Listed([2])),
    "attribute of a dict": (with_attribute(Mapped(), ONE), with_attribute(Mapped(), TWO)),
    "entries of a dict": (Mapped(a=1), Mapped(a=2)),
    "entries of a mapping": (Users(a=1), Users(a=2)),
    "entries of a mapping of columns": (Rows(a=ONE), Rows(a=TWO)),
    "order of a dict": ({"a": 1, "b": 1}, {"b": 1, "a": 1}),
    "slots": (Slotted(ONE, ONE), Slotted(TWO, ONE)),
    "hidden slots": (Slotted(ONE, ONE), Slotted(ONE, TWO)),
    "inherited slots": (DerivedFromSlotted(ONE, ONE), DerivedFromSlotted(TWO, ONE)),
    "flags": (Mode.A, Mode.A | Mode.B),
    "modules": (A, B),
    "lambdas": (lambda y: y, lambda y: y + y),
    "enclosed values": (adding(1), adding(2)),
    "default values": (with_default(1), with_default(2)),
    "functions of torch": (torch.sum, torch.mean),
    "partials of functions": (functools.partial(torch.sum), functools.partial(torch.mean)),
    "partials of arguments": (functools.partial(adding, 1), functools.partial(adding, 2)),
    "methods of objects": (Batch(1).method, Batch(2).method),
    "classes": (Batch, Slotted),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_may_cost_different_amounts_are_told_apart(name: str) -> None:
    first, second = DIFFERENT[name]
    assert describe(first) == describe(first)
    assert describe(first) != describe(second)
    assert describe([{"a": first}]) != describe([{"a": second}])
    hash(describe(first))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(2, 3), torch.ones(2, 3)),
        (0.1, 0.2),  # the weight of a loss that is annealed
        (float("nan"), float("inf")),
        ({"weight": 1e-3}, {"weight": 2e-3}),
        (Batch(0.1), Batch(0.2)),
        (Batch(torch.zeros(2)), Batch(torch.ones(2))),
        (adding(TWO), adding(torch.zeros(2))),
        (Slotted(1, 2), Slotted(1, 2)),
        (Batch(1).method, Batch(1).method),
        (functools.partial(torch.sum, dim=0), functools.partial(torch.sum, dim=0)),
    ],
)
def test_values_that_cost_the_same_are_equal(first: Any, second: Any) -> None:
    assert describe(first) == describe(second)


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "value",
    [
        object(),
        iter([1]),
        {1, 2},
        type("DerivedSet", (set,), {})([1]),
        collections.deque([1]),
        threading.Lock(),
        torch.ones(2).to_sparse(),
        torch.nested.nested_tensor([ONE, TWO], layout=torch.jagged),
        endless(),
        [[1] * 200] * 200,
        Batch({1}),
        adding(iter([1])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_value_that_cannot_be_described_in_full_is_opaque(value: Any) -> None:
    with pytest.raises(OpaqueValueError):
        describe(value)


def test_child_that_refers_to_its_parent_is_described() -> None:
    """As the parts of a graph's data do."""
    parents = [with_attribute(Users(a=x), None) for x in (ONE, TWO, TWO)]
    for parent in parents:
        parent.x = with_attribute(Users(parent.data), weakref.ref(parent))
    found = [describe(parent) for parent in parents]
    assert found[0] != found[1] == found[2]


def test_batch_of_a_tokenizer_is_described_by_its_tensors() -> None:
    """It holds compiled objects as well, which tell where in the text each token was."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    letters = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    split = tokenizers.Tokenizer(letters)
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenize = PreTrainedTokenizerFast(tokenizer_object=split)
    batches = [tokenize([text], return_tensors="pt") for text in ("a b", "b a", "b a a")]
    assert all(isinstance(one.encodings[0], tokenizers.Encoding) for one in batches)
    found = [describe(batch) for batch in batches]
    assert found[0] == found[1] != found[2]
