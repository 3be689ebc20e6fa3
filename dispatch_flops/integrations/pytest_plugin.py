"""pytest plugin: the fixture ``assert_flops`` and the option ``--update-flops``."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import nn

    from dispatch_flops.profile import Profile

_FOLDER = "flops_baselines"
_LONGEST = 60  # characters of a test in the name of a file, each of up to 4 bytes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-flops``."""
    parser.getgroup("dispatch_flops").addoption(
        "--update-flops",
        action="store_true",
        help="write the baselines of the fixture assert_flops instead of comparing with them",
    )


@pytest.fixture
def assert_flops(request: pytest.FixtureRequest) -> Callable[..., Profile]:
    """Return a function that asserts what a model costs.

        def test_cost(assert_flops):
            assert_flops(model, [x])  # as the stored baseline
            assert_flops(model, [x], macs=42_000, rtol=0.01)

    With figures it is ``integrations.testing.assert_flops``. Without, it compares with a profile
    that is saved beside the test's file, in ``flops_baselines/``, by the test's name and the number
    of the call.
    ``pytest --update-flops`` writes these files; commit them.
    """
    # Imported when a test asks for it, so that other test runs do not import torch.
    from dispatch_flops.integrations import testing

    calls = 0

    def check(
        model: nn.Module, inputs: Any = (), *, rtol: float = 0, backward: bool = False, **given: Any
    ) -> Profile:
        nonlocal calls
        if any(given.get(name) is not None for name in testing.FIGURES):
            return testing.assert_flops(model, inputs, rtol=rtol, backward=backward, **given)
        options = {name: value for name, value in given.items() if name not in testing.FIGURES}
        calls += 1
        path = _path_of(request, calls)
        profile = testing.profile_of(model, inputs, backward=backward, **options)
        update = bool(request.config.getoption("--update-flops"))
        testing.assert_as_baseline(profile, path, rtol=rtol, update=update)
        return profile

    return check


def _path_of(request: pytest.FixtureRequest, number: int) -> Path:
    """Return the file of a baseline: ``flops_baselines/test_net/test_cost[small].json``."""
    test = request.node.nodeid.partition("::")[2].replace("::", ".")
    name = re.sub(r"[^\w.\[\]-]+", "_", test)
    if name != test or len(name) > _LONGEST:  # other tests may be left with the same name
        name = f"{name[:_LONGEST]}-{zlib.crc32(test.encode()):08x}"
    name += f".{number}" if number > 1 else ""
    file = Path(request.node.path)
    return file.parent / _FOLDER / file.stem / f"{name}.json"
