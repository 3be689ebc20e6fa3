"""The benchmark scripts: each can be imported, and the table lists those that run."""

from __future__ import annotations

import re

import pytest

from tests.helpers.interpreters import run_python
from tests.helpers.paths import BENCHMARKS, REPOSITORY

SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))


@pytest.mark.slow
def test_scripts_can_be_imported() -> None:
    pytest.importorskip("transformers")
    paths = [str(REPOSITORY), str(BENCHMARKS)]
    code = f"import sys; sys.path[:0] = {paths}; import {', '.join(SCRIPTS)}"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_table_lists_every_script_that_runs() -> None:
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+\.py.*?) \|", text, flags=re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"(\w+)\.py", row)}
    runs = {
        name
        for name in SCRIPTS
        if '__name__ == "__main__"' in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
    }
    assert listed - {"mamba"} == runs
