"""A machine from a JSON file, and what is wrong with one that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dispatch_flops.analysis.machine_files import load_machine
from dispatch_flops.analysis.machines import Link
from dispatch_flops.errors import ConfigError

WHOLE = {
    "name": "mine",
    "aliases": ["board"],
    "flops_per_s": {"bfloat16": 7e12},
    "kernel_flops_per_s": {"attention": {"bfloat16": 5e12}},
    "bytes_per_s": 11e9,
    "memory_bytes": 13e9,
    "devices_per_node": 4,
    "node_link": {"bytes_per_s": 17e9, "latency_s": 3e-6, "name": "wire"},
    "network_link": {"bytes_per_s": 19e9},
    "source": "measured",
}


def written(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


def test_load_machine_reads_every_field(tmp_path: Path) -> None:
    machine = load_machine(written(tmp_path, WHOLE))
    assert machine.name == "mine" and machine.aliases == ("board",)
    assert machine.peak("bfloat16") == 7e12
    assert machine.peak("bfloat16", "attention") == 5e12
    assert (machine.bytes_per_s, machine.memory_bytes) == (11e9, 13e9)
    assert machine.node_link == Link(bytes_per_s=17e9, latency_s=3e-6, name="wire")
    assert machine.network_link == Link(bytes_per_s=19e9)
    assert machine.devices_per_node == 4
    assert machine.source == "measured"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{", "is not JSON"),
        pytest.param("[" * 99999, "is not JSON: it is nested too deep", id="nested"),
        ([1], "is not a JSON object"),
        ({}, "Machine: the field 'name' is missing"),
        ({"name": "x", "speed": 3}, "unknown field 'speed'"),
        ({"name": "x", "flops_per_s": {"float32": 0}}, "flops_per_s.float32 is 0"),
        ({"name": "x", "flops_per_s": 3}, "flops_per_s is 3"),
        ({"name": "x", "kernel_flops_per_s": {"product": 3}}, "kernel_flops_per_s.product is 3"),
        ({"name": "x", "memory_bytes": -1}, "memory_bytes is -1"),
        (
            {"name": "x", "node_link": {"latency_s": 1}},
            "node_link: Link: the field 'bytes_per_s' is missing",
        ),
        ({"name": "x", "node_link": {"bytes_per_s": -1}}, "node_link: bytes_per_s is -1"),
        ({"name": "x", "network_link": 3}, "network_link: Link: 3 is not a table of fields"),
        ({"name": "x", "aliases": "y"}, "aliases: 'y' is not a list of texts"),
    ],
)
def test_load_machine_of_an_unusable_file_names_what_is_wrong(
    tmp_path: Path, data: object, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_machine(written(tmp_path, data))


def test_load_machine_of_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_machine(tmp_path / "none.json")
