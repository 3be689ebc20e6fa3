"""A machine of the user's own, from a JSON file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dispatch_flops.analysis.machines import Link, Machine
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.fields import build, texts
from dispatch_flops.profile.json_data import read_settings

_TABLES = ("flops_per_s", "kernel_flops_per_s")
_LINKS = ("node_link", "network_link")


def load_machine(path: str | Path) -> Machine:
    """Return the machine that a JSON file describes; its keys are the fields of ``Machine``.

        {"name": "my board", "flops_per_s": {"bfloat16": 125e12}, "bytes_per_s": 900e9,
         "memory_bytes": 24e9, "node_link": {"bytes_per_s": 31e9, "latency_s": 1e-5}}

    Raises ConfigError naming the file and the key that is missing, unknown or of the wrong type.
    """
    data = read_settings(Path(path))
    try:
        return _machine(data)
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _machine(data: Any) -> Machine:
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.60} is not a JSON object with the fields of a machine")
    given: dict[str, Any] = {name: data[name] for name in _TABLES if name in data}
    if "aliases" in data:
        given["aliases"] = _parsed("aliases", texts, data)
    for name in _LINKS:
        if data.get(name) is not None:
            given[name] = _parsed(name, partial(build, Link), data)
    rest = {name: value for name, value in data.items() if name not in given}
    machine: Machine = build(Machine, rest, **given)
    return machine


def _parsed(name: str, parse: Callable[[Any], Any], data: dict[str, Any]) -> Any:
    try:
        return parse(data[name])
    except (ValueError, ConfigError) as error:
        raise ValueError(f"{name}: {error}") from None
