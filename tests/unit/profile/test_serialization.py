"""Saved profiles: round trips, earlier versions, and damage."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given

from dispatch_flops.analysis import measured_seconds, phase_seconds
from dispatch_flops.errors import ProfileFormatError
from dispatch_flops.profile import ModuleNode, Profile, RunInfo, TensorInput
from dispatch_flops.profile.cost import OpCost
from tests.helpers.paths import GOLDEN
from tests.helpers.trees import SMALL, deep, lenet5, profiles, training_step, wide


@pytest.mark.parametrize("name", SMALL)
def test_from_json_of_to_json_is_an_equal_profile(name: str) -> None:
    profile = SMALL[name]().check()
    text = profile.to_json()
    again = Profile.from_json(text)
    assert again == profile
    assert again.to_json() == text
    assert json.loads(text.encode().decode("ascii"))["version"] == 2


@pytest.mark.slow
@given(profiles)
def test_from_json_of_any_profile_is_an_equal_profile(profile: Profile) -> None:
    assert Profile.from_json(profile.check().to_json(indent=1)) == profile


@pytest.mark.slow
@pytest.mark.parametrize("profile", [deep(5_000), wide(10_000)])
def test_from_json_of_a_deep_or_wide_tree_is_an_equal_profile(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


def test_to_dict_has_one_table_of_seconds_per_phase() -> None:
    data = training_step().to_dict()
    assert data["timing"]["seconds"] == {
        "forward": 97.51e-6,
        "backward": 240.09e-6,
        "optimizer": 314.47e-6,
    }
    assert [row["seconds"] for row in data["root"]] == [
        {},
        {"forward": 38.15e-6},
        {"forward": 15.74e-6},
        {"forward": 15.02e-6},
    ]


@pytest.mark.parametrize("name", ["training_step", "hostile", "lower_bound"])
def test_to_json_of_small_profiles_matches_golden_files(
    name: str, golden: Callable[[str, str], None]
) -> None:
    golden(f"{name}.json", SMALL[name]().check().to_json(indent=2) + "\n")


# -- earlier versions ---------------------------------------------------------------------------


def version_1(profile: Profile) -> dict[str, Any]:
    """The profile as the first version of the schema had it."""
    data: dict[str, Any] = json.loads(profile.to_json()) | {"version": 1}
    data["scope"] = data.pop("run")
    seconds = data["timing"].pop("seconds")
    data["timing"] |= {
        "forward_s": seconds.get("forward"),
        "backward_s": seconds.get("backward"),
        "step_s": seconds.get("optimizer"),
    }
    for row in (*data["root"], *data["outside"]):
        seconds = row.pop("seconds")
        row["latency_s"] = seconds.get("forward")
        row["backward_latency_s"] = seconds.get("backward")
    return data


@pytest.mark.parametrize("name", SMALL)
def test_from_dict_of_version_1_is_an_equal_profile(name: str) -> None:
    profile = SMALL[name]().check()
    assert Profile.from_dict(version_1(profile)) == profile


def test_from_json_of_a_version_1_file_reads_the_same_figures() -> None:
    """A file that the first version wrote: a step of Linear(3, 5), ReLU, checkpointed, and
    Linear(5, 2), on 4 rows, with SGD and latencies."""
    text = (GOLDEN / "version_1.json").read_text(encoding="utf-8")
    profile = Profile.from_json(text)
    assert profile.total("forward").macs == 4 * (3 * 5 + 5 * 2)
    assert profile.total("recompute").macs == 4 * 3 * 5
    assert profile.total("backward").macs == 2 * 4 * (3 * 5 + 5 * 2)
    assert profile.root.total() == OpCost(macs=360, flops=849, bytes_read=1268, bytes_written=688)
    assert profile.run.torch_version == "2.13.0+cpu"
    assert phase_seconds(profile) == {
        "forward": 0.005558616708185582,
        "backward": 0.002134359932819912,
        "recompute": None,
        "optimizer": 0.00033076473118853755,
    }
    assert measured_seconds(profile) == (0.01262919125110784, "whole iteration")
    assert profile.timing.latency("forward") is None
    assert {node.fqn: (node.latency_s, node.latency("backward")) for node in profile.nodes()} == {
        "": (0.005558616708185582, 0.00029240399908303516),
        "body": (0.005005604188227153, 0.0001632329995118198),
        "body.0": (0.004695290108429617, 0.00010876099895540392),
        "body.1": (0.00025991934398916783, 5.447200055641588e-05),
        "head": (7.493991688534152e-05, 0.00012917099957121536),
        "unused": (None, None),
        "<outside>": (None, 4.392499977257103e-05),
        "<outside>.gradient accumulation": (None, 1.6253999092441518e-05),
        "<outside>.SGD": (None, None),
    }
    assert Profile.from_json(profile.to_json()) == profile
    assert version_1(profile) == json.loads(text)


# -- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("", "is empty"),
        ("folder/profile.json", "pass the text of the file, not its name"),
        ("[]", "not a dispatch_flops profile"),
        ('{"schema": "dispatch_flops.cluster"}', "several ranks.*ClusterProfile"),
        ('{"schema": "other"}', "not a dispatch_flops profile"),
        ('{"schema": "dispatch_flops.profile", "version": 99}', "version 99"),
        ('{"schema": "dispatch_flops.profile", "version": true}', "version True"),
        ('{"schema": "dispatch_flops.profile", "version": 2.0}', "version 2.0"),
        ('{"schema": "dispatch_flops.profile", "version": 1}', "damaged"),
        ('{"schema": "dispatch_flops.profile", "version": 2}', "the key 'root' is missing"),
    ],
)
def test_from_json_of_other_text_raises_format_error(text: str, message: str) -> None:
    with pytest.raises(ProfileFormatError, match=message):
        Profile.from_json(text)


def test_from_json_of_a_path_says_to_pass_the_text() -> None:
    with pytest.raises(ProfileFormatError, match="of type PosixPath; pass the text of its file"):
        Profile.from_json(Path("profile.json"))  # type: ignore[arg-type]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_from_json_reads_the_bytes_of_a_file_with_the_mark_of_its_encoding(encoding: str) -> None:
    profile = Profile(root=ModuleNode(fqn="", class_name="Ñ"))
    text = profile.to_json()
    assert Profile.from_json(text.encode(encoding)) == profile  # type: ignore[arg-type]
    assert Profile.from_json("\ufeff" + text) == profile


BOTH_VERSIONS = [
    (("root",), []),
    (("root",), "abc"),
    (("root", 0), None),
    (("root", 0, "children"), [0]),
    (("root", 0, "children"), [99]),
    (("root", 0, "children"), [1, 1]),
    (("root", 0, "children"), []),
    (("root", 0, "surprise"), 1),
    (("root", 0, "calls"), "three"),
    (("root", 0, "calls"), True),
    (("root", 0, "total_params"), None),
    (("root", 2, "ops", 0, "cost"), 5),
    (("root", 2, "ops", 0, "cost", "flops"), "12"),
    (("root", 2, "ops", 0, "cost", "flops"), -12),
    (("root", 2, "ops", 0, "cost", "macs"), 1.5),
    (("root", 2, "ops", 0, "phase"), 5),
    (("root", 2, "ops", 0, "phase"), ""),
    (("root", 2, "ops", 0, "phase"), None),
    (("timing",), None),
    (("timing",), []),
    (("timing", "surprise"), 1),
    (("notes",), None),
]


def damaged(data: dict[str, Any], path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    place = data
    for step in path[:-1]:
        place = place[step]  # type: ignore[index]
    place[path[-1]] = value  # type: ignore[index]
    return data


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *BOTH_VERSIONS,
        (("root", 0, "seconds"), None),
        (("root", 0, "seconds", "forward"), "fast"),
        (("root", 0, "seconds", "forward"), None),
        (("root", 0, "seconds", "forward"), float("nan")),
        (("root", 0, "seconds", "forward"), -1.0),
        (("timing", "seconds", "forward"), "fast"),
        (("timing", "seconds", "forward"), -1.0),
        (("timing", "iteration_s"), -1.0),
        (("run", "device"), 5),
        (("run", "rank"), -1),
        (("run", "world_size"), 0),
        (("run", "data_parallel_size"), 0),
        (("run", "model_parallel_size"), 0),
        (("run", "mesh"), [{"name": "dp", "size": 0, "coordinate": 0}]),
        (("run",), None),
        (("notes",), "abc"),
        (("notes",), [1]),
        (("ran_elsewhere",), {"a": 1}),
        (("root", 0, "children"), [1.0, 10.0]),
        (("root", 0, "output_shapes"), [["7"]]),
        (("root", 0, "output_shapes"), [[-2]]),
    ],
)
def test_from_dict_of_damaged_data_raises_format_error(
    path: tuple[str | int, ...], value: object
) -> None:
    data = json.loads(lenet5().to_json())
    with pytest.raises(ProfileFormatError, match="damaged"):
        Profile.from_dict(damaged(data, path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *BOTH_VERSIONS,
        (("root", 0, "latency_s"), "fast"),
        (("root", 0, "latency_s"), float("nan")),
        (("timing", "forward_s"), "fast"),
        (("scope",), None),
    ],
)
def test_from_dict_of_damaged_version_1_raises_format_error(
    path: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(ProfileFormatError, match="damaged"):
        Profile.from_dict(damaged(version_1(lenet5()), path, value))


# -- facts of the run ---------------------------------------------------------------------------


INPUTS = (
    TensorInput(name="x", shape=(3, 7), dtype="float32", device="cpu"),
    TensorInput(name="y.0", shape=None, dtype="int64", device="meta"),
)


def test_inputs_are_saved_as_lists_and_read_back_equal() -> None:
    profile = dataclasses.replace(lenet5(), run=RunInfo(inputs=INPUTS, date="d", command="c"))
    data = json.loads(profile.to_json())
    assert [row["shape"] for row in data["run"]["inputs"]] == [[3, 7], None]
    again = Profile.from_dict(data)
    assert again == profile == Profile.from_dict(profile.to_dict())
    assert (again.run.date, again.run.command) == ("d", "c")


def test_version_1_files_have_no_inputs() -> None:
    text = (GOLDEN / "version_1.json").read_text(encoding="utf-8")
    run = Profile.from_json(text).run
    assert (run.inputs, run.training, run.grad_mode, run.date) == (None, None, None, None)


def test_profiles_with_other_dates_and_commands_are_equal() -> None:
    one, other = (
        dataclasses.replace(lenet5(), run=RunInfo(date=text, command=text)) for text in "ab"
    )
    assert one == other
    assert one != dataclasses.replace(lenet5(), run=RunInfo(inputs=INPUTS))


@pytest.mark.parametrize(
    "damaged",
    [
        3,
        "ab",
        [3],
        [{}],
        [{"name": "x", "shape": [3, 7], "dtype": "float32"}],
        [{"name": "x", "shape": [3, 7.0], "dtype": "float32", "device": "cpu"}],
        [{"name": "x", "shape": 3, "dtype": "float32", "device": "cpu"}],
        [{"name": "x", "shape": [-2], "dtype": "float32", "device": "cpu"}],
        [{"name": "x", "shape": [True], "dtype": "float32", "device": "cpu"}],
        [{"name": 3, "shape": [3], "dtype": "float32", "device": "cpu"}],
    ],
)
def test_damaged_inputs_are_refused(damaged: Any) -> None:
    data = lenet5().to_dict()
    data["run"]["inputs"] = damaged
    with pytest.raises(ProfileFormatError, match="damaged"):
        Profile.from_dict(data)


def test_nodes_that_are_no_ones_children_are_named() -> None:
    data = json.loads(training_step().to_json())
    *data["root"][0]["children"], last = data["root"][0]["children"]
    with pytest.raises(ProfileFormatError, match=rf"nodes \[{last}\] are not reachable"):
        Profile.from_dict(data)


def test_output_shapes_are_saved_as_lists_and_read_back_equal() -> None:
    """-1 is a size that is a symbol, and None a nested tensor."""
    root = dataclasses.replace(lenet5().root, output_shapes=((3, -1, 0), None, ()))
    data = json.loads(Profile(root=root).to_json())
    assert data["root"][0]["output_shapes"] == [[3, -1, 0], None, []]
    assert Profile.from_dict(data).root == root


# -- damage at random ---------------------------------------------------------------------------

DEEP = 20_000  # levels, beyond the limits of Python's parser and of its stack


@pytest.mark.parametrize("level", ["[]", '{"a":}'])
def test_from_json_of_deep_nesting_raises_format_error(level: str) -> None:
    opening, closing = level[:-1], level[-1]
    nested = f"{opening * DEEP}0{closing * DEEP}"
    for text in (nested, lenet5().to_json().replace('"notes": []', f'"notes": {nested}')):
        with pytest.raises(ProfileFormatError):
            Profile.from_json(text)


def test_from_dict_of_deep_nesting_raises_format_error() -> None:
    nested: list[Any] = []
    for _ in range(DEEP):
        nested = [nested]
    for path in BOTH_VERSIONS:
        with pytest.raises(ProfileFormatError):
            Profile.from_dict(damaged(json.loads(lenet5().to_json()), path[0], nested))


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", f"1{400 * '0'}", f"1{5000 * '0'}"])
@pytest.mark.parametrize("name", ["forward", "iteration_s", "resolution_s"])
def test_from_json_of_seconds_beyond_floats_raises_format_error(number: str, name: str) -> None:
    text = training_step().to_json()
    old = {"forward": "9.751e-05"}.get(name, "null")
    changed = text.replace(f'"{name}": {old}', f'"{name}": {number}')
    assert changed != text
    with pytest.raises(ProfileFormatError):
        Profile.from_json(changed)


ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1.5, 10**400, -(10**400), float("nan"), float("inf"), "", "x", "\ud800",
    [], [0], [[]], {}, {"a": 1}, {"forward": 10**400},
]  # fmt: skip


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Return every container with each of its keys."""
    found, pending = [], [data]
    while pending:
        place = pending.pop()
        keys = list(place) if isinstance(place, dict) else range(len(place))
        found += [(place, key) for key in keys]
        pending += [place[key] for key in keys if isinstance(place[key], (dict, list))]
    return found


