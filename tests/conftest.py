"""Options of the test suite, and how it is spread over workers."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# Workers share the cores: with several threads each, torch's wait for each other. torch reads this
# when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SWEEP = "tests/end_to_end/sweep/"
SHARDS = 32

# A busy machine may take longer than hypothesis allows for an example.
settings.register_profile("whole", settings.default, deadline=None)
settings.register_profile("sample", settings.get_profile("whole"), max_examples=25)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--whole",
        action="store_true",
        help="run all of what is sampled by default: every sample of torch's operator database, "
        "1,000 random models, 100 examples of a property, more programs on real ranks",
    )
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden files instead of comparing"
    )


@pytest.hookimpl(tryfirst=True)  # --hypothesis-profile may name another
def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("whole" if config.getoption("--whole") else "sample")
    # Workers of pytest-xdist end together if the short files of tests/unit come last, as they are
    # collected; by default those with the fewest tests do.
    config.option.loadscopereorder = False


def pytest_report_header(config: pytest.Config) -> str:
    from tests.end_to_end.sweep.sampling import EIGHTH, MOST, SEED

    share = "all samples" if config.getoption("--whole") else f"one in {EIGHTH}, at most {MOST}"
    return (
        f"operator sweep: {share}, seed {SEED}; "
        f"properties of any profile: {settings().max_examples} examples"
    )


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What torch.compile remembers is dropped before the test and after it."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def spare_the_collector() -> None:
    """Exclude every object that is alive from the garbage collections to come.

    Most are of modules that tests imported: a million, which no collection would ever free.
    """
    gc.collect()
    gc.freeze()


def spare_the_guards() -> None:
    """Let ``torch.compile`` not measure how long a frame's guards take, once it is imported.

    To log that number it empties the processor's caches, which takes 30 ms for each frame: more
    than compiling a small one (torch/csrc/dynamo/guards.cpp, ``profile_guard_manager``).
    """
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[union-attr]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while the tests are imported, and seldom while they run.

    Where few objects are left to visit, a few new ones would start a full collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        spare_the_guards()
        spare_the_collector()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file, and after each slow test of one, spare what was imported since."""
    try:
        return (yield)
    finally:
        is_last = nextitem is None or nextitem.path != item.path
        if is_last or item.get_closest_marker("slow"):
            spare_the_guards()
            spare_the_collector()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what only ``--whole`` runs, and exclude slow tests from coverage.

    Its tracer makes an operator's dispatch twice as slow.
    """
    if not config.getoption("--whole"):
        for item in items:
            if item.get_closest_marker("whole"):
                item.add_marker(pytest.mark.skip(reason="runs with --whole"))
    if config.getoption("cov_source", None):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker("no_cover")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the coverage of each room if ``--cov`` measured it."""
    if config.getoption("cov_source", None):
        from tests.helpers.coverage_summary import coverage_lines

        terminalreporter.section("coverage")
        for line in coverage_lines():
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep each file on one worker, except for the operator sweep, which takes the longest."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            if scope.startswith(SWEEP):
                scope += f" {zlib.crc32(nodeid.encode()) % SHARDS}"
            return scope

    return Scheduler(config, log)
