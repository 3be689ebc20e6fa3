"""The HTML page as text: self-contained, with names as data."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given

from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.profile import (
    CommGroup,
    CommTotal,
    DeviceMemory,
    HeldBytes,
    MemoryPeak,
    MemoryPoint,
    MemoryProfile,
    MemoryUse,
    ModuleMemory,
    ModuleNode,
    OpTotal,
    PeakMoment,
    PhaseBytes,
    Profile,
    RoleBytes,
    StepTiming,
    TensorInput,
)
from dispatch_flops.profile.cost import OpCost, Phase
from dispatch_flops.renderers import View, html, overview
from dispatch_flops.renderers.explanations import counting
from dispatch_flops.renderers.html.document import embedded
from dispatch_flops.renderers.html.payload import payload
from tests.helpers.html_pages import unpacked
from tests.helpers.trees import (
    HOSTILE_NAMES,
    SMALL,
    deep,
    encoder,
    hostile,
    lower_bound,
    profiles,
    timed,
    training_step,
    wide,
)

A100 = MACHINES["NVIDIA A100-SXM4-80GB"]


class _Page(HTMLParser):
    """The elements and texts that a browser would parse."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "title": []}
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag if tag in self.texts else None
        if self._inside:
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside][-1] += data

    @property
    def data(self) -> Any:
        return unpacked(self.texts["script"][0])


@pytest.mark.parametrize("name", SMALL)
def test_page_loads_nothing_from_elsewhere(name: str) -> None:
    page = _Page(html.render(SMALL[name]()))
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2
    assert not {"iframe", "img", "object", "embed", "base", "form"} & set(tags)
    for tag, attributes in page.tags:
        assert "src" not in attributes
        assert tag != "link" or attributes["href"] == "data:,"
        assert not any(name.startswith("on") for name in attributes)


def test_policy_allows_only_the_scripts_of_the_page() -> None:
    page = _Page(html.render(training_step()))
    policy = next(
        a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src" not in policy  # default-src forbids it
    hashes = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in page.texts["script"][1:]
    ]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes


def test_pages_of_equal_profiles_are_equal() -> None:
    assert html.render(training_step()) == html.render(training_step())


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_hostile_class_name_is_text_in_the_title(name: str) -> None:
    root = dataclasses.replace(hostile().root, class_name=name)
    text = html.render(Profile(root=root))
    text.encode()  # no lone surrogate is left outside the JSON
    assert len(_Page(text).texts["script"]) == 2
    assert text.count("</script") == 2
    assert _Page(html.render(hostile(), View(title=name or "x"))).tags == _Page(text).tags


def test_embedded_data_cannot_end_its_element() -> None:
    data = {"a": "</script><!-- <script>", "b": "\u2028\ud800😀"}
    text = embedded(data)
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", text)
    assert unpacked(text) == data


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("machine", [None, A100])
def test_embedded_data_is_the_payload(name: str, machine: Any) -> None:
    profile = SMALL[name]()
    page = _Page(html.render(profile, View(machine=machine, title="T")))
    found = machine or html.machine_of(profile)
    assert page.data == payload(profile, found, "T")


def test_large_counts_are_embedded_exactly() -> None:
    cost = OpCost(macs=3**40, flops=2 * 3**40 + 1, bytes_read=5**27)
    root = ModuleNode(
        fqn="",
        class_name="Huge",
        own_params=7**20,
        total_params=7**20,
        calls=1,
        ops=(OpTotal(op="lib.huge", phase="forward", calls=1, cost=cost),),
    )
    data = _Page(html.render(Profile(root=root).check())).data
    assert data["modules"]["macs"]["all"] == [3**40]
    assert data["modules"]["flops"]["all"] == [2 * 3**40 + 1]
    assert data["modules"]["bytes"]["all"] == [5**27]
    assert data["modules"]["params"] == [7**20]
    assert data["operators"][0]["flops"] == data["headline"]["hardware_flops"] == 2 * 3**40 + 1


