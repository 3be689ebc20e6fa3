"""Configuration by the ``flops_profiler`` section of a DeepSpeed JSON, from a dict or a file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dispatch_flops.errors import ConfigError

SECTION = "flops_profiler"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsProfilerConfig:
    """What to profile and what to print; names and defaults are DeepSpeed's.

    profile_step: the optimizer step to profile, the first being 1.
    module_depth: deepest level printed, -1 for all. top_modules: classes per depth.
    detailed: print the module tree. output_file: print to this file instead of stdout.
    recompute_fwd_factor: DeepSpeed's estimate of recomputation, in forward passes; used in its
        estimate alone, since recomputation is counted here.
    """

    enabled: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None
    recompute_fwd_factor: float = 0.0

    def print_options(self) -> dict[str, Any]:
        """What of it says what is printed: arguments of ``renderers.deepspeed.make_view``."""
        names = ("profile_step", "module_depth", "top_modules", "detailed")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def load(
        cls, source: FlopsProfilerConfig | Mapping[str, Any] | str | Path, *, enabled: bool = False
    ) -> FlopsProfilerConfig:
        """From a config, a dict or the path of a JSON file: the section alone, or a whole
        DeepSpeed configuration that holds it. enabled: what it is where that does not say.

        Raises ConfigError naming the file, the unknown key or the value of the wrong type.
        """
        if isinstance(source, cls):
            return source
        if isinstance(source, (str, Path)):
            source = _read(Path(source))
        if not isinstance(source, Mapping):
            raise ConfigError(
                f"a configuration is a dict or the path of a JSON file, not {type(source).__name__}"
            )
        section = source.get(SECTION, source)
        if not isinstance(section, Mapping):
            raise ConfigError(f'"{SECTION}" must be an object, not {section!r}')
        if SECTION not in source and source and not set(source) & set(_TYPES):
            raise ConfigError(f'the configuration has no section "{SECTION}"')
        for key, value in section.items():
            _check(key, value)
        return cls(**{"enabled": enabled, **section})


_TYPES: dict[str, tuple[type, ...]] = {
    "enabled": (bool,),
    "profile_step": (int,),
    "module_depth": (int,),
    "top_modules": (int,),
    "detailed": (bool,),
    "output_file": (str, type(None)),
    "recompute_fwd_factor": (float, int),
}
_LEAST = {"profile_step": 1, "module_depth": -1, "top_modules": 1, "recompute_fwd_factor": 0}


def _check(key: str, value: Any) -> None:
    if key not in _TYPES:
        known = ", ".join(field.name for field in fields(FlopsProfilerConfig))
        raise ConfigError(f'"{SECTION}" has an unknown key {key!r}; known are {known}')
    right = isinstance(value, _TYPES[key]) and (bool in _TYPES[key] or not isinstance(value, bool))
    if not right:
        expected = " or ".join("null" if t is type(None) else t.__name__ for t in _TYPES[key])
        raise ConfigError(f'"{SECTION}": {key} must be {expected}, not {value!r}')
    if key in _LEAST and not _LEAST[key] <= value < math.inf:
        raise ConfigError(f'"{SECTION}": {key} must be at least {_LEAST[key]}, not {value!r}')


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
