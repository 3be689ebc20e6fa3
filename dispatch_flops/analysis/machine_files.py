"""A machine of the user's own, from a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dispatch_flops.analysis.machines import Link, Machine
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.fields import build, fits

_TABLES = ("flops_per_s", "kernel_flops_per_s")
_LINKS = ("node_link", "network_link")


def load_machine(path: str | Path) -> Machine:
    """Return the machine that a JSON file describes; its keys are the fields of ``Machine``.

        {"name": "my board", "flops_per_s": {"bfloat16": 125e12}, "bytes_per_s": 900e9,
         "memory_bytes": 24e9, "node_link": {"bytes_per_s": 31e9, "latency_s": 1e-5}}

    Raises ConfigError naming the file and the key that is missing, unknown or of the wrong type.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    try:
        return _machine(data)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def _machine(data: Any) -> Machine:
    if not isinstance(data, dict):
        raise ValueError(f"{data!r:.60} is not a JSON object with the fields of a machine")
    rest = {name: value for name, value in data.items() if name not in (*_TABLES, *_LINKS)}
    aliases = rest.pop("aliases", [])
    if not isinstance(aliases, list) or not all(type(alias) is str for alias in aliases):
        raise ValueError(f"aliases is {aliases!r:.60}; expected a list of texts")
    links = {name: build(Link, data[name]) for name in _LINKS if data.get(name) is not None}
    rates = _rates("flops_per_s", data.get("flops_per_s", {}))
    kernels = data.get("kernel_flops_per_s", {})
    if not isinstance(kernels, dict):
        raise ValueError(f"kernel_flops_per_s is {kernels!r:.60}; expected an object")
    for name in ("bytes_per_s", "memory_bytes"):
        if rest.get(name) is not None and not (fits(float, rest[name]) and rest[name] > 0):
            raise ValueError(f"{name} is {rest[name]!r:.60}; expected a number above 0")
    machine: Machine = build(
        Machine,
        rest,
        aliases=tuple(aliases),
        flops_per_s=rates,
        kernel_flops_per_s={
            family: _rates(f"kernel_flops_per_s.{family}", table)
            for family, table in kernels.items()
        },
        **links,
    )
    return machine


def _rates(name: str, table: Any) -> dict[str, float]:
    if not isinstance(table, dict) or not all(
        fits(float, rate) and rate > 0 for rate in table.values()
    ):
        raise ValueError(f"{name} is {table!r:.60}; expected dtypes with numbers above 0")
    return {dtype: float(rate) for dtype, rate in table.items()}