@given(profiles)
def test_columns_of_any_profile_hold_inclusive_totals(profile: Profile) -> None:
    data = unpacked(embedded(payload(profile, A100, "T")))
    columns = data["modules"]
    nodes = [*profile.root.walk(), *([profile.outside] if profile.outside.ops else [])]
    assert columns["fqn"] == [node.fqn for node in nodes]
    assert columns["flops"]["all"] == [node.total().flops for node in nodes]
    assert columns["macs"]["all"] == [node.total().macs for node in nodes]
    for view in data["views"][1:]:
        assert columns["bytes"][view] == [node.total(view).bytes_total for node in nodes]
    assert [i in columns["lower_bound"]["all"] for i in range(len(nodes))] == [
        node.is_lower_bound for node in nodes
    ]
    position = {id(node): i for i, node in enumerate(nodes)}
    for i, node in enumerate(nodes):
        assert all(columns["parent"][position[id(child)]] == i for child in node.children)


def test_split_has_the_figures_of_each_phase() -> None:
    profile = training_step()
    data = payload(profile, None, "T")
    assert data["views"] == ["all", "forward", "backward", "recompute", "optimizer"]
    assert sum(part["flops"] for part in data["split"]) == profile.total().flops
    seconds = {part["phase"]: part["seconds"] for part in data["split"]}
    assert seconds == {
        "forward": 97.51e-6,
        "backward": 240.09e-6,
        "recompute": None,
        "optimizer": 314.47e-6,
    }


def test_latency_of_all_phases_is_given_only_where_all_were_measured() -> None:
    """Backward was not measured per module: the forward alone is not the latency of all phases."""
    profile = training_step()
    columns = payload(profile, None, "T")["modules"]
    assert set(columns["latency"]["all"]) == {None}
    assert columns["latency"]["forward"][1] == 38.15e-6
    both = profile.map_nodes(
        lambda node: dataclasses.replace(
            node, seconds=timed(forward=0.25, backward=0.5) if node.calls else node.seconds
        )
    )
    columns = payload(both, None, "T")["modules"]
    calls = [node.calls for node in (*profile.root.walk(), profile.outside)]
    assert columns["latency"]["all"] == [0.75 if n else None for n in calls]


def test_latencies_that_are_inexact_are_marked() -> None:
    """Operators take 1 ms each at least: no phase of 97 to 314 us can be exact."""
    exact = payload(training_step(), None, "T")
    assert not exact["headline"]["seconds_are_inexact"]
    assert not any(part["inexact"] for part in exact["split"])
    assert not any(exact["modules"]["inexact"].values())
    coarse = dataclasses.replace(training_step().timing, operator_resolution_s=1e-3)
    data = payload(dataclasses.replace(training_step(), timing=coarse), None, "T")
    assert data["headline"]["seconds_are_inexact"]
    assert {part["phase"]: part["inexact"] for part in data["split"]} == {
        "forward": False,  # was timed by itself
        "backward": True,
        "recompute": False,  # has no time of its own
        "optimizer": True,
    }
    modules = list(range(len(data["modules"]["fqn"])))
    inexact = data["modules"]["inexact"]
    assert (inexact["all"], inexact["forward"], inexact["backward"]) == (modules, [], modules)


def test_utilisation_that_is_not_known_says_why() -> None:
    top = payload(training_step(), None, "T")["headline"]
    assert top["mfu"] is None
    assert top["why_no_mfu"] == "the device's peaks are not known; pass machine="


def test_uncounted_operators_are_listed_with_reasons() -> None:
    data = payload(lower_bound(), None, "T")
    assert data["headline"]["lower_bound"] is True
    assert data["uncounted"] == [
        {"op": "lib.mystery.default", "calls": 4, "why": "no formula"},
        {"op": "lib.scan.default", "calls": 2, "why": "ValueError: no\nlength | here"},
    ]
    assert payload(encoder(), None, "T")["uncounted"] == []


