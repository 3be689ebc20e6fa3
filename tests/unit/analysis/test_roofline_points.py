"""Points of a roofline plot of hand-built profiles."""

from __future__ import annotations

from dispatch_flops.analysis import Machine, roofline_data
from dispatch_flops.analysis.roofline_points import MOST_POINTS
from dispatch_flops.profile import Profile
from tests.helpers.trees import module, op, place, unknown

MACHINE = Machine(name="test", flops_per_s={"float32": 100.0}, bytes_per_s=10.0)


def model(layers: int) -> Profile:
    """Linears with 6 MACs that read 3 bytes and write 1, in 2 s each."""
    ops = (op("aten.mm.default", macs=6, n_bytes=(3, 1)), op("aten.mm.default", "backward", macs=7))
    return Profile(
        root=place(
            module(
                "Net",
                *(module("Linear", name=str(i), ops=ops, latency_s=2.0) for i in range(layers)),
            )
        )
    )


def test_roofline_data_of_modules_are_of_their_own_forward() -> None:
    data = roofline_data(model(1), MACHINE)
    assert data is not None
    (point,) = data["modules"]
    assert (point["name"], point["about"]) == ("0", "Linear")
    assert (point["flops"], point["bytes"], point["intensity"]) == (12, 4, 3.0)
    assert point["achieved"] == 12 / 2.0


def test_roofline_data_of_operators_are_of_all_calls() -> None:
    data = roofline_data(model(2), MACHINE)
    assert data is not None
    (point,) = data["operators"]
    assert (point["name"], point["about"]) == ("aten.mm.default", "float32")
    assert (point["flops"], point["bytes"]) == (2 * (12 + 14), 2 * 4)
    assert point["achieved"] is None


def test_roofline_data_of_operators_have_the_time_of_calls_that_have_shares() -> None:
    """As a fused attention's backward, of which recomputation has a share, but no call."""
    backward = op("lib.fused.default", "backward", macs=7, n_bytes=(3, 1), latency_s=2.0)
    share = op("lib.fused.default", "recompute", macs=5, calls=0)
    data = roofline_data(Profile(root=module("Net", ops=(backward, share))), MACHINE)
    assert data is not None
    (point,) = data["operators"]
    assert point["achieved"] == 2 * (7 + 5) / 2.0


def test_roofline_data_say_which_points_are_lower_bounds() -> None:
    product = op("aten.mm.default", macs=6, n_bytes=(3, 1))
    partly = op("lib.scan.default", macs=5, n_bytes=(2, 1), calls=3, uncounted=2)
    layers = {
        "exact": (product, unknown("lib.a.default", "backward")),
        "beside": (product, unknown("lib.a.default")),
        "partly": (product, partly),
    }
    root = module("Net", *(module("Layer", name=name, ops=ops) for name, ops in layers.items()))
    data = roofline_data(Profile(root=place(root)), MACHINE)
    assert data is not None
    assert {p["name"] for p in data["modules"] if p["lower_bound"]} == {"beside", "partly"}
    assert [p["name"] for p in data["operators"] if p["lower_bound"]] == ["lib.scan.default"]


def test_roofline_data_without_a_bandwidth_are_none() -> None:
    assert roofline_data(model(1), None) is None
    assert roofline_data(model(1), Machine(name="test", flops_per_s={})) is None


def test_roofline_data_of_many_modules_are_the_heaviest() -> None:
    """Layer n has n MACs, and moves 1 byte."""
    every = [op("aten.mm.default", macs=n, n_bytes=(1, 0)) for n in range(MOST_POINTS + 5)]
    layers = (module("Linear", name=str(n), ops=(one,)) for n, one in enumerate(every))
    data = roofline_data(Profile(root=place(module("Net", *layers))), MACHINE)
    assert data is not None
    found = [point["flops"] for point in data["modules"]]
    assert found == [2 * n for n in reversed(range(5, MOST_POINTS + 5))]
    assert data["modules_left_out"] == 5 - 1  # a layer without FLOPs has no point


def test_roofline_data_of_a_dtype_without_a_peak_name_it() -> None:
    root = module("Net", ops=(op("aten.mm.default", macs=1, n_bytes=(1, 1), dtype="float64"),))
    data = roofline_data(Profile(root=root), MACHINE)
    assert data is not None
    assert (data["peaks"], data["no_peak"]) == ({}, ["float64"])
