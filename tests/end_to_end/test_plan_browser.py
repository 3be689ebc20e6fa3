"""The page of a plan in a real browser, at the widths of a desktop and of a phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("selenium.webdriver")
from dispatch_flops import Machine, plan
from dispatch_flops.analysis.planned import Plan
from dispatch_flops.renderers import plan_page
from tests.end_to_end import test_html_browser
from tests.end_to_end.test_html_browser import Report, driver  # noqa: F401

pytestmark = test_html_browser.pytestmark
MACHINE = Machine(name="a board", flops_per_s={"float32": 1e9}, bytes_per_s=1e7, memory_bytes=500e3)
NAME = "</script><b>name</b>" + 20 * "long"


@pytest.fixture(scope="module")
def planned() -> Plan:
    def build(batch: int, name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        return nn.Linear(256, 384, bias=False), (torch.ones(batch, 256),)

    return plan(
        build, MACHINE, sizes={"batch": [3, 64, 256], "name": NAME}, search_batch=False,
        host_s_per_operator=0.01,
    )  # fmt: skip


@pytest.fixture
def open_plan(driver: Any, tmp_path: Path) -> Iterator[Callable[[Plan], Report]]:  # noqa: F811
    """Open the page of a plan; it must log no message and make no request by the end."""
    report = Report(driver)

    def open_(planned: Plan) -> Report:
        path = tmp_path / "plan.html"
        path.write_text(plan_page.render(planned), encoding="utf-8")
        driver.get(path.as_uri())
        report.until(lambda: driver.find_elements("css selector", "#figures tbody tr"))
        return report

    yield open_
    assert report.messages() == []
    assert report.requests() == []


def test_choices_stand_side_by_side_with_bars(planned: Plan, open_plan: Any) -> None:
    report = open_plan(planned)
    assert len(report.texts("#choices > div")) == 3
    assert report.texts("#choices .unknown") == ["does not fit", "does not fit", "does not fit"]
    assert len(report.texts("#memory .track")) == len(report.texts("#times .track")) == 3
    assert report.texts("b") == []
    assert report.texts("#figures thead th")[0].endswith(NAME)
    widths = report.run(
        "return [...document.querySelectorAll('#memory .track')].map((track) => "
        "[...track.querySelectorAll('span:not(.mark)')]"
        ".reduce((sum, e) => sum + parseFloat(e.style.width), 0))"
    )
    most = max(step.peak_bytes for step in planned.steps)
    assert widths == pytest.approx([100 * step.peak_bytes / most for step in planned.steps])


@pytest.mark.parametrize("width", [1280, 420])
def test_page_of_a_plan_does_not_scroll_sideways(
    width: int,
    planned: Plan,
    open_plan: Any,
    driver: Any,  # noqa: F811
) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        report = open_plan(planned)
        assert report.run("return document.documentElement.scrollWidth") == width
        assert report.run(
            "return [...document.querySelectorAll('.cards > div > *')]"
            ".every((e) => e.scrollWidth <= e.clientWidth)"
        )
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_bars_are_described_and_figures_are_reached_by_keyboard(
    planned: Plan, open_plan: Any
) -> None:
    report = open_plan(planned)
    bars = report.attributes(".track", "aria-label")
    assert all(bars) and bars[0].startswith("parameters 393.22 KB")
    assert "with nothing hidden" in bars[-1]
    assert report.attributes("#figures", "tabindex") == ["0"]
    assert report.run(
        "return [...document.querySelectorAll('tbody tr')]"
        ".every((row) => row.querySelector('th[scope=row]'))"
    )
    report.press("#theme")
    assert report.run("return document.documentElement.dataset.theme") in ("dark", "light")


def test_page_of_a_plan_prints_light_and_whole(planned: Plan, open_plan: Any) -> None:
    report = open_plan(planned)
    report.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert (
            report.run("return getComputedStyle(document.documentElement).colorScheme") == "light"
        )
        assert not report.driver.find_element("id", "theme").is_displayed()
        style = "getComputedStyle(document.getElementById('figures'))"
        assert report.run(f"return {style}.overflowX") == "visible"
    finally:
        report.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
