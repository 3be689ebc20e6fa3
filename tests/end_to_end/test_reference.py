"""The API reference: every public name has a place in it, and mistakes in docstrings are found."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.paths import REPOSITORY
from tests.helpers.public_names import public_objects

pdoc = pytest.importorskip("pdoc")
pytestmark = pytest.mark.filterwarnings("ignore:Cannot determine where")


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", REPOSITORY / ".ci" / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def module_with(name: str, **functions: str) -> dict[str, Any]:
    """Return a module whose functions have these docstrings, as ``documented`` returns modules."""
    module = ModuleType(name)
    for function, text in functions.items():
        exec(f"def {function}():\n    {text!r}", vars(module))
        vars(module)[function].__module__ = name
    module.__all__ = list(functions)  # type: ignore[attr-defined]
    return {name: pdoc.doc.Module(module)}


def test_markdown_lists_parameters_and_fences_examples(reference: ModuleType) -> None:
    text = """Return a sum.

    first, second: what is added;
        in any order.
    third: more.

    Example::

        add(1, 2)
    """
    assert reference.markdown(text).split("\n") == [
        *("Return a sum.", "", ""),
        *("- **first, second**: what is added;", "    in any order.", ""),
        *("- **third**: more.", "", "Example:", ""),
        *("```python", "add(1, 2)", "```"),
    ]


@pytest.mark.parametrize("text", ["``Profile.totl``", "``NoSuchThing``", "``OpCost.flop``"])
def test_reference_to_a_name_that_does_not_exist_is_found(reference: ModuleType, text: str) -> None:
    modules = reference.documented()
    wrong = module_with("wrong", function=f"See {text}.")
    assert list(reference.unresolved(modules | wrong)) == [f"wrong.function: {text} does not exist"]


def test_public_name_without_a_docstring_is_found(reference: ModuleType) -> None:
    assert list(reference.undocumented(module_with("wrong", good="Said.", bare=""))) == [
        "wrong.bare has no docstring"
    ]


@pytest.mark.slow
def test_reference_has_every_public_name_and_no_private_one(
    reference: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reference.main(str(tmp_path)) == 0, capsys.readouterr().err
    pages = {
        path.relative_to(tmp_path).with_suffix("").as_posix().replace("/", "."): path.read_text()
        for path in tmp_path.rglob("*.html")
    }
    for name in public_objects():
        room, _, last = f"dispatch_flops.{name}".rpartition(".")
        assert f'id="{last}"' in pages[room], name
    anchors = {anchor for page in pages.values() for anchor in re.findall(r'id="([\w.]+)"', page)}
    assert not [a for a in anchors if re.search(r"(^|\.)_(?!_)", a)]
