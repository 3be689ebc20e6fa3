"""Totals of communication: bytes on the bus, sums, saved form and checks."""

from __future__ import annotations

import dataclasses
import json
import pickle
from typing import Any

import pytest

from dispatch_flops.errors import (
    ConfigError,
    InconsistentProfileError,
    ProfileFormatError,
)
from dispatch_flops.profile import (
    OUTSIDE,
    CommCost,
    CommGroup,
    CommTotal,
    ModuleNode,
    Profile,
    merge_communication,
    sum_nodes,
)
from dispatch_flops.profile.communication import COMM_KINDS, CommKind
from tests.helpers.communicating import DP, TOTALS, WORLD, communicating, total
from tests.helpers.trees import training_step

BUS_BYTES = {
    "all_reduce": 2 * 2 * 5 * 7,
    "all_gather": 2 * 5 * 7,
    "reduce_scatter": 2 * 5 * 7,
    "all_to_all": 2 * 5 * 7,
    "gather": 2 * 5 * 7,
    "scatter": 2 * 5 * 7,
    "broadcast": 3 * 5 * 7,
    "reduce": 3 * 5 * 7,
    "send": 3 * 5 * 7,
    "recv": 3 * 5 * 7,
    "barrier": 3 * 5 * 7,
}


@pytest.mark.parametrize("kind", COMM_KINDS)
def test_bus_bytes_of_a_kind_follow_the_factors_of_nccl_tests(kind: CommKind) -> None:
    assert total(kind).bus_bytes == BUS_BYTES[kind]


def test_bus_bytes_of_known_splits_are_what_goes_to_other_ranks() -> None:
    assert TOTALS[2].bus_bytes == 4 + 7


def test_bus_bytes_that_are_not_whole_are_rounded_down() -> None:
    assert total("all_gather", payload_bytes=10).bus_bytes == 6


def test_label_of_a_group_is_its_mesh_dimension_or_its_name() -> None:
    assert (DP.label, WORLD.label) == ("dp", "default_pg")


def test_merge_communication_adds_equal_rows_and_keeps_others() -> None:
    more = total("all_to_all", fqn="1", payload_bytes=5, sent_bytes=(0, 2, 3))
    merged = merge_communication((*TOTALS, *TOTALS, more))
    assert len(merged) == len(TOTALS)
    assert merged[0].cost == CommCost(calls=4, payload_bytes=2 * 3 * 4, bus_bytes=2 * 2 * 4)
    assert merged[2].sent_bytes == (0, 2 * 4 + 2, 2 * 7 + 3)
    assert merged[2].received_bytes is None  # not known of one of the calls
    assert merged[2].bus_bytes == 2 * 4 + 2 + 2 * 7 + 3


def test_comm_by_sums_calls_and_bytes_by_each_key() -> None:
    profile = communicating()
    assert profile.comm_by("module") == {
        "0": CommCost(calls=3, payload_bytes=12 + 33, bus_bytes=8 + 22),
        "1": CommCost(calls=1, payload_bytes=24, bus_bytes=11),
        OUTSIDE: CommCost(calls=1, payload_bytes=13, bus_bytes=13),
        "": CommCost(calls=1),
    }
    assert profile.comm_by("group") == {
        DP: CommCost(calls=4, payload_bytes=12 + 33 + 24, bus_bytes=8 + 22 + 11),
        WORLD: CommCost(calls=2, payload_bytes=13, bus_bytes=13),
    }
    assert list(profile.comm_by("phase")) == ["forward", "backward", "setup"]
    assert profile.comm_by("kind")["reduce_scatter"].payload_bytes == 33
    assert next(iter(profile.comm_by("kind"))) == "reduce_scatter"  # the most payload


def test_comm_by_of_another_key_raises() -> None:
    with pytest.raises(ConfigError, match="by=.'module'.: choose one of"):
        communicating().comm_by(["module"])  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="choose one of 'module', 'group', 'phase', 'kind'"):
        communicating().comm_by("rank")  # type: ignore[call-overload]


def test_from_json_of_a_profile_with_communication_is_an_equal_profile() -> None:
    profile = communicating().check()
    text = profile.to_json()
    again = Profile.from_json(text)
    assert again == profile
    assert again.to_json() == text
    assert pickle.loads(pickle.dumps(profile)) == profile
    assert again.run.coordinates == {"pp": 1}


