"""Every one-operator probe costs the sum of its products, with nothing uncounted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dispatch_flops import OpCost
from dispatch_flops.profile.cost import contraction
from tests.helpers.profiling import profile_of
from tests.probes import GROUPS, PROBES, Probe
from tests.probes.probe import total_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def _formula(macs: Callable[..., int]) -> Callable[..., OpCost]:
    return lambda *args, out: contraction(macs(*args))


@pytest.mark.parametrize(
    "probe",
    [
        pytest.param(probe, id=f"{group}: {probe.name}")
        for group, probes in GROUPS.items()
        for probe in probes
        if probe in PROBES
    ],
)
def test_probe_costs_the_sum_of_its_products(probe: Probe) -> None:
    model, inputs = probe.build()

    def run(*args: Any) -> None:
        out = model(*args)
        if probe.backward:
            total_of(out).backward()

    formulas = {op: _formula(macs) for op, macs in probe.own_macs().items()}
    profile = profile_of(run, *inputs, custom_mapping=formulas)
    assert profile.uncounted_ops() == {}
    assert profile.model_total().macs == probe.macs


def test_probes_of_a_group_have_distinct_names() -> None:
    for group, probes in GROUPS.items():
        names = [probe.name for probe in probes]
        assert len(set(names)) == len(names), group


def test_probe_of_multi_dot_writes_its_sum_of_products() -> None:
    (probe,) = [probe for probe in PROBES if probe.name == "torch.linalg.multi_dot"]
    assert (probe.truth, probe.macs) == ("2·3·5 + 2·5·7", 100)
