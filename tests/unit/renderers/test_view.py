"""What a view refuses."""

from __future__ import annotations

from typing import Any

import pytest

from dispatch_flops.errors import ConfigError
from dispatch_flops.renderers import View


@pytest.mark.parametrize(
    ("name", "value", "to_pass"),
    [
        ("width", 0, "pass an int of at least 1"),
        ("width", "80", "pass an int of at least 1"),
        ("depth", -1, "pass an int of at least 0"),
        ("top", -1, "pass an int of at least 0"),
        ("top", 2.5, "pass an int of at least 0"),
        ("title", 5, "pass a text"),
        ("columns", "params", "pass a tuple of names"),
        ("columns", 3, "pass a tuple of names"),
        ("style", "html", 'choose "plain" or "markdown"'),
        ("recompute_fwd_factor", "1", "pass a number"),
        ("recompute_fwd_factor", float("nan"), "pass a number"),
        ("recompute_fwd_factor", -1.0, "pass a number of at least 0"),
        ("table", "rows", "choose one of 'modules', 'operators'"),
        ("by", "time", "choose one of 'params', 'macs'"),
        ("sort", ["flops"], "choose one of 'params', 'macs'"),
        ("phase", 3, "pass a phase"),
        ("step", "5", "pass an int of at least 0"),
    ],
)
def test_view_of_a_value_that_cannot_be_shown_names_it(name: str, value: Any, to_pass: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*: {to_pass}"):
        View(**{name: value})
