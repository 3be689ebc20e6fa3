"""DeepSpeed's three parts, and the operators after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given

from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import MeshDim, ModuleNode, OpTotal, Profile, RunInfo, StepTiming
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.renderers import View, deepspeed
from dispatch_flops.renderers.deepspeed import aggregated, detailed, summary
from dispatch_flops.renderers.deepspeed.units import number_to_string
from tests.helpers.paths import GOLDEN
from tests.helpers.trees import (
    HOSTILE_NAMES,
    SMALL,
    deep,
    encoder,
    lenet5,
    lower_bound,
    module,
    op,
    place,
    profiles,
    timed,
    training_step,
    unmeasured,
    wide,
)

Golden = Callable[[str, str], None]


@pytest.mark.parametrize("name", [n for n in SMALL if n != "encoder"])
def test_printout_of_small_profiles_matches_golden_files(name: str, golden: Golden) -> None:
    text = deepspeed.render(SMALL[name]().check(), View(step=3, top=3))
    golden(f"deepspeed_{name}.txt", text)


def test_printout_of_part_of_a_profile_matches_golden_files(golden: Golden) -> None:
    profile = encoder().check()
    golden("deepspeed_encoder_fold.txt", deepspeed.render(profile, View(fold=True)))
    text = deepspeed.render(profile, View(depth=2, fold=True))
    golden("deepspeed_encoder_depth2.txt", text)
    golden("deepspeed_encoder_short.txt", deepspeed.render(profile, View(detailed=False)))


def test_printout_of_lenet5_has_the_lines_of_deepspeed() -> None:
    """DeepSpeed 0.19.8 wrote the file; it lacks depth 2 and reports 0 params of model."""
    printed = (GOLDEN / "deepspeed_0.19.8_lenet5.txt").read_text().splitlines()
    ours = deepspeed.render(lenet5(), View(top=3)).splitlines()[: len(printed) + 4]
    only_ours = [line for line in ours if line not in printed]
    only_theirs = [line for line in printed if line not in ours]
    assert only_ours == [
        f"{'params of model = params per GPU * mp_size: ':<70}  61.71 K ",
        "depth 2:",
        "    params      - {'Conv2d': '50.69 K', 'Linear': '11.01 K', 'Tanh': '0'}",
        "    MACs        - {'Conv2d': '415.33 MMACs', 'Linear': '11.18 MMACs', 'Tanh': '0 MACs'}",
        "    fwd latency - {'Conv2d': '186.69 ms', 'Tanh': '20.79 ms', 'AvgPool2d': '8.33 ms'}",
    ]
    assert only_theirs == [f"{'params of model = params per GPU * mp_size: ':<70}  0       "]
    assert [line for line in ours if line in printed] == [line for line in printed if line in ours]


def _value(text: str, label: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith(f"{label}: ")]
    assert len(lines) == 1, f"{len(lines)} lines start with {label}"
    assert lines[0][:70] == f"{label}: ".ljust(70)
    return lines[0][70:].strip()


def test_summary_of_a_training_step_has_estimated_and_counted_rates() -> None:
    text = summary.render(training_step(), View(step=3))
    forward = 2 * 2 * 4 * 64 * 256 + 4 * 256
    backward = 2 * 3 * 4 * 64 * 256 + 3 * (256 + 64) + 4 * 256
    step = 97.51e-6 + 240.09e-6 + 314.47e-6
    assert _value(text, "world size") == "4"
    assert _value(text, "data parallel size") == "2"
    assert _value(text, "model parallel size") == "2"
    assert _value(text, "batch size per GPU") == "4"
    assert _value(text, "params per GPU") == "33.09 K"
    assert _value(text, "params of model = params per GPU * mp_size") == "66.18 K"
    assert _value(text, "fwd flops per GPU") == f"{round(forward / 1e3, 2):g} K"
    assert _value(text, "fwd latency") == "97.51 us"
    assert _value(text, "bwd flops per GPU (counted)") == f"{round(backward / 1e3, 2):g} K"
    estimate = _value(text, "bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency")
    assert estimate == f"{round(2 * forward / 240.09e-6 / 1e9, 2):g} GFLOPS"
    counted = _value(text, "bwd FLOPS per GPU = counted bwd flops per GPU / bwd latency")
    assert counted == f"{round(backward / 240.09e-6 / 1e9, 2):g} GFLOPS"
    everything = training_step().total().flops
    rate = _value(text, "FLOPS per GPU = counted flops of all phases per GPU / iter latency")
    assert rate == f"{round(everything / step / 1e9, 2):g} GFLOPS"
    assert _value(text, "iter latency") == "652.07 us"
    # two of the four ranks hold the same samples
    assert _value(text, "samples/second") == str(round(4 * 2 / step, 2))


def _on_mesh(local_params: int | None = None, **sizes: int) -> Profile:
    """Return the training step, of 4 samples, as that of a rank of 8 on this mesh."""
    profile = training_step()
    mesh = tuple(MeshDim(name=name, size=size, coordinate=0) for name, size in sizes.items())
    run = RunInfo(world_size=8, mesh=mesh, batch_size=4)
    root = dataclasses.replace(profile.root, local_params=local_params)
    return dataclasses.replace(profile, root=root, run=run)


@pytest.mark.parametrize(
    ("mesh", "data", "model"),
    [
        ({"dp": 8}, 8, 1),
        ({"dp": 4, "tp": 2}, 4, 2),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, 4, 2),
        ({"tp": 8}, 1, 8),
        ({"dp": 4, "mine": 2}, None, None),
        ({"dp": 4}, None, None),  # not of all ranks
    ],
)
def test_summary_takes_the_parallel_sizes_from_the_mesh(
    mesh: dict[str, int], data: int | None, model: int | None
) -> None:
    text = summary.render(_on_mesh(**mesh))
    assert _value(text, "data parallel size") == str(data or "n/a")
    assert _value(text, "model parallel size") == str(model or "n/a")
    step = 97.51e-6 + 240.09e-6 + 314.47e-6
    samples = str(round(4 * data / step, 2)) if data else "n/a"
    assert _value(text, "samples/second") == samples
    forward = 2 * 2 * 4 * 64 * 256 + 4 * 256
    whole = number_to_string(model * forward) if model else "n/a"
    assert _value(text, "fwd flops of model = fwd flops per GPU * mp_size") == whole


@pytest.mark.parametrize(
    ("mesh", "whole"), [({"dp": 4, "tp": 2}, "33.09 K"), ({"pp": 2, "dp": 4}, "n/a")]
)
def test_summary_of_sharded_parameters_has_those_of_the_rank_and_of_the_model(
    mesh: dict[str, int], whole: str
) -> None:
    """A pipeline stage does not know the parameters of the others."""
    text = summary.render(_on_mesh(local_params=4136, **mesh))
    assert _value(text, "params per GPU") == "33.09 K"
    assert _value(text, "   of these held by this rank") == "4.14 K"
    assert _value(text, "params of model") == whole
    assert "held by this rank" not in summary.render(_on_mesh(**mesh))


def test_summary_adds_the_recomputed_forward_passes_to_the_estimate() -> None:
    """As DeepSpeed: 2.5 forward passes in backward, 3.5 in all."""
    text = summary.render(training_step(), View(recompute_fwd_factor=0.5))
    forward = 2 * 2 * 4 * 64 * 256 + 4 * 256
    for label, passes, seconds in (
        ("bwd FLOPS per GPU = 2.5 * fwd flops per GPU / bwd latency", 2.5, 240.09e-6),
        ("fwd+bwd FLOPS per GPU = 3.5 * fwd flops per GPU / (fwd+bwd latency)", 3.5, 337.6e-6),
        ("FLOPS per GPU = 3.5 * fwd flops per GPU / iter latency", 3.5, 652.07e-6),
    ):
        expected = f"{round(passes * forward / seconds / 1e9, 2):g} GFLOPS"
        assert _value(text, label) == expected


def test_summary_with_a_measured_iteration_does_not_add_up_phases() -> None:
    timing = StepTiming(seconds=timed(backward=1.0), iteration_s=8.0)
    run = RunInfo(batch_size=4)
    text = summary.render(dataclasses.replace(training_step(), timing=timing, run=run))
    assert _value(text, "iter latency") == "8 s"
    assert _value(text, "samples/second") == "0.5"
    assert _value(text, "step latency") == "n/a"
    assert "world size" not in text


def test_summary_of_a_forward_pass_has_no_training_lines() -> None:
    text = summary.render(lenet5())
    assert "bwd latency:" not in text
    assert "step latency:" not in text
    assert "samples/second" not in text


def test_printout_of_an_empty_run_says_so() -> None:
    text = deepspeed.render(SMALL["empty"]())
    assert "Nothing has run under the profiler yet" in text
    assert "Nothing has run" not in deepspeed.render(lenet5())


def test_uncounted_operators_are_listed_and_mark_totals() -> None:
    text = deepspeed.render(lower_bound())
    assert _value(text, "fwd MACs per GPU") == f">= {3 * 5 * 7 + 11} MACs"
    assert _value(text, "fwd FLOPS per GPU = fwd flops per GPU / fwd latency").startswith(">= ")
    assert "{'Net': '>= 116 MACs'}" in text
    assert "(known): Linear(20 = 100% Params, 105 MACs = 90.52% MACs" in text
    listed = text[text.index("no known cost") :]
    assert "lib.mystery.default                  4  no formula" in listed
    assert "lib.scan.default                     2  ValueError: no length | here" in listed
    assert ">=" not in deepspeed.render(lenet5())


def test_tree_without_latency_shows_not_available() -> None:
    text = detailed.render(unmeasured())
    assert "(layers): ModuleList(\n    18 = 100% Params, 6 MACs = 100% MACs, 4 ms = 100%" in text
    assert "(fc): Linear(9 = 50% Params, 0 MACs = 0% MACs, n/a = n/a latency, n/a, in_f" in text
    assert "(head): Head(0 = 0% Params, 0 MACs = 0% MACs, 0 s = 0% latency, n/a)" in text


def test_tree_of_an_empty_run_has_no_percentages() -> None:
    assert detailed.render(SMALL["empty"]()).endswith(
        "Empty(0 = n/a Params, 0 MACs = n/a MACs, n/a = n/a latency, n/a)"
    )


def test_parts_stop_at_the_depth() -> None:
    profile = encoder(2)
    assert aggregated.render(profile, View(depth=0)).count("depth ") == 1
    assert aggregated.render(profile, View(depth=1)).count("depth ") == 2
    assert aggregated.render(profile, View(depth=99)).count("depth ") == 5
    assert aggregated.render(profile).count("depth ") == 5
    tree = detailed.render(profile, View(depth=1))
    assert "(query)" not in tree
    assert "  (layer): ModuleList(328 = 85.64% Params, " in tree
    assert tree.splitlines()[-2].endswith(", ...)")
    model_alone = detailed.render(profile, View(depth=0)).splitlines()
    assert model_alone[-1].startswith("Encoder(383 = ")
    assert detailed.render(profile, View(depth=99)) == detailed.render(profile)


def test_aggregated_marks_sums_with_an_inexact_latency() -> None:
    """A call takes 0.1 ms at least; the GELU and the first Linear took longer."""
    layers = [
        module("Linear", name="a", latency_s=1e-3),
        module("Linear", name="b", latency_s=1e-5),
        module("GELU", name="c", latency_s=5e-4),
    ]
    root = place(module("Net", *layers, latency_s=2e-3))
    text = aggregated.render(Profile(root=root, timing=StepTiming(resolution_s=1e-4)), View(top=2))
    seconds = [line.partition(" - ")[2] for line in text.splitlines() if "fwd latency -" in line]
    assert seconds == ["{'Net': '2 ms'}", "{'Linear': '~1.01 ms', 'GELU': '500 us'}"]


def test_aggregated_shows_at_most_the_classes_that_exist() -> None:
    assert aggregated.render(lenet5(), View(top=99)).count("Conv2d") == 3
    assert aggregated.render(lenet5(), View(top=0)).count("{}") == 9


def test_hostile_names_take_one_line_each() -> None:
    text = deepspeed.render(SMALL["hostile"]())
    text.encode()  # no lone surrogate is left
    tree = detailed.render(SMALL["hostile"]()).splitlines()
    start = tree.index("Root )(")
    assert len(tree) - start == 1 + 1 + len(HOSTILE_NAMES) + 1
    assert all(line.startswith("  (") for line in tree[start + 2 : -1])
    assert "\x1b" not in text
    assert "\u2028" not in text
    assert "Note: a note of two lines" in text


def test_shared_module_is_at_most_the_whole_model() -> None:
    tree = detailed.render(SMALL["shared"]())
    assert tree.count("10.1 K = 100% Params, 30 KMACs = 100% MACs") == 3
    assert "(second): Holder(0 = 0% Params, 0 MACs = 0% MACs" in tree


def test_conventions_are_stated_once() -> None:
    text = deepspeed.render(training_step())
    assert text.count("this rank (1 of 4), device cuda (NVIDIA A100), torch 2.13.0, phases") == 1
    assert text.count("only the part of causal attention that the mask keeps is counted") == 1
    assert "Latency: hooks, device synchronised once, 5 runs, spread 1.5 us." in text
    outside = 3 * 4 * 64 + 2 * 33_088
    assert f"code): {round(outside / 1e3, 2):g} KFLOPs; in the operator table" in text
    assert "Note: the first step was left out" in text
    assert "Latency: measured, method not recorded." in deepspeed.render(lenet5())
    assert "Latency: not measured." in deepspeed.render(SMALL["hostile"]())
    assert "the full Sq x Sk rectangle is counted" in deepspeed.render(lenet5())


def test_folded_tree_shows_identical_layers_once_with_their_sums() -> None:
    tree = detailed.render(encoder(12), View(fold=True)).splitlines()
    layers = [line for line in tree if "(0-11): 12 x Layer(" in line]
    assert len(layers) == 1
    macs = 12 * 4 * 3 * 5 * 7
    numbers = tree[tree.index(layers[0]) + 1]
    share = round(100 * 12 * (2 * 42 + 2 * 40) / (12 * 164 + 55), 2)
    assert f"{share:g}% Params, {macs / 1e3:g} KMACs = 100% MACs, 78 ms = 86.67%" in numbers
    assert not any("(1): Layer(" in line for line in tree)


def test_render_leaves_the_profile_unchanged() -> None:
    profile = training_step()
    before = profile.to_json()
    assert deepspeed.render(profile) == deepspeed.render(profile)
    assert profile.to_json() == before


@given(profiles)
def test_printout_of_any_profile_has_a_line_per_module(profile: Profile) -> None:
    text = deepspeed.render(profile, View(top=2))
    deepspeed.render(profile, View(fold=True, depth=1))
    assert text.count("depth ") >= 1
    tree = detailed.render(profile).splitlines()
    modules = list(profile.root.walk())
    containers = [node for node in modules if node.children]
    legend = detailed.render(SMALL["empty"]()).splitlines()[:-1]
    assert len(tree) == len(legend) + len(modules) + 2 * len(containers)


def test_rate_with_a_backward_pass_inside_the_forward_pass_counts_its_time_once() -> None:
    """10 FLOPs forward and 20 backward in 4 s; the forward pass took 3 s, backward included."""
    ops = (
        OpTotal(op="lib.a", phase="forward", calls=1, cost=OpCost(flops=10)),
        OpTotal(op="lib.a", phase="backward", calls=1, cost=OpCost(flops=20)),
    )
    root = ModuleNode(fqn="", class_name="Net", calls=1, seconds=timed(forward=3.0), ops=ops)

    def rate(**timing: float) -> str:
        profile = Profile(root=root, timing=StepTiming(seconds=timed(backward=3.0), **timing))
        label = "fwd+bwd FLOPS per GPU = counted flops per GPU"
        lines = deepspeed.render(profile).splitlines()
        return next(line for line in lines if line.startswith(label)).split(":")[1].strip()

    assert rate() == "5 FLOPS"  # not known to overlap
    assert rate(iteration_s=4.0) == "7.5 FLOPS"


def test_latency_below_the_timers_resolution_is_marked() -> None:
    """Two calls of 3 µs each are below a resolution of 5 µs; one of 6 µs is not."""
    short = ModuleNode(fqn="a", name="a", class_name="Short", calls=2, seconds=timed(forward=6e-6))
    long = ModuleNode(fqn="b", name="b", class_name="Long", calls=1, seconds=timed(forward=6e-6))
    root = ModuleNode(
        fqn="", class_name="Net", calls=1, seconds=timed(forward=2e-5), children=(short, long)
    )
    text = deepspeed.render(Profile(root=root, timing=StepTiming(resolution_s=5e-6)))
    assert "(a): Short(0 = n/a Params, 0 MACs = n/a MACs, ~6 us" in text
    assert "(b): Long(0 = n/a Params, 0 MACs = n/a MACs, 6 us" in text
    note = "10 %: below the timer's resolution of 5 us per module call."
    assert f"~ latency may be off by more than {note}" in text
    assert "~" not in deepspeed.render(Profile(root=root))


def test_the_models_own_latency_is_marked() -> None:
    root = ModuleNode(fqn="", class_name="Net", calls=1, seconds=timed(forward=3e-6))

    def latency(timing: StepTiming) -> str:
        lines = deepspeed.render(Profile(root=root, timing=timing)).splitlines()
        return (
            next(line for line in lines if line.startswith("fwd latency:")).split(": ")[1].strip()
        )

    assert latency(StepTiming(resolution_s=5e-6)) == "~3 us"
    assert latency(StepTiming(resolution_s=2e-6)) == "3 us"


@pytest.mark.slow
def test_printout_of_deep_and_wide_trees_is_complete() -> None:
    levels = 1_500  # deeper than Python's stack; the text is quadratic in depth
    text = detailed.render(deep(levels))
    assert text.count("Level(") == levels
    assert detailed.render(deep(levels), View(fold=True)).count("Level(") == levels
    assert len(deepspeed.render(wide(10_000)).splitlines()) > 10_000


def test_rate_with_zero_latency_is_not_available() -> None:
    root = module("Net", ops=(op("aten.mm.default", macs=3),), latency_s=0.0)
    text = deepspeed.render(Profile(root=root))
    assert _value(text, "fwd latency") == "0 s"
    assert _value(text, "fwd FLOPS per GPU = fwd flops per GPU / fwd latency") == "n/a"


def test_summary_names_the_step_of_the_profile_unless_the_view_does() -> None:
    profile = dataclasses.replace(lenet5(), run=RunInfo(step=7))
    assert "Profile Summary at step 7:" in summary.render(profile)
    assert "Profile Summary at step 3:" in summary.render(profile, View(step=3))


def test_make_view_with_a_negative_depth_shows_all_levels() -> None:
    assert deepspeed.make_view(module_depth=-1).depth is None
    made = deepspeed.make_view(
        profile_step=3, module_depth=2, top_modules=5, detailed=False, fold=True
    )
    assert made == View(step=3, depth=2, top=5, detailed=False, fold=True)


def test_summary_marks_latencies_that_are_inexact() -> None:
    """Operators take 1 ms each at least; the forward pass was timed by itself."""
    coarse = dataclasses.replace(training_step().timing, operator_resolution_s=1e-3)
    text = deepspeed.render(dataclasses.replace(training_step(), timing=coarse))
    assert _value(text, "fwd latency") == "97.51 us"
    assert _value(text, "bwd latency") == "~240.09 us"
    assert _value(text, "step latency") == "~314.47 us"
    assert _value(text, "iter latency") == "~652.07 us"


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("profile_step", "3", 0),
        ("profile_step", -1, 0),
        ("module_depth", "all", -1),
        ("module_depth", -2, -1),
        ("top_modules", "all", 1),
        ("top_modules", 0, 1),
        ("top_modules", -1, 1),
    ],
)
def test_view_of_a_wrong_parameter_names_it(name: str, value: Any, least: int) -> None:
    with pytest.raises(ConfigError, match=f"{name}='?{value}'?: pass an int of at least {least}"):
        deepspeed.make_view(**{name: value})
