"""Libraries that only some formats need."""

from __future__ import annotations

import json

import pytest

from dispatch_flops.renderers._extras import require


def test_require_returns_the_module() -> None:
    assert require("json", extra="none", purpose="a test") is json


def test_require_of_a_missing_library_names_the_extra() -> None:
    with pytest.raises(ImportError) as raised:
        require("no_such_library.part", extra="plots", purpose="a plot")
    assert str(raised.value) == (
        "no_such_library is needed for a plot; install it with pip install 'dispatch-flops[plots]'"
    )
    assert raised.value.name == "no_such_library"