def test_identical_layers_share_rows_with_their_sum_and_one_of_them() -> None:
    data = payload(encoder(12), None, "T")
    folded = data["folded"]
    assert list(zip(folded["name"], folded["class_name"], folded["parent"], strict=True)) == [
        ("Encoder", "Encoder", -1),
        ("embedding", "Embedding", 0),
        ("layer.0-11", "12 x Layer", 0),
        ("each", "Layer", 2),
        ("query", "Linear", 3),
        ("key", "Linear", 3),
        ("mlp", "Sequential", 3),
        ("0-1", "2 x Linear", 6),
        ("each", "Linear", 7),
    ]
    assert folded["modules"] == [1, 1, 12, 1, 1, 1, 1, 2, 1]
    linear_macs = 3 * 5 * 7
    assert folded["macs"]["all"] == [
        12 * 4 * linear_macs, 0, 12 * 4 * linear_macs, 4 * linear_macs,
        linear_macs, linear_macs, 2 * linear_macs, 2 * linear_macs, linear_macs,
    ]  # fmt: skip
    assert data["modules"]["modules"] == [1] * (3 + 12 * 6)
    assert payload(SMALL["lenet5"](), None, "T")["folded"] is None


def test_latency_of_a_run_is_the_sum_and_of_each_the_mean() -> None:
    """The layers take 1, 2, ..., 12 ms."""
    folded = payload(encoder(12), None, "T")["folded"]
    assert folded["latency"]["all"][2:4] == [pytest.approx(78e-3), pytest.approx(78e-3 / 12)]


def test_rows_of_a_run_have_the_mean_payload_of_its_members() -> None:
    group = CommGroup(name="default_pg", size=2, ranks=(0, 1))
    sent = tuple(
        CommTotal(
            fqn=f"layer.{layer}", phase="backward", kind="all_reduce", op="c10d.allreduce_.default",
            group=group, calls=1, payload_bytes=100 + layer, dtype="float32",
        )
        for layer in range(3)
    )  # fmt: skip
    data = payload(dataclasses.replace(encoder(3), communication=sent), None, "T")
    assert data["folded"]["payload"] == [303, None, 303, 101, *[None] * 5]
    assert payload(encoder(3), None, "T")["folded"]["payload"] is None


def test_top_of_the_page_says_what_the_run_was() -> None:
    profile = dataclasses.replace(
        training_step(),
        run=dataclasses.replace(
            training_step().run,
            inputs=(TensorInput(name="x", dtype="float32", shape=(4, 64), device="cuda:0"),),
        ),
    )
    assert dict(payload(profile, A100, "T")["run"]) == {
        "Step": "1, 4 samples",
        "Inputs": "x float32 [4, 64] on cuda:0",
        "Device": "cuda (NVIDIA A100), torch 2.13.0, rank 1 of 4",
        "Machine": "NVIDIA A100-SXM4-80GB, 19.5 TFLOP/s float32, 312 TFLOP/s bfloat16, 2.04 TB/s",
    }
    assert "Machine" not in dict(payload(profile, None, "T")["run"])


def test_top_of_the_page_names_the_training_step_as_the_printout_does() -> None:
    """16 samples in half a second are 32 a second."""
    run = dataclasses.replace(training_step().run, step=3, batch_size=16)
    timing = StepTiming(iteration_s=0.5)
    profile = dataclasses.replace(training_step(), run=run, timing=timing)
    first, *_ = payload(profile, None, "T")["run"]
    assert first == ["Step", "3, 16 samples, 32 samples/s"]
    assert f"Step     {first[1]}\n" in overview.render(profile)
    later = dataclasses.replace(profile, run=dataclasses.replace(run, batch_size=None))
    assert payload(later, None, "T")["run"][0] == ["Step", "3"]
    assert "Step" not in dict(payload(encoder(), None, "T")["run"])


