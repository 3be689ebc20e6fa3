"""The HTML page in a real browser: drawing, interaction and absence of network requests."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from dispatch_flops import FlopCounterMode, profile_model, units
from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.cli.demo import bert_base
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
    PeakMoment,
    PhaseBytes,
    Profile,
    RoleBytes,
    StepTiming,
)
from dispatch_flops.profile.cost import Phase
from dispatch_flops.renderers import View, html
from dispatch_flops.renderers.html.payload import payload
from tests.helpers.paths import BENCHMARKS
from tests.helpers.trees import (
    SMALL,
    deep,
    encoder,
    hostile,
    linear,
    lower_bound,
    module,
    op,
    place,
    timed,
    training_step,
    wide,
)

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

A100 = MACHINES["NVIDIA A100-SXM4-80GB"]
RESULTS = BENCHMARKS / "results"
MOST_BYTES = 150_000  # of an image in the repository
SECONDS = 60  # to wait for what a page does later; only a page that never does it takes as long

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars "
    "--window-size=1280,1500"
)


_UNDRAWN = (
    "return [...document.querySelectorAll('.plot')]"
    ".some((place) => place.checkVisibility() && !place.childElementCount)"
)


class Report:
    """An open page and the actions of its reader."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        script = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".map((e) => e.textContent.toWellFormed())"
        )
        found: list[str] = self.run(script, selector)
        return found

    def choose(self, name: str, value: str) -> None:
        label = f"input[name={name}][value={value}] + span"
        self.driver.find_element("css selector", label).click()

    def search(self, table: str, words: str) -> None:
        box = self.driver.find_element("css selector", f"#{table} input[type=search]")
        box.clear()
        box.send_keys(words)

    def sort(self, table: str, heading: str) -> None:
        for button in self.driver.find_elements("css selector", f"#{table} th button"):
            if button.text == heading:
                self.run("arguments[0].scrollIntoView({block: 'center'})", button)
                button.click()
                return
        raise AssertionError(f"no column {heading}")

    def until(self, true: Callable[[], Any]) -> Any:
        """Wait until ``true()`` is truthy and return it."""
        end = time.monotonic() + SECONDS
        while not (found := true()) and time.monotonic() < end:
            time.sleep(0.02)
        assert found
        return found

    @property
    def shape(self) -> str:
        """The shape of the tree chart."""
        found: str = self.run("return document.getElementById('tree').dataset.shape")
        return found

    @property
    def sizes(self) -> list[float]:
        """The sizes of the areas that the tree chart has drawn, the whole first."""
        return [float(size) for size in self.attributes("#tree .area", "data-size")]

    @property
    def labels(self) -> list[str]:
        """The texts in the tree chart, each of one line of an area."""
        return self.texts("#tree tspan")

    def attributes(self, selector: str, name: str) -> list[str]:
        script = (
            "return [...document.querySelectorAll(arguments[0])]"
            ".map((e) => e.getAttribute(arguments[1]))"
        )
        found: list[str] = self.run(script, selector, name)
        return found

    def press(self, selector: str) -> None:
        """Focus an element and press Enter, as a reader without a mouse does."""
        found = self.driver.find_element("css selector", selector)
        self.run("arguments[0].focus({preventScroll: true})", found)
        found.send_keys("\ue007")

    @property
    def modules(self) -> list[str]:
        """The names in the table of modules."""
        return self.texts("#modules tbody th button.link")

    def heading(self, table: str, heading: str) -> int:
        """Return the position of a column among those of a table, from 1 as in CSS."""
        return 1 + self.texts(f"#{table} thead th").index(heading)

    def column(self, table: str, index: int) -> list[str]:
        return self.texts(f"#{table} tbody tr > :nth-child({index})")

    def messages(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses outside the page that it requested since the last call."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        requested = [s["request"]["url"] for s in sent if s["documentURL"].startswith("file:")]
        return [url for url in requested if not url.startswith(("file:", "data:", "blob:"))]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*_FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = webdriver.Chrome(options=options, service=Service(DRIVER))
    chromium.set_page_load_timeout(60)
    yield chromium
    chromium.quit()


@pytest.fixture
def open_report(driver: Any, tmp_path: Path) -> Iterator[Callable[..., Report]]:
    """Open the page of a profile; it must log no message and make no request by the end."""
    report = Report(driver)

    def open_(profile: Profile, **options: Any) -> Report:
        path = tmp_path / "report.html"
        path.write_text(html.render(profile, View(**options)), encoding="utf-8")
        driver.get(path.as_uri())
        report.until(lambda: driver.find_elements("css selector", "#tree .area, #tree svg:empty"))
        # Each chart is drawn when the browser first tells its width, not all in one frame.
        report.until(lambda: not report.run(_UNDRAWN))
        return report

    yield open_
    assert report.messages() == []
    assert report.requests() == []


@pytest.mark.parametrize("name", SMALL)
def test_page_of_small_profiles_draws_every_part(
    name: str, open_report: Callable[..., Report]
) -> None:
    profile = SMALL[name]()
    report = open_report(profile, machine=A100)
    cards = dict(zip(report.texts("#headline dt"), report.texts("#headline .value"), strict=True))
    mark = "≥ " if profile.is_lower_bound else ""
    assert cards["Parameters"] == units.params_text(profile.total_params)
    assert cards["MACs"] == mark + units.count_text(profile.total().macs)
    assert cards["FLOPs"] == mark + units.count_text(profile.total().flops)
    assert len(report.texts("#operators tbody tr")) == len(
        {(op.op, op.dtype) for op in profile.op_totals()}
    )
    roofline = payload(profile, A100, "")["roofline"]
    points = [*roofline["modules"], *roofline["operators"]]
    placed = [p for p in points if p["achieved"] is not None or p["attainable"] is not None]
    if placed:  # the plot is drawn when the page has been laid out
        report.until(lambda: report.texts("#roofline .point"))
    assert len(report.texts("#roofline .point")) == len(placed)


def test_points_of_a_roofline_that_are_lower_bounds_are_marked(
    open_report: Callable[..., Report],
) -> None:
    exact, bound = (
        module("Layer", name=name, ops=(op(f"lib.{name}", macs=7, n_bytes=(3, 2), **fields),))
        for name, fields in (("exact", {}), ("bound", {"calls": 3, "uncounted": 2}))
    )
    report = open_report(Profile(root=place(module("Net", exact, bound))), machine=A100)
    names, flops = (
        report.column("roofline-table", report.heading("roofline-table", heading))
        for heading in ("Name", "FLOPs")
    )
    assert dict(zip(names, flops, strict=True)) == {
        name: f"{'≥ ' if 'bound' in name else ''}14"
        for name in ("exact", "bound", "lib.exact", "lib.bound")
    }
    assert "mark ≥ have operators of no known cost" in report.texts("#roofline-note")[0]


def test_page_without_its_policy_shows_messages_and_requests(driver: Any, tmp_path: Path) -> None:
    """The other tests rely on this to see what a page does."""
    path = tmp_path / "open.html"
    path.write_text(html.render(encoder()).replace("Content-Security-Policy", "none"))
    driver.get(path.as_uri())
    report = Report(driver)
    report.run("console.error('seen'); fetch('http://127.0.0.1:9/').catch(() => {})")
    assert any("seen" in text for text in report.until(report.messages))
    assert report.until(report.requests) == ["http://127.0.0.1:9/"]


def test_policy_blocks_requests(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder())
    report.run("fetch('http://127.0.0.1:9/').catch(() => {})")
    # The log belongs to the browser: it may also hold late messages of an earlier page.
    report.until(lambda: any("Content Security Policy" in text for text in report.messages()))


def test_chart_follows_metric_phase_and_shape(open_report: Callable[..., Report]) -> None:
    profile = training_step()
    report = open_report(profile)
    assert report.shape == "icicle"
    assert report.sizes[0] == profile.total().flops
    report.choose("view", "backward")
    report.choose("metric", "macs")
    macs = profile.root.total("backward").macs
    assert report.sizes[0] == macs
    assert report.column("modules", report.heading("modules", "MACs"))[0] == units.count_text(macs)
    assert report.texts("#modules thead th")[1] == "% MACs"
    report.choose("metric", "bytes")
    report.choose("view", "all")
    assert report.sizes[0] == profile.total().bytes_total
    report.choose("metric", "params")
    assert report.sizes[0] == profile.total_params
    report.choose("metric", "latency")
    assert report.sizes[0] == pytest.approx((38.15 + 15.74 + 15.02) * 1e-6)
    report.choose("shape", "treemap")
    assert report.shape == "treemap"


def test_share_of_parameters_that_siblings_share_is_of_the_model(
    open_report: Callable[..., Report],
) -> None:
    """Two of three modules hold the same 30 of the model's 40 parameters."""
    children = (
        module(name.title(), name=name, own_params=n, ops=(op("lib.a", extra_flops=1),))
        for name, n in (("tied", 30), ("same", 30), ("free", 10))
    )
    root = dataclasses.replace(place(module("Net", *children)), total_params=40)
    report = open_report(Profile(root=root))
    report.choose("metric", "params")
    shares = dict(zip(report.modules, report.column("modules", 2), strict=True))
    assert shares == {"Net": "100%", "tied": "75%", "same": "75%", "free": "25%"}
    assert report.texts("#crumbs [aria-current]") == ["Net 100%"]
    assert any(label.endswith("75%") for label in report.labels)


def test_phases_have_latencies_only_where_some_were_measured(
    open_report: Callable[..., Report],
) -> None:
    profile = training_step()
    report = open_report(profile)
    assert "Latency" in report.texts("#split-table thead th")
    untimed = profile.map_nodes(lambda node: dataclasses.replace(node, seconds=timed()))
    open_report(dataclasses.replace(untimed, timing=StepTiming()))
    assert "Latency" not in report.texts("#split-table thead th")


def test_phase_of_any_name_can_be_chosen(open_report: Callable[..., Report]) -> None:
    name = 'my 1st "phase"]'
    ops = (op("aten.mm.default", macs=105), op("aten.mm.default", name, macs=2 * 105))  # type: ignore[arg-type]
    report = open_report(Profile(root=place(module("Net", ops=ops))))
    assert report.sizes == [2 * 3 * 105]
    report.run("document.querySelectorAll('input[name=view]')[2].click()")
    assert report.sizes == [2 * 2 * 105]


def test_small_intensities_are_not_0(open_report: Callable[..., Report]) -> None:
    """1 FLOP for 1,024 bytes: less than 0.01, and ticks of the roofline are powers of ten."""
    leaf = module("Copy", name="0", ops=(op("lib.a", extra_flops=1, n_bytes=(512, 512)),))
    report = open_report(Profile(root=place(module("Net", leaf))), machine=A100)
    assert report.column("operators", report.heading("operators", "FLOPs/byte")) == ["<0.01"]
    ticks = report.texts("#roofline text[text-anchor=middle]")
    assert {"0.001", "0.01", "0.1", "1", "10"} <= set(ticks)


def test_choice_without_measurements_is_disabled(open_report: Callable[..., Report]) -> None:
    report = open_report(training_step())
    enabled = "return !document.querySelector(arguments[0]).disabled"
    report.choose("metric", "latency")
    assert report.run(enabled, "input[value=forward]")
    assert not report.run(enabled, "input[value=optimizer]")
    open_report(hostile())
    assert not report.run(enabled, "input[value=latency]")


def current(report: Report) -> list[str]:
    return report.attributes("#crumbs [aria-current]", "data-label")


def test_click_zooms_into_a_module_and_out(open_report: Callable[..., Report]) -> None:
    report = open_report(training_step())
    assert current(report) == ["Everything that ran"]
    areas = report.driver.find_elements("css selector", "#tree .area")
    areas[[*report.attributes("#tree .area", "data-id")].index("0")].click()
    assert current(report) == ["Sequential"]
    assert len(report.driver.find_elements("css selector", "#tree .area")) < len(areas)
    report.driver.find_element("css selector", "#tree .area").click()
    assert current(report) == ["Everything that ran"]
    report.press("#modules tbody tr:nth-child(2) button.link")
    assert current(report) == ["2"]
    report.press("#crumbs button")
    assert current(report) == ["Everything that ran"]


def test_modules_that_hold_all_of_the_cost_are_a_path_and_not_columns(
    open_report: Callable[..., Report],
) -> None:
    """All FLOPs of the encoder are in its layers; the embedding looks up rows."""
    report = open_report(encoder(12))
    assert current(report) == ["layer.0-11"]
    assert report.texts("#crumbs button") == ["Encoder 100%"]
    assert report.sizes[0] == 12 * 4 * 2 * 3 * 5 * 7
    report.press("#crumbs button")
    assert current(report) == ["Encoder"]
    report.driver.find_element("id", "fold").click()
    assert current(report) == ["layer"]


def test_identical_layers_are_one_area_of_their_sum(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder(12))
    linear_flops = 2 * 3 * 5 * 7
    assert report.labels[0] == "layer.0-11 · 12 x Layer"
    assert sorted(report.sizes)[:4] == [12 * linear_flops] * 2 + [24 * linear_flops] * 2
    report.driver.find_element("id", "fold").click()
    assert not any("12 x" in label for label in report.labels)
    assert linear_flops in report.sizes


def test_modules_are_a_tree_sorted_by_cost(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder(12))
    assert report.modules == [
        "Encoder", "layer.0-11", "each", "mlp", "0-1", "each", "query", "key", "embedding",
    ]  # fmt: skip
    shares = report.column("modules", 2)
    assert shares[:6] == ["100%", "100%", "8.33%", "4.17%", "4.17%", "2.08%"]
    widths = "return [...document.querySelectorAll('#modules .share')].map((e) => e.style.width)"
    assert [float(width[:-1]) for width in report.run(widths)[:4]] == pytest.approx(
        [100, 100, 100 / 12, 100 / 24], rel=1e-3
    )
    assert report.attributes("#modules thead th", "aria-sort")[1] == "descending"
    report.sort("modules", "Params")
    assert report.modules[1] == "layer.0-11"  # 12 x 140 parameters; the embedding has 55
    report.sort("modules", "Params")
    assert report.modules[1] == "embedding"


def test_rows_of_modules_collapse_from_the_keyboard(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder(12))
    layers = "#modules tr:nth-child(2) button.toggle"
    assert report.attributes(layers, "aria-expanded") == ["true"]
    report.press(layers)
    assert report.modules == ["Encoder", "layer.0-11", "embedding"]
    assert report.attributes(layers, "aria-expanded") == ["false"]
    focused = "return document.activeElement === document.querySelector(arguments[0])"
    assert report.run(focused, layers)
    outline = "return getComputedStyle(document.activeElement).outlineStyle"
    assert report.run(outline) == "solid"
    report.press(layers)
    assert len(report.modules) == 9
    _, collapse = report.driver.find_elements("css selector", "#modules .tools button")
    collapse.click()
    assert report.modules == ["Encoder"]


def test_search_shows_modules_below_those_that_hold_them(
    open_report: Callable[..., Report],
) -> None:
    report = open_report(encoder(12))
    report.search("modules", "layer.11 linear")
    assert report.modules == ["Encoder", "layer", "11", "mlp", "0", "1", "query", "key"]
    assert report.texts("#modules output") == ["4 of 75 modules"]
    report.search("modules", " ")
    assert report.texts("#modules output") == ["75 modules"]


def test_button_shows_all_rows(open_report: Callable[..., Report]) -> None:
    report = open_report(wide(171))
    assert len(report.modules) == 40
    assert report.texts("#modules button.more") == ["Show all 172"]
    report.press("#modules button.more")
    assert len(report.modules) == 172
    assert not report.driver.find_element("css selector", "#modules button.more").is_displayed()


def test_operators_are_searched_and_sorted(open_report: Callable[..., Report]) -> None:
    report = open_report(training_step())
    report.search("operators", "BACKWARD aten.")
    assert set(report.column("operators", 1)) == {
        "aten.mm.default",
        "aten.threshold_backward.default",
        "aten.sum.dim_IntList",
    }
    assert report.texts("#operators output") == ["3 of 8 rows"]
    report.search("operators", "no such operator")
    assert report.column("operators", 1) == []
    report.search("operators", " ")
    report.sort("operators", "Calls")
    assert report.column("operators", report.heading("operators", "Calls"))[0] == "3"
    report.sort("operators", "Operator")
    assert report.run("return document.querySelector('#operators th').ariaSort") == "ascending"


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("name", SMALL)
def test_page_does_not_scroll_sideways(
    name: str, width: int, open_report: Callable[..., Report], driver: Any
) -> None:
    with at_width(driver, width):
        report = open_report(SMALL[name](), machine=A100)
        assert report.run("return document.documentElement.scrollWidth") == width
        assert report.run("return document.querySelector('#tree svg').clientWidth") < width


@contextmanager
def at_width(driver: Any, width: int) -> Iterator[None]:
    """Make the window this many pixels wide, as a desktop's or a telephone's."""
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_points_above_the_roof_are_explained(open_report: Callable[..., Report]) -> None:
    report = open_report(training_step(), machine=A100)
    assert not report.driver.find_element("id", "roofline-above").is_displayed()
    slow = dataclasses.replace(A100, bytes_per_s=1e6)
    open_report(training_step(), machine=slow)
    points = payload(training_step(), slow, "")["roofline"]
    above = [
        point
        for point in (*points["modules"], *points["operators"])
        if point["achieved"] is not None and point["achieved"] > point["attainable"]
    ]
    assert above
    (text,) = report.texts("#roofline-above")
    assert text.startswith(f"{len(above)} point")
    assert "tensors that stay in a cache" in text
    assert len(report.until(lambda: report.texts("#roofline .above"))) == len(above)


def test_memory_and_communication_are_shown_where_they_were_taken(
    open_report: Callable[..., Report],
) -> None:
    report = open_report(training_step())
    for section in ("memory-section", "communication-section"):
        assert not report.driver.find_element("id", section).is_displayed()
    open_report(with_memory_and_communication())
    assert report.texts("#memory-peaks dt") == ["forward: 9 KB", "backward: 12 KB"]
    assert report.attributes("#memory-peaks .bar", "aria-label") == [
        "parameters 3 KB, activations 6 KB",
        "parameters 3 KB, gradients 9 KB",
    ]
    assert report.texts("#memory-legend > span") == ["parameters", "gradients", "activations"]
    assert report.column("memory-table", 1) == ["gradients", "parameters"]
    assert [float(size) for size in report.attributes("#memory-map .area", "data-size")] == [
        12_000, 9_000, 9_000, 3_000, 3_000,
    ]  # fmt: skip
    assert report.column("communication", 1) == ["layer"]
    assert "69 B" in report.column("communication", report.heading("communication", "Payload"))
    assert report.column("modules", report.heading("modules", "Payload")) == ["69 B", "69 B"]


def test_peaks_that_are_not_exact_are_marked(open_report: Callable[..., Report]) -> None:
    profile, memory = with_timelines(), with_timelines().memory
    assert memory is not None
    lower = dataclasses.replace(memory, unseen=("lib.kernel",))
    about = dataclasses.replace(memory, decomposed=("aten.lstm.input",))
    for changed, mark in ((lower, "≥ "), (about, "~")):
        report = open_report(dataclasses.replace(profile, memory=changed))
        peaks = [text.split(": ")[1] for text in report.texts("#memory-peaks dt")]
        assert peaks and all(text.startswith(mark) for text in peaks)
        peak = report.heading("memory-modules", "Peak")
        assert all(text.startswith(mark) for text in report.column("memory-modules", peak))


def moments(*points: tuple[int, Phase, dict[str, int]]) -> tuple[MemoryPoint, ...]:
    return tuple(
        MemoryPoint(
            operators=operators,
            at=PeakMoment(fqn="layer", phase=phase, operator="aten.mm.default"),
            bytes_by_role=RoleBytes(sizes),
        )
        for operators, phase, sizes in points
    )


def with_timelines() -> Profile:
    """The same with memory over five operators on the GPU, and over one on the CPU."""
    timeline = moments(
        (1, "forward", {"parameters": 3000}),
        (2, "forward", {"parameters": 3000, "activations": 6000}),
        (4, "backward", {"parameters": 3000, "gradients": 9000}),
        (5, "optimizer", {"parameters": 3000, "gradients": 4500}),
    )
    profile = with_memory_and_communication()
    assert profile.memory is not None
    gpu = dataclasses.replace(profile.memory.devices[0], timeline=timeline)
    cpu = DeviceMemory(
        device="cpu",
        peaks=(
            MemoryPeak(
                peak_bytes=24,
                peak_at=PeakMoment(fqn="", phase="forward"),
                uses=(MemoryUse(role="inputs", bytes=24),),
            ),
        ),
        timeline=moments((1, "forward", {"inputs": 24})),
    )
    held = ModuleMemory(
        own=HeldBytes(parameters=3000, kv_cache=700),
        total=HeldBytes(parameters=3000, kv_cache=700),
        peak_bytes=PhaseBytes({"forward": 9000, "backward": 12_000}),
    )
    whole = dataclasses.replace(held, own=HeldBytes())
    return dataclasses.replace(
        profile.map_nodes(
            lambda node: dataclasses.replace(node, memory=held if node.name else whole)
        ),
        memory=MemoryProfile(devices=(gpu, cpu)),
        run=dataclasses.replace(profile.run, device="cuda"),
    )


BANDS_AT_HALF_THE_PEAK = """
const [chart] = arguments, all = (part) => [...document.querySelectorAll(`${chart} ${part}`)];
const top = Number(all('.peak-mark circle')[0].getAttribute('cy'));
return all('.moment').map((moment) => {
  const { x, y, width, height } = moment.getBBox();
  const point = new DOMPoint(x + width / 2, (top + y + height) / 2);
  return all('.band').flatMap((band, index) => (band.isPointInFill(point) ? [index] : []));
});
"""


def test_memory_over_the_run_is_drawn_by_role_with_its_peak(
    open_report: Callable[..., Report],
) -> None:
    report = open_report(with_timelines())
    assert report.texts("#memory-timelines h3, #memory-timelines > details > summary") == [
        "Over the run, on cuda:0", "Over the run, on cpu",
    ]  # fmt: skip
    chart = "#memory-timeline-0"
    # parameters, gradients and activations, from below
    assert report.attributes(f"{chart} .band", "class") == [
        "band fill-0",
        "band fill-1",
        "band fill-5",
    ]
    assert report.texts(f"{chart} .legend > span") == [
        "activations", "gradients", "parameters", "Phase:", "forward", "backward", "optimizer",
    ]  # fmt: skip
    assert report.texts(f"{chart} .peak-mark text") == ["peak 12 KB"]
    assert not report.texts(f"{chart} .capacity")
    assert report.texts(f"{chart} .moment title")[1] == (
        "9 KB after 2 operators\nlayer, forward, aten.mm.default\nactivations 6 KB\nparameters 3 KB"
    )
    # Point 2 stands for operators 1.5 to 3 of 0.5 to 5.5; its bytes are 9 of 12 KB at the peak.
    widths = [float(width) for width in report.attributes(f"{chart} .moment", "width")]
    assert widths == pytest.approx([sum(widths) * n / 5 for n in (1, 1.5, 1.5, 1)], abs=0.2)
    boxes = report.run(
        "return [...document.querySelectorAll(arguments[0])].map((e) => e.getBBox().height)",
        f"{chart} .band",
    )
    assert boxes == pytest.approx([boxes[0], 3 * boxes[0], 3 * boxes[0]], rel=0.02)
    # At half the peak, 6 KB, the first moment is empty, the second activations, and so on.
    assert report.run(BANDS_AT_HALF_THE_PEAK, chart) == [[], [2], [1], [1]]
    report.press(f"{chart} summary")
    assert report.column("memory-timeline-0-table", 1) == ["1", "2", "4", "5"]
    assert report.column("memory-timeline-0-table", 2) == ["3 KB", "9 KB", "12 KB", "7.5 KB"]
    assert report.column("memory-timeline-0-table", 4) == ["0 B", "0 B", "9 KB", "4.5 KB"]
    report.press("#memory-timelines > details > summary")
    report.until(lambda: report.texts("#memory-timeline-1 .band"))


def test_memory_of_roles_of_another_release_is_drawn(open_report: Callable[..., Report]) -> None:
    """A role may have any name, as that of the area that holds all roles."""
    profile = with_timelines()
    assert profile.memory is not None
    peak = MemoryPeak(
        peak_bytes=96,
        peak_at=PeakMoment(fqn="", phase="forward"),
        uses=(MemoryUse(role="peak", bytes=64), MemoryUse(role="inputs", bytes=32)),
    )
    timeline = moments((1, "forward", {"inputs": 32, "peak": 64}))
    device = DeviceMemory(device="cpu", peaks=(peak,), timeline=timeline)
    memory = dataclasses.replace(profile.memory, devices=(device,))
    report = open_report(dataclasses.replace(profile, memory=memory))
    sizes = [float(size) for size in report.attributes("#memory-map .area", "data-size")]
    assert sizes == [96, 64, 64, 32, 32]
    assert report.texts("#memory-legend > span") == ["inputs", "peak"]
    bands = report.attributes("#memory-timeline-0 .band", "class")
    assert bands == ["band fill-4", "band fill-plain"]


@pytest.mark.parametrize("width", [1280, 420])
def test_memory_does_not_scroll_sideways(
    width: int, open_report: Callable[..., Report], driver: Any
) -> None:
    with at_width(driver, width):
        report = open_report(with_timelines(), machine=A100)
        report.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        report.until(lambda: report.texts("#memory-timeline-1 .band"))
        assert report.run("return document.documentElement.scrollWidth") == width


@pytest.mark.parametrize(("times", "is_drawn"), [(0.5, True), (3, True), (5, False)])
def test_capacity_is_drawn_where_the_peak_is_visible_beside_it(
    times: float, is_drawn: bool, open_report: Callable[..., Report]
) -> None:
    machine = dataclasses.replace(A100, memory_bytes=times * 12_000)
    report = open_report(with_timelines(), machine=machine)
    report.until(lambda: report.texts("#memory-timeline-0 .band"))
    written = units.bytes_text(times * 12_000)
    assert report.texts(".capacity text") == ([f"capacity {written}"] if is_drawn else [])
    note = f"The peak takes {units.fraction_text(1 / times)} of the {written} of {A100.name}"
    assert report.texts("#memory-timeline-0 > p") == [
        f"{note}: it does not fit." if times < 1 else f"{note}."
    ]


def test_modules_have_the_bytes_that_they_hold(open_report: Callable[..., Report]) -> None:
    report = open_report(with_timelines())
    assert report.texts("#memory-modules tbody th button.link") == ["Net", "layer"]
    table = "memory-modules"
    for heading, text in (("Held", "3.7 KB"), ("Parameters", "3 KB"), ("KV cache", "700 B")):
        assert report.column(table, report.heading(table, heading)) == [text, text]
    assert report.column(table, report.heading(table, "Peak")) == ["12 KB", "12 KB"]
    open_report(with_memory_and_communication())
    assert not report.driver.find_element("id", "memory-held").is_displayed()


def with_memory_and_communication() -> Profile:
    """A layer that sends 69 bytes, and the peaks of two phases."""
    parameters = MemoryUse(role="parameters", bytes=3000)
    kept = MemoryUse(role="activations", fqn="layer", phase="forward", bytes=6000)
    made = MemoryUse(role="gradients", fqn="layer", phase="backward", bytes=9000)
    peaks = (
        MemoryPeak(
            peak_bytes=9000,
            peak_at=PeakMoment(fqn="layer", phase="forward"),
            uses=(kept, parameters),
        ),
        MemoryPeak(
            peak_bytes=12_000,
            peak_at=PeakMoment(fqn="layer", phase="backward"),
            uses=(made, parameters),
        ),
    )
    sent = CommTotal(
        fqn="layer", phase="backward", kind="all_reduce", op="c10d.allreduce_.default", calls=1,
        group=CommGroup(name="default_pg", size=2, ranks=(0, 1)), dtype="float32", payload_bytes=69,
    )  # fmt: skip
    return Profile(
        root=place(module("Net", linear("layer", 3, 5, batch=7))),
        memory=MemoryProfile(devices=(DeviceMemory(device="cuda:0", peaks=peaks),)),
        communication=(sent,),
    )


def test_every_control_has_a_name_and_tables_have_row_and_column_headers(
    open_report: Callable[..., Report],
) -> None:
    report = open_report(with_timelines(), machine=A100)
    report.run("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
    nameless = report.run(
        "return [...document.querySelectorAll('button, input, summary, [role=img]')]"
        ".filter((e) => e.checkVisibility())"
        ".filter((e) => !(e.ariaLabel || e.textContent.trim() || e.closest('label'))).length"
    )
    assert nameless == 0
    assert report.run(
        "return [...document.querySelectorAll('tbody tr')]"
        ".every((row) => row.querySelector('th[scope=row]'))"
    )
    assert report.run(
        "return [...document.querySelectorAll('table, .scroll')]"
        ".every((e) => document.getElementById(e.getAttribute('aria-labelledby')).textContent)"
    )
    assert report.run("return document.querySelectorAll('svg:not([aria-hidden])').length") == 0


def test_lower_bound_is_visible(open_report: Callable[..., Report]) -> None:
    report = open_report(lower_bound())
    title = "Lower bound: 2 operators have no known cost; shares are of what was counted"
    assert report.texts("#uncounted h2") == [title]
    assert report.column("uncounted-table", 1) == ["lib.mystery.default", "lib.scan.default"]
    assert report.run("return document.querySelector('#uncounted').offsetHeight") > 0
    assert report.column("modules", report.heading("modules", "FLOPs"))[0].startswith("≥ ")
    for exact in ("Params", "Latency", "Calls"):
        assert "≥" not in "".join(report.column("modules", report.heading("modules", exact)))
    open_report(encoder())
    assert report.run("return document.querySelector('#uncounted').offsetHeight") == 0


def test_markup_in_names_is_shown_as_text(open_report: Callable[..., Report]) -> None:
    names = (
        "<b>bold</b>",
        "<a href='https://example.org'>x</a>",
        "%{label}",
        "&lt;",
        "<br>",
        "$x^2$",
    )
    children = (linear(name, 2, 3, batch=5) for name in names)
    report = open_report(Profile(root=place(module("Net", *children))))
    for name in names:
        assert name in report.modules
        assert any(name in text for text in report.labels)
    assert not report.driver.find_elements("css selector", "#tree a, #modules b, #modules a")
    open_report(hostile())
    assert len(report.driver.find_elements("css selector", "script")) == 2


def test_numbers_are_written_as_by_the_units_module(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder())
    values = [0, 1, 5, 999, 1000, 1125, 1135, 61_706, 999_994, 999_995, 10**9, 4_089_184_256]
    values += [
        2**53,
        7 * 10**17,
        3 * 10**18,
        0.125,
        0.375,
        0.00004,
        4e-12,
        3.14e23,
        2.5e26,
        0.21668,
        12.5,
        -1500,
        5.737e168,
    ]
    kinds = ("number", "count", "params", "bytes", "seconds", "fraction")
    for name in (f"{kind}_text" for kind in kinds):
        script = "return arguments[1].map(window.dispatchFlops[arguments[0]])"
        head, tail = name.split("_")
        written = report.run(script, head + tail.capitalize(), values)
        assert written == [getattr(units, name)(value) for value in values], name


_BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


def test_theme_follows_the_reader_until_the_button_is_pressed(
    open_report: Callable[..., Report], driver: Any
) -> None:
    report = open_report(encoder())
    light = report.run(_BACKGROUND)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", _media(scheme="dark"))
    try:
        dark = report.run(_BACKGROUND)
        assert dark != light
        report.press("#theme")
        assert report.run(_BACKGROUND) == light
        report.press("#theme")
        assert report.run(_BACKGROUND) == dark
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", _media(scheme="light"))


def test_print_is_light_and_without_controls(
    open_report: Callable[..., Report], driver: Any
) -> None:
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", _media(scheme="dark", media="print"))
    try:
        report = open_report(encoder())
        assert report.run("return getComputedStyle(document.querySelector('h1')).color") == (
            "rgb(27, 31, 36)"
        )
        for selector in (".controls", "#modules .tools", "#theme", "#modules .toggle"):
            assert not driver.find_element("css selector", selector).is_displayed()
        assert driver.find_element("css selector", "#modules table").is_displayed()
        assert driver.find_element("css selector", "#tree .area").is_displayed()
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", _media(scheme="light"))


def _media(*, scheme: str, media: str = "") -> dict[str, Any]:
    return {"media": media, "features": [{"name": "prefers-color-scheme", "value": scheme}]}


@pytest.fixture
def photograph(driver: Any, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Return ``photograph(name, top)``, which takes a screenshot of the open page.

    top: selector of the element that it starts at.

    With ``--update-golden`` the screenshot replaces the image of that name among the results.
    """
    Image = pytest.importorskip("PIL.Image")

    def take(name: str, top: str = "body") -> None:
        driver.execute_script("document.querySelector(arguments[0]).scrollIntoView()", top)
        picture = driver.get_screenshot_as_png()
        assert picture.startswith(b"\x89PNG\r\n")
        if request.config.getoption("--update-golden"):
            few_colours = Image.open(io.BytesIO(picture)).convert("RGB").quantize(128)
            few_colours.save(RESULTS / name, optimize=True)
        assert 10_000 < (RESULTS / name).stat().st_size < MOST_BYTES

    return take


def test_page_of_bert_draws_its_layers(
    open_report: Callable[..., Report],
    photograph: Callable[[str], None],
) -> None:
    """BERT-base, batch 4, 128 tokens, forward and backward."""
    model, ids = bert_base()
    profile = profile_model(model, args=(ids,), backward=True, device="meta", memory=True)
    report = open_report(profile)
    cards = dict(zip(report.texts("#headline dt"), report.texts("#headline .value"), strict=True))
    assert cards["Parameters"] == units.params_text(profile.total_params)
    assert any("12 x BertLayer" in text for text in report.labels)
    photograph("report_bert.png")


def test_page_of_a_training_step_of_bert_draws_its_memory(
    open_report: Callable[..., Report], photograph: Callable[..., None]
) -> None:
    """BERT-base on the meta device; AdamW's steps are on the CPU: 4 bytes for each parameter."""
    model, ids = bert_base()
    model, ids = model.to("meta"), ids.to("meta")
    adam = torch.optim.AdamW(model.parameters())
    with FlopCounterMode(model, display=False, memory="timeline") as counter:
        model(ids)[0].sum().backward()
        adam.step()
    machine = dataclasses.replace(A100, name="a small card", memory_bytes=2e9)
    report = open_report(counter.profile, machine=machine)
    memory = counter.profile.memory
    assert memory is not None
    assert report.texts("#memory-timeline-0 .peak-mark text") == [
        f"peak {units.bytes_text(memory.peak_bytes)}"
    ]
    assert len(report.texts("#memory-timeline-0 .moment")) == len(memory.timeline)
    assert len(memory.devices) == 2
    photograph("report_memory.png", "#memory-section")


def test_treemap_of_ten_thousand_modules_draws_its_stages(
    open_report: Callable[..., Report], photograph: Callable[[str], None]
) -> None:
    report = open_report(_many())
    report.choose("shape", "treemap")
    assert "s10 · Stage" in "".join(report.labels)
    photograph("report_10000_modules.png")


def _many() -> Profile:
    """11 x 100 x 8 modules and their parents: 9,912 in all."""
    blocks = [
        module("Block", *(linear(c, 4 + s, 3 + b, batch=2) for c in "abcdefgh"), name=f"{b}")
        for s in range(11)
        for b in range(100)
    ]
    stages = (module("Stage", *blocks[100 * s : 100 * s + 100], name=f"s{s}") for s in range(11))
    return Profile(root=place(module("Many", *stages)))


@pytest.mark.parametrize("make", [_many, lambda: wide(10_000), lambda: deep(10_000)])
def test_page_of_ten_thousand_modules_draws_only_what_can_be_seen(
    make: Callable[[], Profile], open_report: Callable[..., Report]
) -> None:
    """What the page does is bounded by what it draws: a few hundred areas and 40 rows."""
    profile = make()
    report = open_report(profile)
    total = sum(1 for _ in profile.root.walk())
    assert report.texts("#modules output") == [f"{total:,} modules"]
    report.choose("shape", "treemap")
    assert report.shape == "treemap"
    report.search("modules", "99")
    assert " of " in report.texts("#modules output")[0]
    report.sort("modules", "FLOPs")
    assert len(report.modules) <= 40
    assert len(report.sizes) <= 500
