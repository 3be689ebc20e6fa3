"""Targets that are Python objects: ``package.module:factory`` and ``file.py:factory``."""

from __future__ import annotations

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
from dispatch_flops.cli.targets.source import raise_target_error, require_file, require_model
from dispatch_flops.errors import TargetError
from dispatch_flops.profile.suggestions import did_you_mean

MODEL = "a function that returns the model, an nn.Module class or a model"
INPUTS = "a function that returns the inputs"


@dataclass(frozen=True, slots=True)
class Factory:
    """A function or class that returns a model or inputs, or a model itself.

    label: the text that names it, for messages.
    """

    label: str
    found: Any

    @property
    def variables(self) -> frozenset[str] | None:
        return frozenset() if isinstance(self.found, nn.Module) else _keywords(self.found)

    def build(self, variables: Variables) -> tuple[nn.Module, Inputs | None]:
        if isinstance(self.found, nn.Module):
            return self.found, None
        made = self.call(variables)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
            return made[0], as_inputs(made[1])
        return require_model(made, self.label), None

    def call(self, variables: Variables) -> Any:
        """Call the function with those of the variables that it takes, and return the result.

        Raises TargetError if it raises, or if a required argument is missing.
        """
        names = _keywords(self.found)
        given = {name: v for name, v in variables.items() if names is None or name in names}
        missing = [name for name in _required(self.found) if name not in given]
        if "mesh" in missing:
            raise TargetError(
                f"{self.label} is a job: it has a parameter mesh; use dispatch-flops simulate, or "
                "torchrun and --mesh"
            )
        if missing:
            raise TargetError(
                f"{self.label} needs {', '.join(missing)}; give it with --set {missing[0]}=..., or "
                "name a function without required arguments"
            )
        try:
            return self.found(**given)
        except (Exception, SystemExit) as error:
            raise_target_error(self.label, error)


def find_factory(target: str, expected: str) -> Factory:
    """Return the factory that ``package.module:name`` or ``file.py:name`` names.

    The name may have dots. expected: ``MODEL`` or ``INPUTS``, what to name instead in an error.
    Raises TargetError if there is no such object, it is not callable, or importing it fails.
    """
    found = _find_object(target, expected)
    if not callable(found):
        raise TargetError(f"{target} is a value of type {type(found).__name__}; name {expected}")
    return Factory(target, found)


def _find_object(target: str, expected: str) -> Any:
    where, colon, name = target.rpartition(":")
    if target.endswith(".json"):
        raise TargetError(
            f"target {target!r} is incomplete; write hf:{target} if it is the config of a "
            "transformers model"
        )
    if not colon or not where or not name:
        module = (where if colon else target) or "package.module"
        raise TargetError(
            f"target {target!r} is incomplete; write {module}:NAME, where NAME is {expected}"
        )
    found: Any = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            public = [other for other in dir(found) if not other.startswith("_")]
            raise TargetError(f"{where} has no {name!r}{did_you_mean(part, public)}")
        found = getattr(found, part)
    return found


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the names of its keyword arguments; ``None`` if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(p.name for p in parameters if p.kind in keywords)


def _required(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise TargetError(
                f"module {error.name!r} is neither installed nor in the current directory; for a "
                "file, write path/to/file.py:NAME"
            ) from None
        raise_target_error(f"importing {name}", error)
    except (Exception, SystemExit) as error:
        raise_target_error(f"importing {name}", error)


def _import_file(path: Path) -> ModuleType:
    """Import a file; its folder becomes importable, as when Python runs the file."""
    require_file(path)
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
        raise_target_error(f"importing {path}", error)
    return module