def test_memory_has_the_peaks_by_role_and_what_the_highest_consists_of() -> None:
    uses = (
        MemoryUse(role="gradients", fqn="0", phase="backward", bytes=700),
        MemoryUse(role="gradients", fqn="", phase="backward", bytes=200),
        MemoryUse(role="parameters", bytes=300),
    )
    backward = PeakMoment(fqn="0", phase="backward", operator="aten.mm.default")
    forward = PeakMoment(fqn="0", phase="forward", operator="aten.mm.default")
    peaks = (
        MemoryPeak(peak_bytes=300, peak_at=forward, uses=uses[2:]),
        MemoryPeak(peak_bytes=1200, peak_at=backward, uses=uses),
    )
    memory = MemoryProfile(devices=(DeviceMemory(device="cuda:0", peaks=peaks),))
    data = payload(dataclasses.replace(training_step(), memory=memory), None, "T")["memory"]
    assert (data["peak"], data["device"]) == (1200, "cuda:0")
    assert [(peak["phase"], peak["bytes"], peak["roles"]) for peak in data["peaks"]] == [
        ("forward", 300, {"parameters": 300}),
        ("backward", 1200, {"gradients": 900, "parameters": 300}),
    ]
    assert [(use["role"], use["module"], use["phase"], use["bytes"]) for use in data["uses"]] == [
        ("gradients", "0", "backward", 700),
        ("gradients", "Sequential", "backward", 200),
        ("parameters", "", "before", 300),
    ]
    assert payload(training_step(), None, "T")["memory"] is None
    empty_memory = dataclasses.replace(training_step(), memory=MemoryProfile(devices=()))
    assert payload(empty_memory, None, "T")["memory"] is None


def point(operators: int, at: PeakMoment, **sizes: int) -> MemoryPoint:
    return MemoryPoint(operators=operators, at=at, bytes_by_role=RoleBytes(sizes))


def test_timeline_has_a_column_for_each_role_and_marks_the_peak() -> None:
    mm = PeakMoment(fqn="", phase="forward", operator="aten.mm.default")
    mul = PeakMoment(fqn="0", phase="backward")
    points = (
        point(2, mm, parameters=300),
        point(4, mul, parameters=300, gradients=500),
        point(7, mm, parameters=300, activations=11),
    )
    cpu = DeviceMemory(device="cpu", peaks=(), timeline=(point(1, mul, inputs=5),))
    devices = (DeviceMemory(device="cuda:0", peaks=(), timeline=points), cpu)
    run = dataclasses.replace(training_step().run, device="cuda:0")
    profile = dataclasses.replace(training_step(), memory=MemoryProfile(devices=devices), run=run)
    first, second = payload(profile, None, "T")["memory"]["timelines"]
    assert first == {
        "device": "cuda:0",
        "operators": [2, 4, 7],
        "total": [300, 800, 311],
        "bytes": {"parameters": [300] * 3, "gradients": [0, 500, 0], "activations": [0, 0, 11]},
        "at": [0, 1, 0],
        "moments": [["Sequential", "forward", "aten.mm.default"], ["0", "backward", ""]],
        "peak": 1,
        "capacity": None,
    }
    assert second["bytes"] == {"inputs": [5]}
    # The machine is the one that the run was on: its memory is not the host's.
    first, second = payload(profile, A100, "T")["memory"]["timelines"]
    assert first["capacity"] == {"bytes": A100.memory_bytes, "name": A100.name}
    assert second["capacity"] is None
    unknown = dataclasses.replace(A100, memory_bytes=None)
    assert payload(profile, unknown, "T")["memory"]["timelines"][0]["capacity"] is None


