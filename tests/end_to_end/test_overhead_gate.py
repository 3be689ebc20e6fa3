"""The comparison of two revisions' overhead, on workers that answer with given times."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import BENCHMARKS

BEFORE_S = 2.0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import overhead_gate

    return overhead_gate


class FakeWorker:
    """Adds ``BEFORE_S`` to the bare program, or in the working tree ``after_s``, in turn."""

    after_s: tuple[float, ...] = (BEFORE_S,)
    asked = 0  # times that a process of the working tree was asked

    def __init__(self, root: Path, core: int | None) -> None:
        self.is_working_tree = root != Path("/other")

    def added_seconds(self, program: str, measure: str) -> float:
        if not self.is_working_tree:
            return BEFORE_S
        type(self).asked += 1
        return self.after_s[min(self.asked, len(self.after_s)) - 1]

    def stop(self) -> None: ...


@pytest.mark.parametrize(
    ("after_s", "status"),
    [
        ((2.0,), 0),
        ((2.19,), 0),
        ((2.21,), 1),
        # A pair of processes answers 15 times for each of three measures.
        (((9.0,) * 7 + (2.1,) * 8) * 40, 0),  # the median of the turns counts
        (((9.0,) * 45 + (2.1,) * 90) * 10, 0),  # the median of the pairs of processes counts
        ((2.5,) * 135 + (2.1,), 0),  # what is slower is measured again
        (((1.0,) * 15 + (2.5,) * 30) * 3 + (2.5,), 1),  # one measure is faster, the others slower
    ],
)
def test_compare_fails_on_ten_per_cent(
    gate: Any, monkeypatch: pytest.MonkeyPatch, after_s: tuple[float, ...], status: int
) -> None:
    @contextmanager
    def other_root(revision: str) -> Iterator[Path]:
        assert revision == "v0.1.0"
        yield Path("/other")

    monkeypatch.setattr(gate, "Worker", type("Worker", (FakeWorker,), {"after_s": after_s}))
    monkeypatch.setattr(gate, "revision_root", other_root)
    assert gate.compare("v0.1.0", "1,000 linears") == status


def test_compare_prints_the_added_time_of_both(
    gate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gate, "Worker", type("Worker", (FakeWorker,), {"after_s": (3.0,)}))

    @contextmanager
    def other_root(revision: str) -> Iterator[Path]:
        yield Path("/other")

    monkeypatch.setattr(gate, "revision_root", other_root)
    assert gate.compare("v0.1.0", "1,000 linears") == 1
    printed = capsys.readouterr()
    assert printed.out.split("\n")[2].split() == [
        "1,000", "linears", "forward", "steady", "2000", "3000", "1.5"
    ]  # fmt: skip
    assert "more than 10% slower than v0.1.0: 1,000 linears forward, steady" in printed.err


def test_revision_root_holds_the_package(gate: Any) -> None:
    with gate.revision_root("HEAD") as root:
        assert (root / "dispatch_flops" / "__init__.py").exists()
        assert not (root / "tests").exists()
    assert not root.exists()