def _mutate(data: Any, random: Random) -> None:
    for _ in range(random.randint(1, 3)):
        place, key = random.choice(_places(data))
        match random.randrange(4):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[random.choice(["x", "", "seconds", "ops"])] = place.pop(key)
            case 2:
                place[key] = deepcopy(random.choice(_places(data))[0])
            case _:
                place[key] = random.choice(ODD_VALUES)


def _mutated_text(text: str, random: Random) -> str:
    start = random.randrange(len(text))
    if random.random() < 0.3:
        return text[:start]
    end = start + random.randrange(8)
    return (
        text[:start]
        + random.choice(["", "9", "9" * 5000, "e999", "[", "}", "NaN", '"'])
        + (text[end:])
    )


@pytest.mark.parametrize("name", ["training_step", "lower_bound", "unmeasured", "hostile"])
def test_mutated_profile_is_read_or_raises_format_error(name: str) -> None:
    random = Random(name)
    text = SMALL[name]().to_json()
    first = version_1(SMALL[name]())
    refused = 0
    for number in range(100):
        data = json.loads(text) if number % 2 else deepcopy(first)
        _mutate(data, random)
        for read, value in (
            (Profile.from_dict, data),
            (Profile.from_json, _mutated_text(text, random)),
        ):
            try:
                read(value).to_json()  # type: ignore[operator]
            except ProfileFormatError:
                refused += 1
    assert refused > 100


def test_conventions_of_a_run_are_saved_where_they_are_not_the_defaults() -> None:
    chosen = RunInfo(causal="half", flops="contractions", subclass="logical", target="cuda")
    profile = dataclasses.replace(lenet5(), run=chosen)
    row = json.loads(profile.to_json())["run"]
    names = ("causal", "flops", "subclass", "target")
    assert [row[name] for name in names] == ["half", "contractions", "logical", "cuda"]
    assert Profile.from_json(profile.to_json()).run == chosen
    row = json.loads(lenet5().to_json())["run"]
    assert [row.get(name) for name in names] == ["full", None, None, None]
