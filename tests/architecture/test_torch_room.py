"""What torch does not document is named in ``_torch.py`` alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dispatch_flops
from dispatch_flops import _torch
from dispatch_flops.counting import dispatch_mode

PACKAGE = Path(dispatch_flops.__file__).parent
# A part begins with one underscore; ``torch.ops`` has operators, which are documented by schema.
UNDOCUMENTED = re.compile(r"torch\.(?!ops\.)(\w+\.)*_(?!_)")


def undocumented(source: str) -> Iterator[str]:
    """Yield what the file names of torch, imported or not, that begins with an underscore."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            if UNDOCUMENTED.match(name):
                yield name


def test_package_names_undocumented_torch_in_one_file_alone() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_torch.py"
        and (names := sorted(set(undocumented(path.read_text(encoding="utf-8")))))
    }
    assert found == {}, "give these a name in _torch.py, and a test in tests/torch_contract"


@pytest.mark.parametrize(
    "source",
    [
        "from torch._ops import OpOverload",
        "from torch.utils import _pytree as pytree",
        "def f():\n    import torch._dynamo",
        "nr = torch._C._autograd._get_sequence_nr",
    ],
)
def test_undocumented_name_is_found(source: str) -> None:
    assert list(undocumented(source))


@pytest.mark.parametrize(
    "source", ["torch.__file__", "torch.ops.aten._grouped_mm", "self._torch._C"]
)
def test_documented_name_is_not_found(source: str) -> None:
    assert not list(undocumented(source))


def test_what_is_called_at_every_operator_is_torchs_own_function() -> None:
    assert dispatch_mode._sequence_nr is torch._C._autograd._get_sequence_nr
    assert dispatch_mode._graph_task is torch._C._current_graph_task_id
    assert _torch.current_node is torch._C._current_autograd_node