def test_to_dict_names_each_group_once_and_nothing_where_nothing_was_sent() -> None:
    data = communicating().to_dict()["communication"]
    assert data["groups"][0] == {"name": "mesh_dp", "size": 3, "ranks": [1, 5, 9], "mesh_dim": "dp"}
    assert [row["group"] for row in data["totals"]] == [0, 0, 0, 1, 1]
    assert "sent_bytes" not in data["totals"][0]
    assert "communication" not in training_step().to_dict()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("totals",), None),
        (("groups",), {}),
        (("totals", 0, "group"), 2),
        (("totals", 0, "group"), -1),
        (("totals", 0, "calls"), "2"),
        (("totals", 0, "calls"), -2),
        (("totals", 0, "kind"), "all_send"),
        (("totals", 0, "phase"), 3),
        (("totals", 0, "fqn"), "absent"),
        (("totals", 2, "sent_bytes"), [1, 2]),
        (("totals", 2, "sent_bytes"), [0, 1.5, 2]),
        (("totals", 2, "received_bytes"), [0, -1, 2]),
        (("groups", 0, "ranks"), "012"),
        (("groups", 0, "ranks"), [1, 1, 5]),
        (("groups", 0, "ranks"), [-1, 1, 5]),
        (("groups", 0, "size"), 4),
    ],
)
def test_from_dict_of_damaged_communication_raises(path: tuple[Any, ...], value: Any) -> None:
    data = json.loads(communicating().to_json())
    at: Any = data["communication"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ProfileFormatError, match="damaged"):
        Profile.from_dict(data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (total(fqn="absent"), "under a module that the profile does not have"),
        (total(phase=""), "has no phase"),
        (total("all_send"), "'all_send' is not a kind"),  # type: ignore[arg-type]
        (total(calls=-1), "not a count"),
        (total(payload_bytes=1.5), "not a count"),
        (total(sent_bytes=(1, 2)), "not bytes for each of 3 ranks"),
        (total(received_bytes=(1, 2, -3)), "not bytes for each of 3 ranks"),
        (total(group=dataclasses.replace(DP, size=4)), "of size 4 has the ranks"),
        (total(group=dataclasses.replace(DP, ranks=(1, 1, 2))), "repeated ranks"),
        (total(group=CommGroup(name="empty", size=0, ranks=())), "not a count"),
    ],
)
def test_check_of_wrong_communication_raises(wrong: CommTotal, message: str) -> None:
    profile = dataclasses.replace(training_step(), communication=(wrong,))
    with pytest.raises(InconsistentProfileError, match=message):
        profile.check()


def sharded() -> Profile:
    """``communicating`` with half of the first module's parameters on this rank."""

    def shard(node: ModuleNode) -> ModuleNode:
        half = {"": -node.children[0].total_params // 2} if node.children else {}
        local = {"0": node.total_params // 2, "": node.total_params + half.get("", 0)}
        return dataclasses.replace(node, local_params=local.get(node.fqn))

    return communicating().map_nodes(shard)


def test_local_params_are_those_of_the_rank_and_all_unless_sharded() -> None:
    profile = sharded().check()
    first = profile.node("0").total_params
    assert profile.local_params == profile.total_params - first // 2
    assert communicating().local_params == communicating().total_params
    assert Profile.from_json(profile.to_json()) == profile
    assert "local_params" not in communicating().to_json()


def test_local_params_of_summed_nodes_are_added() -> None:
    node = sharded().node("0")
    whole = dataclasses.replace(node, local_params=None)
    assert sum_nodes([node, whole]).local_params == node.total_params // 2 + node.total_params
    assert sum_nodes([whole, whole]).local_params is None


@pytest.mark.parametrize("local", [-1, 10**9, 1.5])
def test_check_of_wrong_local_params_raises(local: Any) -> None:
    profile = communicating().map_nodes(lambda node: dataclasses.replace(node, local_params=local))
    with pytest.raises(InconsistentProfileError, match="local_params"):
        profile.check()


def test_phases_of_other_names_follow_the_standard_ones() -> None:
    phases = ["another", "backward", "forward"]
    totals = [total(phase=phase) for phase in phases]
    found = Profile(root=training_step().root, communication=tuple(totals)).comm_by("phase")
    assert list(found) == ["forward", "backward", "another"]