def test_modules_hold_bytes_that_add_up_over_a_run_of_identical_ones() -> None:
    """Layer n keeps 10 + n bytes for backward, and peaks at 100 + n."""

    def with_memory(node: ModuleNode) -> ModuleNode:
        if node.class_name != "Layer":
            return node
        number = int(node.name)
        held = HeldBytes(activations=10 + number)
        peaks = PhaseBytes({"forward": 100 + number, "backward": 7})
        return dataclasses.replace(
            node, memory=ModuleMemory(own=held, total=held, peak_bytes=peaks)
        )

    profile = dataclasses.replace(
        encoder(3).map_nodes(with_memory),
        memory=MemoryProfile(devices=(DeviceMemory(device="cpu", peaks=()),)),
    )
    data = payload(profile, None, "T")
    labels = data["folded"]["name"]
    run, each = labels.index("layer.0-2"), labels.index("each")
    assert data["folded"]["held"]["activations"][run] == 10 + 11 + 12
    assert data["folded"]["held"]["activations"][each] == 11
    assert (data["folded"]["peak"][run], data["folded"]["peak"][each]) == (102, 102)
    assert [name for name, _ in data["memory"]["held"]] == [*data["folded"]["held"]]
    assert "kv_cache" not in data["folded"]["held"]
    without = payload(encoder(3), None, "T")["modules"]
    assert without["held"] is None and without["peak"] is None


def test_roofline_holds_points_if_the_machine_is_known() -> None:
    assert payload(training_step(), None, "T")["roofline"] is None
    points = payload(training_step(), A100, "T")["roofline"]
    assert points["peaks"] == {"float32": 19.5e12, "bfloat16": 312e12}
    (first,) = [point for point in points["modules"] if point["name"] == "0"]
    flops, moved = 2 * 4 * 64 * 256, 4 * (4 * 64 + 64 * 256 + 256) + 4 * 4 * 256
    assert (first["flops"], first["bytes"]) == (flops, moved)
    assert first["attainable"] == pytest.approx(flops / max(flops / 19.5e12, moved / 2.039e12))
    assert first["achieved"] == pytest.approx(flops / 38.15e-6)
    assert first["bound"] == "memory"


def test_roofline_without_a_machine_takes_the_profiles_device() -> None:
    run = dataclasses.replace(training_step().run, device_name="NVIDIA H200")
    profile = dataclasses.replace(training_step(), run=run)
    assert _Page(html.render(profile)).data["roofline"]["machine"] == "NVIDIA H200"


def test_columns_of_a_model_deeper_than_pythons_stack_are_complete() -> None:
    data = payload(deep(1_500), None, "T")
    assert data["modules"]["flops"]["all"] == list(range(1_500, 0, -1))
    assert data["modules"]["parent"] == list(range(-1, 1_499))


def test_page_says_how_attention_and_macs_are_counted() -> None:
    page = html.render(training_step())
    assert counting("all") in page
    facts = dict(_Page(page).data["facts"])
    assert facts["Attention"] == "only the part of causal attention that the mask keeps is counted"


def test_headline_above_the_peak_carries_a_warning() -> None:
    timing = StepTiming(iteration_s=1e-12)
    fast = dataclasses.replace(training_step(), timing=timing)
    assert payload(fast, A100, "T")["headline"]["warning"].startswith("above the peak")
    assert payload(training_step(), A100, "T")["headline"]["warning"] == ""


@pytest.mark.slow
def test_page_of_ten_thousand_modules_in_four_phases_is_below_one_and_a_half_megabytes() -> None:
    cost = OpCost(macs=3**20, flops=2 * 3**20 + 1, bytes_read=5**9)
    phases: tuple[Phase, ...] = ("forward", "backward", "recompute", "optimizer")
    profile = wide(10_000).map_nodes(
        lambda node: dataclasses.replace(
            node,
            extra_repr=f"in_features={node.name}, out_features=768, bias=True",
            ops=tuple(
                OpTotal(op="aten.mm.default", phase=phase, calls=1, cost=cost * (1 + node.calls))
                for phase in phases
                for _ in node.ops
            ),
        )
    )
    page = html.render(profile)
    assert _Page(page).data["views"] == ["all", *phases]
    assert len(page.encode()) < 1_500_000
