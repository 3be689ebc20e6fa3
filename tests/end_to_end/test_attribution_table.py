"""The table of ``benchmarks/attribution_table.py``: the profile equals the count by hand."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.helpers.paths import BENCHMARKS

SCRIPT = BENCHMARKS / "attribution_table.py"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attribution_table", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_profiled_equals_by_hand(table: ModuleType) -> None:
    profile = table.profiled()
    assert table.measured(profile) == table.by_hand()
    assert not profile.uncounted_ops()
    assert profile.node("<outside>.AdamW").own("optimizer").flops > 0


def test_script_with_a_wrong_figure_reports_it_and_returns_1(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert table.main() == 0
    wrong = table.by_hand()
    wrong["head"]["backward"] += 1
    monkeypatch.setattr(table, "by_hand", lambda: wrong)
    assert table.main() == 1
    assert capsys.readouterr().out.count("DIFFERENT") == 2
