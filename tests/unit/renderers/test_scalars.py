"""Named numbers for loggers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from dispatch_flops.analysis.headline import headline
from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.profile.cost import STEP_PHASES
from dispatch_flops.renderers.scalars import log_tensorboard, scalars
from tests.helpers.trees import SMALL, empty, encoder, lower_bound, profiles, training_step

A100 = MACHINES["NVIDIA A100-SXM4-80GB"]


def test_scalars_hold_totals_rates_and_utilisation() -> None:
    profile = training_step()
    found = scalars(profile, A100)
    seconds = (97.51 + 240.09 + 314.47) * 1e-6
    assert found["params/total"] == 64 * 256 + 256 + 256 * 64 + 64
    assert found["macs/forward"] == 2 * 4 * 64 * 256
    assert found["flops/total"] == sum(found[f"flops/{phase}"] for phase in STEP_PHASES)
    assert found["flops_per_s"] == profile.total().flops / seconds
    assert found["mfu"] == headline(profile, A100).mfu
    assert found["depth/1/Linear/flops"] == profile.root.total().flops - 3 * 4 * 256
    assert "depth/2/Linear/flops" not in found


def test_scalars_say_whether_a_utilisation_is_a_lower_bound() -> None:
    def without_cost(node: ModuleNode) -> ModuleNode:
        ops = (dataclasses.replace(op, cost=None, uncounted=op.calls) for op in node.ops[:1])
        return dataclasses.replace(node, ops=(*ops, *node.ops[1:]))

    whole = scalars(training_step(), A100)
    part = scalars(training_step().map_nodes(without_cost), A100)
    assert (whole["mfu_is_lower_bound"], whole["hfu_is_lower_bound"]) == (0, 0)
    assert (part["mfu_is_lower_bound"], part["hfu_is_lower_bound"]) == (1, 1)


def test_scalars_of_unknown_value_have_no_entry() -> None:
    unknown = scalars(SMALL["lenet5"]())
    assert not {"mfu", "hfu", "mfu_is_lower_bound", "hfu_is_lower_bound"} & unknown.keys()
    assert "latency_s/total" not in scalars(empty())
    assert scalars(lower_bound())["uncounted_calls"] == 2 + 4


def test_scalars_stop_at_depth_and_keep_slashes_out_of_names() -> None:
    assert not any(name.startswith("depth/1") for name in scalars(SMALL["encoder"](), depth=0))
    for name in scalars(SMALL["hostile"]()):
        if name.startswith("depth/"):
            assert len(name.split("/")) == 4


@given(profiles)
def test_scalars_of_any_profile_are_numbers(profile: Profile) -> None:
    found = scalars(profile, A100)
    assert all(isinstance(value, int | float) for value in found.values())
    assert found["flops/total"] == profile.total().flops


def test_log_tensorboard_writes_each_scalar_once() -> None:
    written: list[tuple[str, float, int | None]] = []

    class Writer:
        def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None:
            written.append((tag, scalar_value, global_step))

    log_tensorboard(training_step(), Writer(), 7, machine=A100)
    expected = {
        f"dispatch_flops/{name}": value for name, value in scalars(training_step(), A100).items()
    }
    assert written == [(tag, value, 7) for tag, value in expected.items()]


def test_scalars_of_every_depth_and_of_one_that_is_no_number() -> None:
    assert scalars(encoder(), depth=None) == scalars(encoder(), depth=9)
    with pytest.raises(
        ConfigError, match="depth='all': pass an int of at least 0, or None for all"
    ):
        scalars(encoder(), depth="all")  # type: ignore[arg-type]
