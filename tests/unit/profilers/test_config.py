"""The configuration that asks for a profile."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dispatch_flops.errors import (
    ConfigError,
)
from dispatch_flops.profilers.config import FlopsProfilerConfig


def test_load_reads_a_section_a_whole_configuration_and_a_file(tmp_path: Path) -> None:
    section = {"enabled": True, "profile_step": 7, "output_file": None}
    whole = {"train_batch_size": 8, "flops_profiler": section}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(whole))
    expected = FlopsProfilerConfig(enabled=True, profile_step=7)
    for source in (section, whole, file, str(file), expected):
        assert FlopsProfilerConfig.load(source) == expected


def test_load_with_enabled_applies_only_if_the_source_does_not_say() -> None:
    for source, enabled in (
        ({}, True),
        ({"enabled": False}, False),
        (FlopsProfilerConfig(), False),
    ):
        assert FlopsProfilerConfig.load(source, enabled=True).enabled is enabled


def test_load_of_an_empty_section_has_the_defaults_of_deepspeed() -> None:
    assert FlopsProfilerConfig.load({}) == FlopsProfilerConfig(
        enabled=False,
        profile_step=1,
        module_depth=-1,
        top_modules=1,
        detailed=True,
        output_file=None,
        recompute_fwd_factor=0.0,
    )


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"flops_profiler": {"enabel": True}}, "unknown field 'enabel'; expected enabled, "),
        ({"enabled": "yes"}, "enabled is 'yes'; expected bool"),
        ({"enabled": True, "profile_step": 0}, "profile_step is 0; expected at least 1"),
        ({"recompute_fwd_factor": float("inf")}, "_factor is inf; expected a finite float"),
        ({"recompute_fwd_factor": -1}, "recompute_fwd_factor is -1; expected at least 0"),
        ({"flops_profiler": []}, "is \\[\\]; expected an object"),
        ({"train_batch_size": 8}, "no section"),
        (3, "of type int; pass a dict"),
        ("/nowhere/ds.json", "/nowhere/ds.json"),
    ],
)
def test_load_of_a_wrong_configuration_names_key_value_and_expectation(
    source: Any, named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        FlopsProfilerConfig.load(source)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"profile_step": "5"}, "profile_step is '5'; expected int"),
        ({"profile_step": True}, "profile_step is True; expected int"),
        ({"enabled": "false"}, "enabled is 'false'; expected bool"),
        ({"module_depth": None}, "module_depth is None; expected int"),
        ({"recompute_fwd_factor": float("nan")}, "is nan; expected a finite float"),
        ({"output_file": 3}, "output_file is 3; expected str or null"),
    ],
)
def test_configuration_made_with_a_wrong_type_says_what_is_expected(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        FlopsProfilerConfig(**fields)


def test_path_of_the_output_file_is_kept_as_a_text() -> None:
    config = FlopsProfilerConfig(output_file=Path("out") / "profile.txt")  # type: ignore[arg-type]
    assert json.loads(json.dumps(dataclasses.asdict(config)))["output_file"] == "out/profile.txt"


@pytest.mark.parametrize("text", ["{", "", "[" * 99999], ids=["half", "empty", "nested"])
def test_load_of_a_file_that_is_not_json_raises_config_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"ds\.json is not JSON"):
        FlopsProfilerConfig.load(file)


def test_load_reads_a_file_with_the_mark_of_its_encoding(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"flops_profiler": {"profile_step": 7}}', encoding="utf-8-sig")
    assert FlopsProfilerConfig.load(file).profile_step == 7


def test_load_of_a_file_that_holds_no_object_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text("[3]")
    with pytest.raises(ConfigError, match=r"ds\.json holds \[3\]; expected an object"):
        FlopsProfilerConfig.load(file)
