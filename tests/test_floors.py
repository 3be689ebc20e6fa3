"""Files import from lower floors alone, and what reads profiles does without torch."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispatch_flops

PACKAGE = Path(dispatch_flops.__file__).parent

# Each file and folder stands on one floor, and imports only from floors below its own.
# Within a folder files may import each other.
# fmt: off
FLOORS: tuple[tuple[str, ...], ...] = (
    ("units", "errors", "plain", "tensors"),
    (
        "cost",
        "config",
        "conventions",
        "torch_style",
        "stance",
        "subclasses",
        "no_data",
        "running",
        "devices",
        "parameters",
    ),
    ("tree", "hardware", "registry", "targets", "own_time"),
    ("analysis", "efficiency", "names", "formulas", "callers", "idle"),
    ("places", "clock", "renderers"),
    ("tracker",),
    ("ledger", "measure"),
    ("pricing",),
    ("opaque",),
    ("higher_order",),
    ("mode",),
    ("timed", "compile"),
    ("passes",),
    ("calibration",),
    ("session",),
    ("counter",),
    ("profiling",),
    ("profiler",),
    ("step",),
    ("training", "integrations"),
    ("cli", "demo"),
)
# fmt: on
# The package's own face and its command line's.
DOORS = ("__init__", "__main__")
WITHOUT_TORCH = (
    "units", "errors", "plain", "cost", "config", "tree", "hardware", "analysis", "efficiency",
    "renderers",
)  # fmt: skip


def unit_of(path: Path) -> str:
    """The file or folder of the package that ``path`` belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """Every module that ``source`` imports, wherever in it; blocks for type checkers aside."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            assert node.module is not None
            if node.module == "dispatch_flops":
                yield from (f"dispatch_flops.{alias.name}" for alias in node.names)
            else:
                yield node.module


def floor_of(unit: str) -> int | None:
    return next((floor for floor, units in enumerate(FLOORS) if unit in units), None)


def climbs(unit: str, source: str) -> list[str]:
    """What a file of ``unit`` imports from its own floor or from above."""
    own = floor_of(unit)
    assert own is not None, f"{unit} stands on no floor"
    wrong = []
    for name in imports(source):
        package, _, rest = name.partition(".")
        other = rest.split(".")[0]
        if package != "dispatch_flops" or other in (unit, "__version__"):
            continue
        floor = floor_of(other)
        if floor is None or floor >= own:
            wrong.append(other)
    return wrong


FILES = sorted(path for path in PACKAGE.rglob("*.py") if unit_of(path) not in DOORS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    assert climbs(unit_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_reads_profiles_needs_no_torch(path: Path) -> None:
    if unit_of(path) in WITHOUT_TORCH:
        roots = {name.split(".")[0] for name in imports(path.read_text(encoding="utf-8"))}
        assert "torch" not in roots


def test_every_file_stands_on_one_floor() -> None:
    units = {unit_of(path) for path in PACKAGE.rglob("*.py")}
    assert {unit for floor in FLOORS for unit in floor} == units - set(DOORS)


@pytest.mark.parametrize(
    ("unit", "source", "wrong"),
    [
        ("tree", "from dispatch_flops.ledger import Ledger", ["ledger"]),
        ("tree", "import dispatch_flops.ledger", ["ledger"]),
        ("ledger", "from dispatch_flops import mode", ["mode"]),
        ("tracker", "def f():\n    from dispatch_flops.mode import x", ["mode"]),
        ("units", "from dispatch_flops.nowhere import x", ["nowhere"]),
        ("ledger", "from dispatch_flops.tree import Profile", []),
        ("formulas", "from dispatch_flops.tensors import numel", []),
        ("tree", "if TYPE_CHECKING:\n    from dispatch_flops.ledger import Ledger", []),
        ("tree", "import json", []),
    ],
)
def test_a_climb_is_seen(unit: str, source: str, wrong: list[str]) -> None:
    assert climbs(unit, textwrap.dedent(source)) == wrong
