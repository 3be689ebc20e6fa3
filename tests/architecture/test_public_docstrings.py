"""Public docstrings say what a caller must know: parameters, units and errors."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers.public_names import modules, public_objects, values

PUBLIC = public_objects()
# Documented once, in the docstring of their room, because they mean the same everywhere.
SHARED = {
    "dispatch_flops.analysis": ("profile", "root", "node", "phase", "machine", "ops"),
    "dispatch_flops.renderers": ("profile", "cluster", "view"),
}
MADE_BY_A_FUNCTION = ("compile.CountingBackend",)  # which documents the parameters
UNITS = ("_s", "_bytes", "per_s", "seconds", "bytes")


def own_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public methods and properties that users call: ``on_*`` are called by trainers."""
    for name, member in vars(cls).items():
        function = getattr(member, "fget", None) or getattr(member, "__func__", member)
        function = getattr(function, "func", function)  # of a cached property
        if not name.startswith(("_", "on_")) and inspect.isfunction(function):
            yield name, function


def functions() -> dict[str, tuple[Callable[..., Any], str]]:
    """Return ``{name: (function, the docstrings that its reader sees)}``."""
    found = {}
    for name, thing in PUBLIC.items():
        if inspect.isfunction(thing):
            found[name] = (thing, thing.__doc__ or "")
            continue
        about = thing.__doc__ or ""
        for method, function in own_methods(thing):
            found[f"{name}.{method}"] = (function, f"{function.__doc__ or ''}\n{about}")
        is_built_by_users = name not in MADE_BY_A_FUNCTION and not dataclasses.is_dataclass(thing)
        if is_built_by_users and inspect.isfunction(vars(thing).get("__init__")):
            found[f"{name}.__init__"] = (thing.__init__, about)
    return found


FUNCTIONS = functions()


def is_named(name: str, text: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def shared_with(name: str) -> tuple[str, ...]:
    room = f"dispatch_flops.{name.partition('.')[0]}"
    is_of_analysis = PUBLIC.get(name) in vars(modules()["dispatch_flops.analysis"]).values()
    return SHARED.get("dispatch_flops.analysis" if is_of_analysis else room, ())


def is_documented(function: Callable[..., Any]) -> bool:
    return function.__name__ == "__init__" or bool((function.__doc__ or "").strip())


def raised_by(function: Callable[..., Any]) -> set[str]:
    """Return the names of the exceptions that the function's own statements raise."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {
        node.exc.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
    }


def test_every_public_object_and_method_has_a_docstring() -> None:
    without = [name for name, thing in PUBLIC.items() if not (thing.__doc__ or "").strip()]
    without += [name for name, (function, _) in FUNCTIONS.items() if not is_documented(function)]
    assert without == []


def test_types_of_public_values_exist_and_have_a_docstring() -> None:
    for module, names in values().items():
        assert [n for n in names if not getattr(sys.modules[module], n).__doc__] == []


def test_docstrings_name_every_parameter() -> None:
    left_out = [
        f"{name}: {parameter}"
        for name, (function, text) in FUNCTIONS.items()
        for parameter in inspect.signature(function).parameters
        if parameter not in ("self", "cls", *shared_with(name))
        and not parameter.startswith("_")
        and not is_named(parameter, text)
    ]
    assert left_out == []


@pytest.mark.parametrize("room", SHARED)
def test_docstring_of_a_room_describes_the_shared_parameters(room: str) -> None:
    text = modules()[room].__doc__ or ""
    assert [p for p in SHARED[room] if not re.search(rf"^{p}\b.*: ", text, re.MULTILINE)] == []


def test_docstrings_name_the_errors_that_are_raised() -> None:
    left_out = [
        f"{name}: {error}"
        for name, (function, text) in FUNCTIONS.items()
        for error in raised_by(function)
        if not is_named(error, text)
    ]
    assert left_out == []


def test_fields_that_are_not_whole_numbers_have_a_unit_or_a_description() -> None:
    without = [
        f"{name}.{field.name}"
        for name, thing in PUBLIC.items()
        if dataclasses.is_dataclass(thing)
        for field in dataclasses.fields(thing)
        if "float" in str(field.type)
        and not field.name.endswith(UNITS)
        and not is_named(field.name, thing.__doc__ or "")
    ]
    assert without == []
