"""The contract tests and ``_torch.py`` name the files and functions that rely on torch as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispatch_flops
from tests.helpers.paths import REPOSITORY

PACKAGE = Path(dispatch_flops.__file__).parent
CONTRACT = REPOSITORY / "tests" / "torch_contract"
# "counting/checkpoints.py", with names from it: ": ``recomputing_frame``, ``CheckpointCallers``".
REFERENCE = re.compile(r"\b([a-z_]+/[a-z_/]+\.py)((?:: ``[\w.]+``(?:(?:,| and) ``[\w.]+``)*)?)")
# "# counting/checkpoints        frames of ...", in the list of what cannot be moved.
LISTED = re.compile(r"^# ([a-z_]+/[a-z_]+)\s", re.MULTILINE)


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            yield " ".join((ast.get_docstring(node) or "").split())


def stale(text: str) -> Iterator[str]:
    """Yield each reference in ``text`` to a file that is gone, or to a name that it lacks."""
    for file, names in REFERENCE.findall(text):
        path = PACKAGE / file
        if not path.is_file():
            yield file
            continue
        source = path.read_text(encoding="utf-8")
        for name in re.findall(r"``([\w.]+)``", names):
            if not re.search(rf"\b{name.rpartition('.')[-1]}\b", source):
                yield f"{file}: {name}"


def test_contract_tests_name_files_and_functions_that_exist() -> None:
    found = [
        f"{path.name}: {reference}"
        for path in sorted(CONTRACT.glob("*.py"))
        for text in docstrings(path)
        for reference in stale(text)
    ]
    if found:
        pytest.fail("\n".join([f"{len(found)} stale references:", *found]), pytrace=False)


def test_list_of_what_cannot_be_moved_names_files_that_exist() -> None:
    source = (PACKAGE / "_torch.py").read_text(encoding="utf-8")
    listed = LISTED.findall(source[source.index("# -- what cannot be moved here") :])
    assert len(listed) > 10
    assert [name for name in listed if not (PACKAGE / f"{name}.py").is_file()] == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("relies on this (counting/call_stack.py: ``resume``, ``pop_call``).", 0),
        ("relies on this (counting/call_stack.py: ``resume``, ``push_call``).", 1),
        ("relies on this (counting/books.py: ``resume``).", 1),
        ("relies on this (counting/call_stack.py).", 0),
    ],
)
def test_stale_finds_files_and_names_that_are_gone(text: str, count: int) -> None:
    assert len(list(stale(text))) == count
