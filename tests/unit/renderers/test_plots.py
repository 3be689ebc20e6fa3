"""Figures for papers."""

from __future__ import annotations

import re
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from dispatch_flops.analysis.machines import MACHINES
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import Profile
from dispatch_flops.renderers import plots
from tests.helpers.trees import (
    HOSTILE_NAMES,
    SMALL,
    empty,
    encoder,
    linear,
    lower_bound,
    module,
    place,
    training_step,
)

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:matplotlib.*")

A100 = MACHINES["NVIDIA A100-SXM4-80GB"]
OTHERS = ("lenet5", "shared", "encoder")  # draw what the rest of the small profiles draw
_SVG = "{http://www.w3.org/2000/svg}"


def _comments(svg: bytes) -> str:
    """Return the comments, where matplotlib keeps the text that it draws as paths."""
    return "\n".join(re.findall(r"<!-- (.*?) -->", svg.decode(), re.DOTALL))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in OTHERS else []) for n in SMALL],
)
def test_figures_of_small_profiles_are_svg(name: str) -> None:
    profile = SMALL[name]()
    for svg in (plots.top_modules(profile), plots.roofline(profile, A100)):
        assert ElementTree.fromstring(svg.decode()).tag == f"{_SVG}svg"


def test_axis_of_a_cost_alone_says_that_it_is_a_lower_bound() -> None:
    assert "≥ FLOPs" in _comments(plots.top_modules(lower_bound()))
    for by in ("params", "latency"):
        assert "≥" not in _comments(plots.top_modules(lower_bound(), by=by))  # type: ignore[arg-type]


def test_axis_of_a_roofline_says_that_some_rates_are_lower_bounds() -> None:
    assert "≥ FLOP/s" in _comments(plots.roofline(lower_bound(), A100))
    assert "≥" not in _comments(plots.roofline(training_step(), A100))


def test_figures_have_the_requested_format() -> None:
    assert plots.top_modules(training_step(), format="png").startswith(b"\x89PNG\r\n")
    assert plots.top_modules(training_step(), format="pdf").startswith(b"%PDF-")


@pytest.mark.slow
def test_figures_of_equal_profiles_have_equal_bytes() -> None:
    for format in ("svg", "png", "pdf"):
        first, second = (plots.roofline(training_step(), A100, format=format) for _ in range(2))
        assert first == second


def test_top_modules_start_with_the_heaviest_and_show_shares() -> None:
    text = _comments(plots.top_modules(training_step(), k=2, by="macs"))
    forward, both = 4 * 64 * 256, 3 * 4 * 64 * 256
    assert f"{both / 1000:.2f}".rstrip("0") in text
    assert text.index("196.61 K (60%)") < text.index("131.07 K (40%)")
    assert both == 196_608
    assert 2 * forward == 131_072


def test_top_modules_fold_identical_layers_by_default() -> None:
    text = _comments(plots.top_modules(encoder(12), by="macs"))
    layer = 2 * 3 * 5 * 7 + 2 * 3 * 7 * 5
    assert "layer.0-11.query" in text
    assert f"{12 * layer // 4 / 1000:.2f} K (25%)" in text
    assert "layer.11.query" in _comments(plots.top_modules(encoder(12), k=99, folded=False))


def test_hostile_names_are_not_parsed_as_mathtext() -> None:
    names = ("$x^2$", "$\\frac$", "$unclosed", "a_b\\c", *filter(None, HOSTILE_NAMES))
    children = (linear(name, 2, 3, batch=5) for name in names)
    text = _comments(plots.top_modules(Profile(root=place(module("Net", *children)))))
    assert "$x^2$" in text
    assert "$unclosed" in text


def test_scaling_shows_the_exponent_of_each_curve() -> None:
    sizes = (128, 256, 512)
    curves = {"attention": [3 * size**2 for size in sizes], "linear": [7 * s for s in sizes]}
    text = _comments(plots.scaling(sizes, curves, size_name="seq"))
    assert "attention: seq^2.00" in text
    assert "linear: seq^1.00" in text
    for bad in ([1, 2], [0, 1, 2]):
        with pytest.raises(ConfigError, match="positive count"):
            plots.scaling(sizes, {"bad": bad})


def test_roofline_without_a_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="machine="):
        plots.roofline(empty())


def test_figures_without_matplotlib_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'dispatch-flops\[plots\]'") as raised:
        plots.top_modules(training_step())
    assert raised.value.name == "matplotlib"


@pytest.mark.parametrize("format", ["jpg", None, ["svg"]])
def test_plot_of_another_format_names_those_there_are(format: Any) -> None:
    with pytest.raises(ConfigError, match='format=.*: choose "svg", "png" or "pdf"'):
        plots.top_modules(encoder(), format=format)
