"""Targets that are Python objects: ``package.module:factory`` and ``file.py:factory``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from dispatch_flops.cli.targets.inputs import Inputs, Variables, as_inputs
from dispatch_flops.cli.targets.source import as_model, blame
from dispatch_flops.errors import TargetError


@dataclass(frozen=True, slots=True)
class Factory:
    """A function or class that makes a model, or a model that is there already."""

    label: str
    found: Any

    @property
    def variables(self) -> frozenset[str] | None:
        return frozenset() if isinstance(self.found, nn.Module) else accepted(self.found)

    def build(self, variables: Variables) -> tuple[nn.Module, Inputs | None]:
        if isinstance(self.found, nn.Module):
            return self.found, None
        made = call(self.label, self.found, variables)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            return made[0], as_inputs(made[1])
        return as_model(made, self.label), None


def locate(target: str) -> Any:
    """The object that ``package.module:name`` or ``file.py:name`` names; names may have dots.

    Raises TargetError where there is none, or where importing it raises.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        example = f"{target.rstrip(':')}:NAME" if target else "package.module:NAME"
        raise TargetError(
            f"target {target!r} names no factory: write {example}, where NAME is a function that "
            "returns the model, an nn.Module class or a model"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise TargetError(f"{where} has no {name!r}{_similar(part, found)}")
        found = getattr(found, part)
    return found


def find(target: str) -> Factory:
    """The factory that a target names; raises TargetError where it cannot be called."""
    found = locate(target)
    if not callable(found):
        raise TargetError(
            f"{target} is of type {type(found).__name__}; it must be a function that returns the "
            "model, an nn.Module class or a model"
        )
    return Factory(target, found)


def accepted(function: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the keyword arguments that it takes; ``None`` where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keywords)


def call(label: str, function: Callable[..., Any], variables: Variables) -> Any:
    """The result of the function, given those of the variables that it takes."""
    names = accepted(function)
    given = {name: v for name, v in variables.items() if names is None or name in names}
    missing = [name for name in _required(function) if name not in given]
    if missing:
        raise TargetError(
            f"{label} needs {', '.join(missing)}: give it with --set {missing[0]}=..., or name a "
            "function without required arguments"
        )
    try:
        return function(**given)
    except (Exception, SystemExit) as error:
        blame(f"{label} raised", error)


def _required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _from_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"there is no module {error.name!r} here or installed; for a file write "
                "path/to/file.py:NAME"
            ) from None
        blame(f"importing {name} raised", error)
    except (Exception, SystemExit) as error:
        blame(f"importing {name} raised", error)


def _from_file(path: Path) -> ModuleType:
    """The file as a module; its folder becomes importable, as when Python runs it."""
    if not path.is_file():
        raise TargetError(f"there is no file {str(path)!r}")
    name = f"dispatch_flops_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        blame(f"importing {path} raised", error)
    return module


def _similar(name: str, holder: Any) -> str:
    public = [other for other in dir(holder) if not other.startswith("_")]
    close = difflib.get_close_matches(name, public, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else ""
