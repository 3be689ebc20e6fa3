"""The HTML page in a real browser: drawing, interaction and absence of network requests."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dispatch_flops import profile_model, units
from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.cli.demo import bert_base
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import View, html
from tests.helpers.paths import BENCHMARKS
from tests.helpers.trees import (
    SMALL,
    deep,
    encoder,
    hostile,
    linear,
    lower_bound,
    module,
    place,
    training_step,
    wide,
)

pytest.importorskip("plotly")
webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="chromium or chromedriver not installed"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

A100 = MACHINES["NVIDIA A100-SXM4-80GB"]
RESULTS = BENCHMARKS / "results"
MOST_BYTES = 150_000  # of an image in the repository
SECONDS = 10  # that the page has to respond; generous, for shared machines

_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars "
    "--window-size=1280,1500"
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
    def trace(self) -> dict[str, Any]:
        """The trace that the tree chart has drawn."""
        drawn: dict[str, Any] = self.run(
            "const [t] = document.getElementById('tree').data ?? [null];"
            "return t && {type: t.type, ids: [...t.ids], labels: [...t.labels], "
            "values: [...t.values], text: [...t.text]}"
        )
        return drawn

    def column(self, table: str, index: int) -> list[str]:
        return self.texts(f"#{table} tbody td:nth-child({index})")

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
        report.until(lambda: driver.find_elements("css selector", "#tree g.slice"))
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
    assert report.run("return Boolean(document.querySelector('#roofline .main-svg'))")


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
    shown = report.trace
    assert shown["type"] == "icicle"
    assert shown["values"][0] == profile.total().flops
    report.choose("view", "backward")
    report.until(lambda: report.trace["values"][0] == profile.total("backward").flops)
    report.choose("metric", "macs")
    report.until(lambda: report.trace["values"][0] == profile.total("backward").macs)
    assert report.column("modules", 5)[0] == units.count_text(profile.root.total("backward").macs)
    report.choose("metric", "bytes")
    report.choose("view", "all")
    report.until(lambda: report.trace["values"][0] == profile.total().bytes_total)
    report.choose("metric", "params")
    report.until(lambda: report.trace["values"][0] == profile.total_params)
    report.choose("metric", "latency")
    measured = (38.15 + 15.74 + 15.02) * 1e-6
    report.until(lambda: report.trace["values"][0] == pytest.approx(measured))
    report.choose("shape", "treemap")
    report.until(lambda: report.trace["type"] == "treemap")
    assert report.driver.find_elements("css selector", "#tree .treemaplayer g.slice")


def test_choice_without_measurements_is_disabled(open_report: Callable[..., Report]) -> None:
    report = open_report(training_step())
    enabled = "return !document.querySelector(arguments[0]).disabled"
    report.choose("metric", "latency")
    report.until(lambda: report.run(enabled, "input[value=forward]"))
    assert not report.run(enabled, "input[value=optimizer]")
    open_report(hostile())
    assert not report.run(enabled, "input[value=latency]")


def test_click_zooms_into_a_module_and_out(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder(12))
    assert any("0-11 · 12 x Layer" in text for text in report.trace["text"])
    report.driver.find_element("id", "fold").click()
    report.until(lambda: not any("12 x" in text for text in report.trace["text"]))
    place_ = report.trace["labels"].index("layer")
    areas = report.driver.find_elements("css selector", "#tree g.slice")
    whole = len(areas)
    areas[place_].click()
    report.until(lambda: report.texts("#crumbs [aria-current]") == ["layer"])
    assert len(report.driver.find_elements("css selector", "#tree g.slice")) < whole
    report.driver.find_element("css selector", "#crumbs button").click()
    report.until(lambda: report.texts("#crumbs [aria-current]") == ["Encoder"])
    report.driver.find_element("css selector", "#modules tbody tr:nth-child(4) button").click()
    report.until(lambda: report.texts("#crumbs [aria-current]") == ["0"])


def test_tables_are_searched_and_sorted(open_report: Callable[..., Report]) -> None:
    report = open_report(training_step())
    report.search("operators", "BACKWARD aten.")
    report.until(lambda: len(report.column("operators", 1)) == 3)
    assert set(report.column("operators", 1)) == {
        "aten.mm.default",
        "aten.threshold_backward.default",
        "aten.sum.dim_IntList",
    }
    assert report.texts("#operators output") == ["3 of 8 rows"]
    report.search("operators", "no such operator")
    report.until(lambda: report.column("operators", 1) == [])

    open_report(encoder(12))
    report.search("modules", "layer.11 linear")
    report.until(lambda: len(report.column("modules", 1)) == 4)
    report.search("modules", " ")
    report.until(lambda: len(report.column("modules", 1)) == 20)
    report.sort("modules", "Latency")
    assert report.column("modules", 9)[:2] == ["90 ms", "78 ms"]  # 78 = 1 + 2 + ... + 12
    report.sort("modules", "Latency")
    assert report.column("modules", 9)[0] == "1 ms"
    report.sort("modules", "Module")
    assert report.run("return document.querySelector('#modules th').ariaSort") == "ascending"


def test_lower_bound_is_visible(open_report: Callable[..., Report]) -> None:
    report = open_report(lower_bound())
    assert report.texts("#uncounted h2") == ["Lower bound: 2 operators have no known cost"]
    assert report.column("uncounted-table", 1) == ["lib.mystery.default", "lib.scan.default"]
    assert report.run("return document.querySelector('#uncounted').offsetHeight") > 0
    assert report.column("modules", 6)[0].startswith("≥ ")
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
    drawn = report.texts("#tree text")
    for name in names:
        assert name in report.column("modules", 1) or any(
            text.startswith(name) for text in report.column("modules", 1)
        )
        assert any(name in text for text in drawn)
    assert not report.driver.find_elements("css selector", "#tree a, #modules td b, #modules td a")
    open_report(hostile())
    assert len(report.driver.find_elements("css selector", "script")) == 3


def test_numbers_are_written_as_by_the_units_module(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder())
    values = [0, 1, 5, 999, 1000, 1125, 1135, 61_706, 999_994, 999_995, 10**9, 4_089_184_256]
    values += [2**53, 7 * 10**17, 3 * 10**18, 0.125, 0.375, 0.00004, 0.21668, 12.5, -1500]
    for name in ("count_text", "params_text", "bytes_text", "seconds_text", "fraction_text"):
        script = "return arguments[1].map(window.dispatchFlops[arguments[0]])"
        head, tail = name.split("_")
        written = report.run(script, head + tail.capitalize(), values)
        assert written == [getattr(units, name)(value) for value in values], name


def test_theme_button_changes_the_background(open_report: Callable[..., Report]) -> None:
    report = open_report(encoder())
    colour = "return getComputedStyle(document.body).backgroundColor"
    before = report.run(colour)
    report.driver.find_element("id", "theme").click()
    report.until(lambda: report.run(colour) != before)


@pytest.fixture
def photograph(driver: Any, request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return ``photograph(name)``, which takes a screenshot of the open page from its top.

    With ``--update-golden`` the screenshot replaces the image of that name among the results.
    """
    Image = pytest.importorskip("PIL.Image")

    def take(name: str) -> None:
        driver.execute_script("window.scrollTo(0, 0)")
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
    request: pytest.FixtureRequest,
) -> None:
    """BERT-base, batch 4, 128 tokens, forward and backward; timed if the image is updated."""
    model, ids = bert_base()
    how = {"repeats": 3} if request.config.getoption("--update-golden") else {"device": "meta"}
    profile = profile_model(model, args=(ids,), backward=True, **how)
    report = open_report(profile)
    cards = dict(zip(report.texts("#headline dt"), report.texts("#headline .value"), strict=True))
    assert cards["Parameters"] == units.params_text(profile.total_params)
    report.until(lambda: any("12 x BertLayer" in text for text in report.trace["text"]))
    photograph("report_bert.png")


def test_treemap_of_ten_thousand_modules_draws_its_stages(
    open_report: Callable[..., Report], photograph: Callable[[str], None]
) -> None:
    report = open_report(_many())
    report.choose("shape", "treemap")
    report.until(lambda: report.trace["type"] == "treemap")
    report.until(lambda: "s10" in "".join(report.texts("#tree text")))
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
def test_page_of_ten_thousand_modules_responds_in_time(
    make: Callable[[], Profile], open_report: Callable[..., Report]
) -> None:
    profile = make()
    start = time.monotonic()
    report = open_report(profile)
    opened = time.monotonic()
    report.choose("shape", "treemap")
    report.until(lambda: report.trace["type"] == "treemap")
    switched = time.monotonic()
    report.search("modules", "99")
    report.until(lambda: " of " in report.texts("#modules output")[0])
    searched = time.monotonic()
    report.sort("modules", "FLOPs")
    done = time.monotonic()
    steps = (opened - start, switched - opened, searched - switched, done - searched)
    assert max(steps) < SECONDS, steps
    assert len(report.trace["ids"]) <= 500
