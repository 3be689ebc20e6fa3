"""Answer every call again with other numbers that count as the same ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from dispatch_flops.operators.numbers import NumberKeys, number_keys
from dispatch_flops.operators.registry import Rule

PROBES: Mapping[type, tuple[Any, ...]] = {
    int: (0, 1, 2, -3, 7),
    float: (0.0, 0.5, 1.0, 2.0, 2.5, -3.0, 1e-5, math.inf),
    complex: (0j, 2 + 1j),
}


def probe_every_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert on every answer of a rule that no number decides it unless it is declared."""
    answer = Rule.answer

    def probed(rule: Rule, op: Any, args: Any, kwargs: Any, out: Any) -> Any:
        result = answer(rule, op, args, kwargs, out)
        for others, named in _with_other_numbers(op, rule, args, kwargs):
            again = answer(rule, op, others, named, out)
            assert again == result, f"{op}{others} {named}: {again}, {args} {kwargs}: {result}"
        return result

    monkeypatch.setattr(Rule, "answer", probed)


def _with_other_numbers(op: Any, rule: Rule, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    keys = number_keys(op, rule)
    numbers = _types_of_numbers((*args, *kwargs.values()), keys)
    for kind in (PROBES.keys() - keys.by_value).intersection(numbers):
        for probe in PROBES[kind]:
            if probe in keys.told_apart:
                continue

            def swap(value: Any, probe: Any = probe, kind: type = kind) -> Any:
                if value.__class__ is kind and value not in keys.told_apart:
                    return probe
                if isinstance(value, (list, tuple)) and keys.in_lists:
                    return [swap(item) for item in value]
                return value

            yield tuple(map(swap, args)), {name: swap(value) for name, value in kwargs.items()}


def _types_of_numbers(values: Iterable[Any], keys: NumberKeys) -> Iterator[type]:
    """Yield the types of the numbers that others may stand for: most calls have none."""
    for value in values:
        if isinstance(value, (list, tuple)) and keys.in_lists:
            yield from _types_of_numbers(value, keys)
        elif value.__class__ in PROBES and value not in keys.told_apart:
            yield value.__class__
