"""Tables and lines of memory."""

from __future__ import annotations

import csv as csv_reader
import dataclasses
import io

import pytest

from dispatch_flops.profile import (
    OUTSIDE,
    DeviceMemory,
    HeldBytes,
    MemoryPeak,
    MemoryProfile,
    MemoryUse,
    ModuleMemory,
    ModuleNode,
    PeakMoment,
    PhaseBytes,
    Profile,
)
from dispatch_flops.renderers import View, csv, memory_table, overview

LAYER = ModuleMemory(
    own=HeldBytes(parameters=3000, activations=5000),
    total=HeldBytes(parameters=3000, activations=5000),
    peak_bytes=PhaseBytes({"forward": 9000}),
)
NET = ModuleMemory(total=LAYER.total, peak_bytes=PhaseBytes({"forward": 9000, "backward": 12_000}))
MEMORY = MemoryProfile(
    devices=(
        DeviceMemory(
            device="cuda:0",
            peaks=(
                MemoryPeak(
                    peak_bytes=9000,
                    peak_at=PeakMoment(fqn="layer", phase="forward", operator="aten.mm.default"),
                    uses=(
                        MemoryUse(role="activations", fqn="layer", phase="forward", bytes=6000),
                        MemoryUse(role="parameters", bytes=3000),
                    ),
                ),
                MemoryPeak(
                    peak_bytes=12_000,
                    peak_at=PeakMoment(fqn="", phase="backward", operator="aten.mul.Tensor"),
                    uses=(
                        MemoryUse(role="gradients", fqn="layer", phase="backward", bytes=9000),
                        MemoryUse(role="parameters", bytes=3000),
                    ),
                ),
            ),
        ),
        DeviceMemory(
            device="cpu",
            peaks=(
                MemoryPeak(
                    peak_bytes=24,
                    peak_at=PeakMoment(fqn=OUTSIDE, phase="forward", operator="aten.ones.default"),
                    uses=(MemoryUse(role="inputs", bytes=24),),
                ),
            ),
        ),
    )
)
PROFILE = Profile(
    root=ModuleNode(
        fqn="",
        class_name="Net",
        calls=1,
        memory=NET,
        children=(
            ModuleNode(fqn="layer", name="layer", class_name="Linear", calls=1, memory=LAYER),
        ),
    ),
    memory=MEMORY,
).check()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_table_says_peak_what_it_consists_of_and_what_modules_hold() -> None:
    lines = memory_table.render(PROFILE).splitlines()
    assert lines[0] == ("Peak 12 KB at Net in backward (aten.mul.Tensor), on cuda:0; also cpu 24 B")
    assert cells(lines[4]) == ["gradients", "layer", "backward", "9 KB", "75%"]
    assert cells(lines[5]) == ["parameters", "before", "3 KB", "25%"]
    assert cells(lines[-2]) == [
        "Net", "3 KB", "0 B", "0 B", "0 B", "5 KB", "9 KB", "12 KB",
    ]  # fmt: skip
    assert cells(lines[-1])[0] == "layer"


def with_cache() -> Profile:
    """The same, and a layer that made 700 bytes of a KV cache."""
    held = dataclasses.replace(LAYER, own=dataclasses.replace(LAYER.own, kv_cache=700))
    held = dataclasses.replace(held, total=held.own)
    return PROFILE.map_nodes(
        lambda node: dataclasses.replace(node, memory=held) if node.name == "layer" else node
    )


def test_kv_cache_is_a_column_where_a_module_made_one() -> None:
    assert "KV cache" not in memory_table.render(PROFILE)
    lines = memory_table.render(with_cache()).splitlines()
    assert cells(lines[-1])[-3:] == ["5 KB", "700 B", "9 KB"]
    layer = list(csv_reader.DictReader(io.StringIO(csv.render(with_cache()))))[1]
    assert layer["own_kv_cache_bytes"] == layer["total_kv_cache_bytes"] == "700"


def test_table_of_a_phase_shows_its_own_peak() -> None:
    text = memory_table.render(PROFILE, View(phase="forward"))
    assert text.startswith("Peak 9 KB at layer in forward (aten.mm.default)")
    assert "Peak backward" not in text


def test_table_to_a_depth_leaves_out_modules_below() -> None:
    assert "Linear" not in memory_table.render(PROFILE, View(depth=0))
    assert len(memory_table.render(PROFILE, View(depth=0)).splitlines()) + 1 == len(
        memory_table.render(PROFILE).splitlines()
    )


def test_table_in_markdown_has_names_as_code() -> None:
    assert "| `layer`" in memory_table.render(PROFILE, View(style="markdown"))


def test_table_of_a_profile_without_memory_says_how_to_get_it() -> None:
    text = memory_table.render(Profile(root=ModuleNode(fqn="", class_name="Net")))
    assert text == "Memory was not followed: profile with memory=True, or --memory."


def test_peak_with_unknown_workspaces_is_marked_and_they_are_named() -> None:
    memory = dataclasses.replace(MEMORY, unseen=("aten.convolution.default",))
    text = memory_table.render(dataclasses.replace(PROFILE, memory=memory))
    assert text.startswith("Peak >= 12 KB")
    assert text.splitlines()[0].endswith("; also cpu >= 24 B")
    modules = next(line for line in text.splitlines() if line.split()[:1] == ["Net"])
    assert cells(modules)[-3:] == ["5 KB", ">= 9 KB", ">= 12 KB"]  # what it holds is known
    assert text.endswith("allocate for themselves is not known: aten.convolution.default")


def test_peak_of_decomposed_operators_is_marked_as_approximate_and_they_are_named() -> None:
    memory = dataclasses.replace(MEMORY, decomposed=("aten.lstm.input",), unseen=("aten.x",))
    assert memory.is_approximate and not memory.is_lower_bound
    text = memory_table.render(dataclasses.replace(PROFILE, memory=memory))
    assert text.startswith("Peak ~ 12 KB")
    assert cells(next(line for line in text.splitlines() if "Net  " in line))[-1] == "~ 12 KB"
    assert "by other operators than a device's kernels: aten.lstm.input" in text


def test_overview_has_a_line_on_memory() -> None:
    assert (
        "Memory   12 KB at Net in backward (aten.mul.Tensor): gradients 9 KB, parameters 3 KB"
        in overview.render(PROFILE)
    )


@pytest.mark.parametrize("memory", [None, MemoryProfile(devices=())])
def test_overview_of_a_profile_without_peaks_has_no_line_on_memory(
    memory: MemoryProfile | None,
) -> None:
    assert "Memory" not in overview.render(dataclasses.replace(PROFILE, memory=memory))


def test_csv_has_columns_of_memory_where_it_was_followed() -> None:
    first, layer = list(csv_reader.DictReader(io.StringIO(csv.render(PROFILE))))[:2]
    assert first["total_parameters_bytes"] == "3000" and first["own_parameters_bytes"] == "0"
    assert layer["own_activations_bytes"] == "5000" and layer["forward_peak_bytes"] == "9000"
    assert layer["backward_peak_bytes"] == ""
    without = PROFILE.map_nodes(lambda node: dataclasses.replace(node, memory=None))
    assert "own_parameters_bytes" not in csv.render(without)
