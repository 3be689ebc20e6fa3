"""The ``flops_profiler`` section of a DeepSpeed configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile.fields import check_fields
from dispatch_flops.profile.json_data import read_settings

SECTION: Final = "flops_profiler"
_PRINT_OPTIONS: Final = (
    "profile_step", "module_depth", "top_modules", "detailed", "recompute_fwd_factor"
)  # fmt: skip
_LEAST: Final = {
    "profile_step": 1, "module_depth": -1, "top_modules": 1, "recompute_fwd_factor": 0
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopsProfilerConfig:
    """What to profile and what to print; names and defaults are DeepSpeed's.

        FlopsProfilerConfig(enabled=True, profile_step=5, module_depth=2)

    enabled: False profiles nothing.
    profile_step: the optimizer step to profile; the first one is 1.
    module_depth, top_modules, detailed: what is printed; see ``get_model_profile``.
    output_file: write the profile to this file instead of stdout.
    recompute_fwd_factor: see ``FlopsProfiler``.

    Raises ConfigError for a value of the wrong type, and for a number below the least allowed.
    """

    enabled: bool = False
    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str | None = None  # a Path becomes its text, which checkpoints can hold
    recompute_fwd_factor: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.output_file, Path):
            object.__setattr__(self, "output_file", str(self.output_file))
        _check(dataclasses.asdict(self))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f'"{SECTION}": {name} is {value!r}; expected at least {least}')

    def print_options(self) -> dict[str, Any]:
        """Return the fields that are arguments of ``renderers.deepspeed.make_view``."""
        return {name: getattr(self, name) for name in _PRINT_OPTIONS}

    @classmethod
    def load(cls, source: ConfigSource, *, enabled: bool = False) -> FlopsProfilerConfig:
        """Return the configuration that ``source`` holds.

        source: a FlopsProfilerConfig, a dict, or the path of a JSON file. A dict or a file holds
            the section alone or a whole DeepSpeed configuration with the section in it.
        enabled: value of ``enabled`` if a dict or a file does not have it.

        Raises ConfigError naming the file that cannot be read, the unknown key, or the key with
        its value and what is expected.
        """
        if isinstance(source, cls):
            return source
        section = _section(_read(Path(source)) if isinstance(source, (str, Path)) else source)
        _check(section)
        return cls(**{"enabled": enabled, **section})


ConfigSource = FlopsProfilerConfig | Mapping[str, Any] | str | Path


def _check(section: Mapping[str, Any]) -> None:
    try:
        check_fields(FlopsProfilerConfig, section)
    except ValueError as error:
        raise ConfigError(f'"{SECTION}": {error}') from None


def _section(data: Any) -> Mapping[str, Any]:
    """Return the section of a configuration, which may be the section itself."""
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"the configuration is of type {type(data).__name__}; pass a dict or the path of a "
            "JSON file"
        )
    section = data.get(SECTION, data)
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{SECTION}" is {section!r:.60}; expected an object')
    keys = {field.name for field in dataclasses.fields(FlopsProfilerConfig)}
    if SECTION not in data and data and not keys & set(data):
        raise ConfigError(f'the configuration has no section "{SECTION}"')
    return section


def _read(path: Path) -> Mapping[str, Any]:
    data = read_settings(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {data!r:.60}; expected an object")
    return data
