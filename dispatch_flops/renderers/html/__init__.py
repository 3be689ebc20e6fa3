"""Self-contained HTML page that loads nothing from the network.

Names are data, never markup. They are embedded as compressed JSON, and the page's script inserts
them as text. The page's content security policy allows only its own script, by
its hash, and blocks every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
import zlib
from typing import Any

from dispatch_flops.analysis.efficiency import machine_of
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.explanations import counting
from dispatch_flops.renderers.html.payload import payload
from dispatch_flops.renderers.text import one_line
from dispatch_flops.renderers.view import View

__all__ = ["render"]

_SCRIPTS = (
    "format.js",
    "tree.js",
    "table.js",
    "tree_table.js",
    "chart.js",
    "roofline.js",
    "memory.js",
    "page.js",
)
_SLOT = re.compile(r"@@(\w+)@@")


def render(profile: Profile, view: View | None = None) -> str:
    """Return the text of the HTML file: about 75 KB, and some 20 bytes per module.

    view: ``machine`` (for MFU and roofline) and ``title``.

    Example::

        view = View(machine=MACHINES["NVIDIA H200"], title="before the change")
        page = html.render(profile, view)
        Path("report.html").write_text(page)
    """
    view = view or View()
    heading = one_line(view.title or profile.root.class_name) or "Profile"
    data = payload(profile, machine_of(profile, view.machine), heading)
    parts_of_script = (_resource(name) for name in _SCRIPTS)
    script = "\n".join(('"use strict";', "(async () => {", *parts_of_script, "})();"))
    parts = {
        "title": html.escape(heading),
        "policy": _policy(script),
        "style": _resource("style.css"),
        "counting": html.escape(counting(profile.run.flops)),
        "data": embedded(data),
        "script": script,
    }
    # A single pass: what is inserted is not searched for slots.
    return _SLOT.sub(lambda slot: parts[slot[1]], _resource("page.html"))


def embedded(data: Any) -> str:
    """Return JSON, compressed with zlib, in base64: text that cannot end its script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _policy(script: str) -> str:
    """Return the policy that allows this script, inline styles and inline images."""
    return (
        f"default-src 'none'; script-src 'sha256-{_sha256(script)}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _resource(name: str) -> str:
    return importlib.resources.files(__name__).joinpath(name).read_text("utf-8")
