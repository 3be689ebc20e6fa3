"""The package is made of rooms: imports go downward only, and each room states its rule."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispatch_flops

PACKAGE = Path(dispatch_flops.__file__).parent

# From the ground up. A room imports from lower levels, and a file of a room from that room.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("errors", "units", "_torch"),
    ("profile",),
    ("operators", "analysis"),
    ("counting", "renderers"),
    ("compile", "timing", "memory"),
    ("profilers",),
    ("distributed",),  # a simulated rank is profiled by the counter that users call
    ("planning",),
    ("__init__",),
    ("integrations",),
    ("cli",),
    ("__main__",),
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
STANDARD_LIBRARY_ONLY = ("errors", "units", "profile", "analysis")
WITHOUT_TORCH = (*STANDARD_LIBRARY_ONLY, "renderers")
LOOSE = {"__init__.py", "__main__.py", "_torch.py", "errors.py", "py.typed", "units.py"}
# Python and notebooks ask a result for its text: methods with a local import.
EXCEPTIONS = {
    ("analysis/diff.py", "renderers.diff_table"),
    ("analysis/planned.py", "renderers.plan_table"),
    ("analysis/planned_generation.py", "renderers.plan_table"),
    ("profile/cluster.py", "renderers.cluster_table"),
    ("profile/cost_maps.py", "renderers.cost_table"),
    ("profile/profile.py", "renderers.notebook"),
    ("profile/profile.py", "renderers.overview"),
    ("profile/tree.py", "renderers.notebook"),
    ("profile/tree.py", "renderers.overview"),
}


def files(package: Path) -> Iterator[tuple[str, str]]:
    """Yield path and source of every file, the path relative to the package."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), path.read_text(encoding="utf-8")


def room_of(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


@functools.cache
def imports(source: str) -> list[str]:
    """Return every module that ``source`` imports at run time, wherever in it."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            assert node.module is not None
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def own_imports(path: str, source: str) -> Iterator[str]:
    """Yield what the file imports of the package, without the package's name."""
    for name in imports(source):
        package, _, rest = name.partition(".")
        if package == "dispatch_flops":
            yield rest.removesuffix(".__version__") if rest != "__version__" else "__init__"


def upward(path: str, source: str) -> list[str]:
    """Return the imports of the file from its own level's other rooms or from above."""
    own = room_of(path)
    found = []
    for name in own_imports(path, source):
        other = name.split(".")[0]
        if other == own or any(path == p and name.startswith(n) for p, n in EXCEPTIONS):
            continue
        if own not in LEVEL_OF or other not in LEVEL_OF or LEVEL_OF[other] >= LEVEL_OF[own]:
            found.append(f"{path} imports {name}")
    return found


def module_names(sources: dict[str, str]) -> dict[str, str]:
    """Return ``{dotted name: path}`` of the package's files."""
    return {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in sources
    }


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return which file imports which."""
    names = module_names(sources)
    edges: dict[str, set[str]] = {path: set() for path in sources}
    for path, source in sources.items():
        for name in own_imports(path, source):
            found = names.get(name) or names.get(name.rpartition(".")[0])
            if found and found != path and (path, name) not in EXCEPTIONS:
                edges[path].add(found)
    return edges


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Return the files that are part of an import circle."""
    waiting = {path: set(found) for path, found in edges.items()}
    while ready := [path for path, found in waiting.items() if not found]:
        for path in ready:
            del waiting[path]
        for found in waiting.values():
            found.difference_update(ready)
    while ends := [p for p in waiting if not any(p in found for found in waiting.values())]:
        for path in ends:
            del waiting[path]
    return sorted(waiting)


def violations(sources: dict[str, str]) -> list[str]:
    """Return every sentence that says how the files break the rules of the house."""
    found = [sentence for path, source in sources.items() for sentence in upward(path, source)]
    for path, source in sources.items():
        roots = {name.split(".")[0] for name in imports(source)}
        if room_of(path) in WITHOUT_TORCH and "torch" in roots:
            found.append(f"{path} imports torch")
        if path.endswith("/__init__.py") and path.count("/") == 1:
            lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
            if not lines or len(lines[0]) < 20:
                found.append(f"{path} does not state the rule of its room")
    circle = circles(graph(sources))
    if circle:
        found.append(f"an import circle: {', '.join(circle)}")
    return found


def test_package_keeps_the_rules_of_its_rooms() -> None:
    assert violations(dict(files(PACKAGE))) == []


def test_top_of_the_package_holds_rooms_and_ground_files_alone() -> None:
    loose = {path.name for path in PACKAGE.iterdir() if path.is_file()}
    assert loose <= LOOSE
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= LEVEL_OF.keys()


@pytest.mark.parametrize(
    ("sources", "violation"),
    [
        ({"profile/tree.py": "from dispatch_flops.counting.mode import x"}, "imports counting"),
        ({"profile/tree.py": "import dispatch_flops.timing"}, "imports timing"),
        (
            {"counting/a.py": "def f():\n    from dispatch_flops.timing.b import x"},
            "imports timing",
        ),
        ({"timing/a.py": "from dispatch_flops.compile import graph"}, "imports compile"),
        ({"units.py": "from dispatch_flops.nowhere import x"}, "imports nowhere"),
        ({"renderers/a.py": "import torch.nn"}, "imports torch"),
        ({"renderers/__init__.py": ""}, "does not state the rule"),
        (
            {
                "timing/a.py": "from dispatch_flops.timing.b import x",
                "timing/b.py": "from dispatch_flops.timing import a",
            },
            "an import circle: timing/a.py, timing/b.py",
        ),
    ],
)
def test_violation_is_found(sources: dict[str, str], violation: str) -> None:
    assert [sentence for sentence in violations(sources) if violation in sentence]


@pytest.mark.parametrize(
    "sources",
    [
        {"profile/tree.py": "import json\nfrom dispatch_flops.units import ratio"},
        {"timing/a.py": "import torch\nfrom dispatch_flops.counting.b import x"},
        {"profile/a.py": "if TYPE_CHECKING:\n    from dispatch_flops.timing.a import x"},
    ],
)
def test_downward_import_is_no_violation(sources: dict[str, str]) -> None:
    assert violations(sources) == []
