"""A saved profile is read, analysed and rendered where torch is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import dispatch_flops
from tests.helpers.trees import training_step

_SCRIPT = """
import sys, types
sys.modules["torch"] = None  # importing it raises ImportError
package = types.ModuleType("dispatch_flops")
package.__path__ = [sys.argv[1]]  # the package without its torch-facing top
sys.modules["dispatch_flops"] = package

from dispatch_flops import analysis, units
from dispatch_flops.renderers import View, chrome_trace, collapsed, csv, deepspeed, table
from dispatch_flops.profile import Profile

profile = Profile.from_json(sys.stdin.read()).check()
for text in (
    deepspeed.render(profile, View(fold=True)),
    table.render(profile),
    profile.to_json(),
    csv.render(profile),
    csv.render(profile, View(table="operators")),
    collapsed.render(profile),
    chrome_trace.render(profile),
):
    assert text
print(units.macs_text(analysis.diff(profile, profile).total.after.cost.macs))
"""


def test_reading_half_needs_no_torch() -> None:
    package = Path(dispatch_flops.__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(package)],
        input=training_step().to_json(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == f"{5 * 4 * 64 * 256 / 1000:.2f} KMACs\n"
