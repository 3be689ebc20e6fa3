"""Completion in bash, through argcomplete's own shell function."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import REPOSITORY

argcomplete = pytest.importorskip("argcomplete")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed"),
]
ASKED = r"""
eval "$REGISTERED"
COMP_POINT=${#COMP_LINE} COMP_TYPE=9
read -ra words <<< "$COMP_LINE"
[[ $COMP_LINE == *" " ]] && words+=("")
_python_argcomplete dispatch-flops "${words[-1]}" "${words[-2]}"
printf '%s\n' "${COMPREPLY[@]}"
"""


def completions(line: str, folder: Path) -> list[str]:
    """Return what bash offers after TAB at the end of ``line``."""
    program = folder / "dispatch-flops"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m dispatch_flops "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "REGISTERED": argcomplete.shellcode(["dispatch-flops"], shell="bash"),
        "COMP_LINE": line,
    }
    done = subprocess.run(
        ["bash", "-c", ASKED], env=environment, capture_output=True, text=True, check=True
    )
    return [word.rstrip() for word in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "line,offered",
    [
        ("dispatch-flops pro", ["profile"]),
        ("dispatch-flops profile net.py:make --optimizer ", ["adamw", "adam", "sgd"]),
        ("dispatch-flops check p.json --max-p", ["--max-params"]),
        ("dispatch-flops profile net.py:make --machine me", ["measure"]),
        ("dispatch-flops sweep net.py:make --machine Tes", ["Tesla\\ T4", "Tesla\\ V100-SXM2"]),
    ],
)
def test_bash_offers_what_fits(line: str, offered: list[str], tmp_path: Path) -> None:
    assert completions(line, tmp_path) == offered
